"""Words for a product of quantized weights in a trace; see `way` of the kernels. No torch."""

from quire.contracts.scheme import Scheme
from quire.quantization.scheme_words import weight_words

RULES = {
    "": "activations are not quantized",
    "token": "activations quantized per token",
    "tensor": "activations quantized by a stored scale",
    "group": "activations quantized per token and 128 channels",
}


def product_words(scheme: Scheme, weight: str, inputs: str) -> str:
    """Return words for a product in a trace: what happens to the weight, and to the activations.

    weight   text about the weight: "stays packed, widened in registers"
    inputs   text about quantized activations: "by a kernel before the product"
    """
    rule = RULES[scheme.inputs] + f", {inputs}" * bool(scheme.inputs)
    return f"weight of {weight_words(scheme)} {weight}; {rule}"
