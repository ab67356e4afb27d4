"""`Scheme` under the name of its room, and its words in messages. No torch.

The class lies in `contracts`, because every `Param` has one.
"""

from quire.contracts.scheme import Scheme as Scheme

NAMES = {"e4m3": "FP8", "int8": "INT8", "w4": "4-bit", "w8": "8-bit"}
INPUTS = {"": "", "token": "activations per token", "tensor": "activations by a stored scale",
          "group": "activations per token and 128 channels"}  # fmt: skip
RULES = {"": "activations are not quantized", "token": "activations quantized per token",
         "tensor": "activations quantized by a stored scale",
         "group": "activations quantized per token and 128 channels"}  # fmt: skip


def scheme_words(scheme: Scheme) -> str:
    """Return words for a scheme: "FP8 in blocks of 128 x 128, activations per token and 128 channels"."""
    more = (INPUTS[scheme.inputs], "scales of activations are powers of two" * scheme.ue8m0,
            "zero points" * scheme.zeros, "activation order" * scheme.order)  # fmt: skip
    return ", ".join((_values(scheme), *filter(None, more)))


def product_words(scheme: Scheme, weight: str, inputs: str) -> str:
    """Return words for a product in a trace: what happens to the weight, and to the activations.

    weight   text about the weight: "stays packed, widened in registers"
    inputs   text about quantized activations: "by a kernel before the product"
    """
    rule = RULES[scheme.inputs] + f", {inputs}" * bool(scheme.inputs)
    return f"weight of {_values(scheme)} {weight}; {rule}"


def _values(scheme: Scheme) -> str:
    high, wide = scheme.block
    shared = {(0, 0): "per tensor", (1, 0): "per channel"}.get((high, wide), f"in groups of {wide}")
    shared = f"in blocks of {high} x {wide}" if scheme.kind == "fp8 block" else shared
    return f"{NAMES[scheme.values]} {shared}"
