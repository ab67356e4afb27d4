"""Activations of the feed-forward layer, gated (GLU variants; Shazeer, 2020) or not, and the gate of attention.

gated(gate_up [T, 2I], act, up=None) -> [T, I]
    gate is the first half of a row, up the second. With `up` [T, I], a tensor of its own, the first one is gate [T, I].
    `act` names the function of the two, a word of `ACTS`:
    silu         gate * sigmoid(gate) * up
    gelu_tanh    gelu(gate) * up with the tanh approximation of GELU (Hendrycks and Gimpel, 2016),
                 gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
    swiglu_oai   (up' + 1) * gate' * sigmoid(1.702 gate'), gate' = min(gate, 7), up' = up cut to [-7, 7] (gpt-oss)
    gelu         gelu(gate) * up, gelu(x) = x / 2 * (1 + erf(x / sqrt(2)))
    NaN in gate or up gives NaN. Every implementation has every activation, and so has every fused kernel of
    `quire.kernels.linear`; those of `quire.kernels.experts` name theirs in their features.

pointwise(x [T, I], act) -> [T, I]
    The activation of an MLP without a gate. `act` is a word of `POINTWISE`: the first three are those of gates with up
    = 1, "relu" is max(x, 0), and "relu2" max(x, 0)^2 (So et al., arXiv 2109.08668). NaN gives NaN.

opened(x [T, N], gate [T, N]) -> [T, N]
    x * sigmoid(gate), as gated attention has it (Qiu et al., arXiv 2505.06708).
"""

UNGATED = ("relu2",)  # of Quire's families: MLPs without a gate, whose first projection has I rows instead of 2 I
ACTS = ("silu", "gelu_tanh", "swiglu_oai", "gelu")
POINTWISE = ("silu", "gelu_tanh", "gelu", "relu", "relu2")
NUMBERS = {act: number for number, act in enumerate((*ACTS, "relu", "relu2"))}  # in C code, see vectors.h


def checked(act: str, known: tuple[str, ...] = ACTS) -> str:
    """Return `act`. Raises ValueError for a name that is not among those known."""
    if act not in known:
        raise ValueError(f"activation {act!r} does not exist: use one of {', '.join(known)}")
    return act


def number_of(act: str, known: tuple[str, ...] = ACTS) -> int:
    """Return the number of an activation in C code. Raises ValueError as `checked` does."""
    return NUMBERS[checked(act, known)]
