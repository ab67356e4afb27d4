"""Rung 1: a contiguous KV cache for one request.

Attention reads the key and the value of every token before. Without a cache, each new token would compute all of them
again: n tokens cost n * (n + 1) / 2 passes through the layers instead of n. So they are computed once and kept, here
in a tensor as long as the longest text. Most of it stays empty, and nobody else can use it: rung 3 repairs that.

In Quire: the cache's memory is `kvstore/arena.py`; prefill and decode are one call of the model, `layers/stack.py`.
"""

# %%
import torch
from model import NEW, forward, load, prompts, softmax_attention, truth
from torch import Tensor

LONGEST = 64

# %% [markdown]
# The cache is [layers, 2, LONGEST, KV heads, D]: keys, then values.

# %%
config, weights = load()
shape = (config["num_hidden_layers"], 2, LONGEST, config["num_key_value_heads"], config["head_dim"])


def answer(ids: list[int], new: int) -> list[int]:
    """Return the greedy continuation: one pass over the prompt (prefill), then one for each token (decode)."""
    cache, text = torch.zeros(shape), list(ids)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache[layer, 0, done : done + len(k)], cache[layer, 1, done : done + len(k)] = k, v
        keys, values = cache[layer, :, : done + len(k)]
        return softmax_attention(q, keys, values, done)

    done = 0
    while len(text) < len(ids) + new:
        fresh = torch.tensor(text[done:])
        logits = forward(config, weights, fresh, torch.arange(done, len(text)), attend)
        done = len(text)
        text.append(int(logits[-1].argmax()))
    return text[len(ids) :]


# %%
ids = prompts()[0]
found = answer(ids, NEW)
assert found == truth(ids), found
used = (len(ids) + NEW - 1) / LONGEST
print(f"{NEW} tokens are those of transformers; {used:.0%} of the cache was used")
