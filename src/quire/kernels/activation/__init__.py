"""The gated activation of the feed-forward layer (GLU variants; Shazeer, 2020), and the gate of attention's output.

gated(gate_up [T, 2I], act, up=None) -> [T, I]
    gate is the first half of a row, up the second. With `up` [T, I], a tensor of its own, the first one is gate [T, I].
    `act` names the function of the two, a word of `ACTS`:
    silu         gate * sigmoid(gate) * up
    gelu_tanh    gelu(gate) * up with the tanh approximation of GELU (Hendrycks and Gimpel, 2016),
                 gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
    swiglu_oai   (up' + 1) * gate' * sigmoid(1.702 gate'), gate' = min(gate, 7), up' = up cut to [-7, 7] (gpt-oss)
    NaN in gate or up gives NaN. Every implementation has every activation, and so has every fused kernel of
    `quire.kernels.linear`; those of `quire.kernels.experts` name theirs in their features.

squared(x [T, I]) -> [T, I]
    max(x, 0)^2, the activation "relu2" of an MLP without a gate (So et al., arXiv 2109.08668).

opened(x [T, N], gate [T, N]) -> [T, N]
    x * sigmoid(gate), as gated attention has it (Qiu et al., arXiv 2505.06708).
"""

UNGATED = ("relu2",)  # activations of MLPs without a gate, whose first projection has I rows instead of 2 I
ACTS = ("silu", "gelu_tanh", "swiglu_oai")


def checked(act: str) -> str:
    """Return `act`. Raises ValueError for a name that is not in `ACTS`."""
    if act not in ACTS:
        raise ValueError(f"activation {act!r} does not exist: use one of {', '.join(ACTS)}")
    return act


def number_of(act: str) -> int:
    """Return the number of an activation in C code (`gated_of` in vectors.h). Raises ValueError as `checked` does."""
    return ACTS.index(checked(act))
