"""The words of a `Scheme` in messages. No torch."""

from quire.contracts.scheme import Scheme

NAMES = {"e4m3": "FP8", "int8": "INT8", "w4": "4-bit", "w8": "8-bit", "e2m1": "MXFP4"}
INPUTS = {
    "": "",
    "token": "activations per token",
    "tensor": "activations by a stored scale",
    "group": "activations per token and 128 channels",
}


def scheme_words(scheme: Scheme) -> str:
    """Return words for a scheme: "FP8 in blocks of 128 x 128, activations per token and 128 channels"."""
    more = (
        INPUTS[scheme.inputs],
        "scales of activations are powers of two" * scheme.ue8m0,
        "zero points" * scheme.zeros,
        "activation order" * scheme.order,
    )
    return ", ".join((weight_words(scheme), *filter(None, more)))


def weight_words(scheme: Scheme) -> str:
    """Return words for the weight alone: "FP8 per channel"."""
    high, wide = scheme.block
    shared = {(0, 0): "per tensor", (1, 0): "per channel"}.get((high, wide), f"in groups of {wide}")
    shared = f"in blocks of {high} x {wide}" if scheme.kind == "fp8 block" else shared
    return f"{'NVFP4' if scheme.factor else NAMES[scheme.values]} {shared}"
