"""Rung 6: attention block by block (flash attention).

Softmax needs the largest score of a row before the first weight can be computed, so a plain implementation writes all
scores to memory: rows times context, for each head. The way out keeps three things for each row, the largest score so
far, the sum of the weights, and the weighted sum of values, and scales them down when a larger score comes. Each block
of keys is read once and forgotten. Blocks can be taken by different programs and merged in the same way: that is how a
decode of a long context uses a whole GPU.

In Quire: `kernels/attention/` (native C, Triton, Hopper); the merge of parts is in the same folder.
"""

# %%
import torch
from model import NEW, check, forward, load, prompts, softmax_attention
from torch import Tensor

BLOCK = 8
State = tuple[Tensor, Tensor, Tensor]  # largest score [H, T], sum of weights [H, T], weighted values [H, T, D]


# %%
def begin(q: Tensor) -> State:
    """Return the state of rows that have read nothing."""
    heads, rows = q.shape[1], len(q)
    return torch.full((heads, rows), -torch.inf), torch.zeros(heads, rows), torch.zeros(heads, rows, q.shape[2])


def read(state: State, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> State:
    """Return the state after a block of keys [B, H, D]. seen [T, B]: whether a row may read a key"""
    largest, total, out = state
    scores = torch.einsum("thd,bhd->htb", q, keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    new = torch.maximum(largest, scores.amax(-1))
    base = new.masked_fill(new == -torch.inf, 0)  # a row that has read nothing yet
    scale, weights = (largest - base).exp(), (scores - base[..., None]).exp()
    total = total * scale + weights.sum(-1)
    out = out * scale[..., None] + torch.einsum("htb,bhd->htd", weights, values)
    return new, total, out


def merge(one: State, other: State) -> State:
    """Return the state of rows that have read the keys of both."""
    new = torch.maximum(one[0], other[0])
    base = new.masked_fill(new == -torch.inf, 0)
    scales = [(state[0] - base).exp() for state in (one, other)]
    total = one[1] * scales[0] + other[1] * scales[1]
    return new, total, one[2] * scales[0][..., None] + other[2] * scales[1][..., None]


def flash(q: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
    """Return what `softmax_attention` returns, in two halves of the context that know nothing of each other."""
    keys, values = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (keys, values))
    blocks = [slice(at, at + BLOCK) for at in range(0, len(keys), BLOCK)]
    halves = []
    for part in (blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]):
        state = begin(q)
        for block in part:
            at = torch.arange(len(keys))[block]
            state = read(state, q, keys[block], values[block], at <= first + torch.arange(len(q))[:, None])
        halves.append(state)
    _, total, out = merge(*halves)
    return (out / total[..., None]).transpose(0, 1)


# %% [markdown]
# The same numbers as a plain softmax, up to rounding, and the same tokens.

# %%
q, k, v = torch.randn(5, 4, 64), torch.randn(37, 2, 64), torch.randn(37, 2, 64)
torch.testing.assert_close(flash(q, k, v, 32), softmax_attention(q, k, v, 32), rtol=1e-5, atol=1e-6)
config, weights = load()


def answer(ids: list[int], new: int) -> list[int]:
    """Return the greedy continuation, with a contiguous cache as on rung 1."""
    cache, text, done = dict[int, tuple[Tensor, Tensor]](), list(ids), 0

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in cache and done:
            k, v = (torch.cat(pair) for pair in zip(cache[layer], (k, v), strict=True))
        cache[layer] = k, v
        return flash(q, k, v, done)

    while len(text) < len(ids) + new:
        logits = forward(config, weights, torch.tensor(text[done:]), torch.arange(done, len(text)), attend)
        done = len(text)
        text.append(int(logits[-1].argmax()))
    return text[len(ids) :]


# %%
check([answer(ids, NEW) for ids in prompts()])
