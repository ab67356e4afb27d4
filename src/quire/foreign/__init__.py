"""Decoders of transformers that Quire has no file for (the fallback): found, inspected, and run with our kernels.

The model is built by transformers without weights. Its layers are traced to the operations of PyTorch that they run.
Parts that equal an operation of ours on random inputs are replaced by it; the rest of a layer stays the module's.

    skeleton.py      the model of transformers, with parameters on the meta device, or the reason why it cannot run
    capture.py       a run of its base model: the inputs of its layers, and its calls of attention
    leaves.py        the operations by which traced layers call linear layers, norms and attention
    trace.py         a layer as a graph of operations
    numbers.py       graphs evaluated with random numbers
    heads.py         proof: the way from projections to attention is a choice of rows, norms of heads and a rotation
    halves.py        proof: the way between two linear layers is an activation of ours
    inspect.py       the whole inspection, and its result as arguments of a model
    program.py       a graph as steps that call our layers
    blocks.py        modules of a decoder that run these programs

transformers is imported here, in functions, and by nothing else on the way of an engine.
"""
