"""The kernel functions that a model calls beside its layers (`kinds/`): packing, embedding, head. No torch.

A test compares the list with the calls of a real step.
"""

from collections.abc import Iterator

from quire.args.checkpoint import ModelArgs
from quire.kernels.activation import UNGATED
from quire.plan.kinds.interfaces import LAYER_NORM, RMS_NORM, SUM, Call, Features


def pack_function(args: ModelArgs, name: str, linear: Features, in_place: bool) -> str:
    """Return the name of the function that packs parameter `name`, such as "linear.pack"; "" if it is not packed.

    linear     features of the kernel of each linear layer, by the layer's name
    in_place   True: experts are loaded into the kernel's memory without packing
    """
    if name.endswith((".experts.gate_up", ".experts.down")):
        return "" if in_place else "experts.put"
    if name.endswith(".router.weight"):
        return "linear.pack"
    others = ("norm.weight", "_after.weight", "sinks.weight", ".kv_up.weight", "factor.weight")
    if not name.endswith(".weight") or name.endswith(others):
        return ""
    if name == "inputs.embed.weight" or (name == "embed.weight" and not args.tie_word_embeddings):
        return ""
    gated = name.endswith("gate_up.weight") and "gated" in linear(name.rpartition(".")[0])
    gated = gated and not any(one.act in UNGATED or one.gate_scale != 1 for one in args.layers)
    return "linear.pack_gated" if gated else "linear.pack"


def embedding_calls(args: ModelArgs, linear: Features, sliced: bool = False) -> Iterator[Call]:
    """Yield the calls of the embedding, from token ids to hidden states.

    linear   name of a linear layer -> features of its kernel
    sliced   True: each rank has some of the embedding's rows, and the results are summed over ranks
    """
    rows = "plain" in linear("embed") or args.tie_word_embeddings and "rows" in linear("embed")
    yield Call("linear.rows" if rows else "torch.nn.functional.embedding", ("embed.weight",))
    if sliced:
        yield Call(SUM)
    if args.inputs:
        yield Call("linear.run", ("inputs.project.weight",))
        yield Call(RMS_NORM, ("inputs.norm.weight",))
        rows = "plain" in linear("inputs.embed")
        yield Call("linear.rows" if rows else "torch.nn.functional.embedding", ("inputs.embed.weight",))
        if sliced:
            yield Call(SUM)


def head_calls(args: ModelArgs, sliced: bool = False) -> Iterator[Call]:
    """Yield the kernel calls of the final norm and the head, from hidden states of the sampled rows to logits.

    sliced   each rank has the logits of some ids, and sampling exchanges them
    """
    yield Call(LAYER_NORM if args.norm.centered else RMS_NORM, ("norm.weight",))
    yield Call("linear.run_float", ("embed.weight" if args.tie_word_embeddings else "head.weight",))
    if sliced:
        yield Call("tp.all_gather", when="best ids, or logits")
