"""One folder per operation: signature and contract, `ref.py` (the specification), fast implementations, inputs.

Knows tensors and what a device can do. Knows nothing of models, layers, checkpoints or requests.
"""
