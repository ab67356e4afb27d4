"""Rung 7: quantized linear layers.

A decode waits for weights, so fewer bytes are more tokens. Each row of a matrix is stored as int8 and one scale, its
largest number over 127; the product multiplies integers and scales at the end: y = (x q) * scale. Activations may be
rounded in the same way, row by row, which lets the product run in integers, but adds an error that the weights alone
do not have.

In Quire: `quantization/` reads the formats, `kernels/linear/` multiplies; `quire explain` says who decided the format
of each matrix, `quire weights MODEL NAME` shows its numbers, and `quire verify` compares with the dequantized model.
"""

# %%
import torch
import torch.nn.functional as F
from model import forward, load, prompts, softmax_attention
from torch import Tensor

config, weights = load()
matrices = [name for name, one in weights.items() if name.endswith("_proj.weight")]


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values and a scale for each row. The error of a number is at most half a scale."""
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (rows / scale).round().to(torch.int8), scale


packed = {name: quantize(weights[name]) for name in matrices}
for name, (values, scale) in packed.items():
    assert bool(((values * scale - weights[name]).abs() <= scale / 2 + 1e-7).all())


# %%
def only_weights(x: Tensor, name: str) -> Tensor:
    """Return x W^T with weights in int8: the scale of a row of W is the scale of a column of the result."""
    values, scale = packed[name]
    return F.linear(x, values.float()) * scale.T


def in_integers(x: Tensor, name: str) -> Tensor:
    """Return x W^T in integers: x is rounded, too, each row by its own scale."""
    values, scale = packed[name]
    rows, own = quantize(x)
    return (rows.int() @ values.int().T).float() * own * scale.T


def dequantized(x: Tensor, name: str) -> Tensor:
    """Return the product with the weights as the rounded numbers that they stand for."""
    values, scale = packed[name]
    return F.linear(x, values * scale)


# %%
def logits_of(ids: list[int], linear: object) -> Tensor:
    """Return the logits of a prompt's tokens."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax_attention(q, k, v, 0)

    return forward(config, weights, torch.tensor(ids), torch.arange(len(ids)), attend, linear)  # type: ignore[arg-type]


ids = prompts()[0]
plain, exact = logits_of(ids, None), logits_of(ids, dequantized)
torch.testing.assert_close(logits_of(ids, only_weights), exact, rtol=1e-4, atol=1e-3)
numbers = sum(weights[name].numel() for name in matrices)
for words, made in (("weights", only_weights), ("weights and activations", in_integers)):
    found = logits_of(ids, made)
    error = float((found - plain).norm() / plain.norm())
    same = float((found.argmax(-1) == plain.argmax(-1)).float().mean())
    assert error < 0.1, error
    print(f"int8 {words}: logits differ by {error:.2%}, {same:.0%} of the best tokens stay")
print(f"matrices: {2 * numbers / 1e6:.1f} MB in bfloat16, {numbers / 1e6:.1f} MB in int8")
