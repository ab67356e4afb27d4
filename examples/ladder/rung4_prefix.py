"""Rung 4: prefix caching.

Keys and values of a token depend on the tokens before it and on nothing else. So a full block can serve any request
whose text begins with the same tokens. A block's name is a hash of its tokens and of the name of the block before it:
equal names mean equal beginnings, and one lookup per block finds the longest shared one. Blocks whose request has
ended stay until the room is needed; the one that was used longest ago goes first.

In Quire: `kv/prefix.py` and `kv/hashing.py`; `quire trace --after` and the live page say why a prefix was not reused.
"""

# %%
import torch
from model import NEW, check, forward, load, prompts, softmax_attention
from torch import Tensor

BLOCK, BLOCKS = 4, 40
config, weights = load()
layers, heads, size = config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]
pool = torch.full((layers, 2, BLOCKS, BLOCK, heads, size), torch.nan)
free = list(range(BLOCKS))
named: dict[int, int] = {}  # name of a full block -> the block; oldest use first


def names(text: list[int]) -> list[int]:
    """Return the names of the full blocks of a text."""
    found, before = list[int](), 0
    for begin in range(0, len(text) - len(text) % BLOCK, BLOCK):
        before = hash((before, *text[begin : begin + BLOCK]))
        found.append(before)
    return found


def take() -> int:
    """Return a free block; without one, that of the oldest name. (A request that runs would have to hold its own.)"""
    return free.pop() if free else named.pop(next(iter(named)))


# %%
def answer(ids: list[int], new: int) -> tuple[list[int], int]:
    """Return the greedy continuation, and the number of prompt tokens that were not computed."""
    text, table = list(ids), list[int]()
    for name in names(ids[:-1]):  # the last token is computed: its logits are needed
        if name not in named:
            break
        table.append(named[name])
        named[name] = named.pop(name)  # used just now
    shared = done = len(table) * BLOCK

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(done, len(text))
        places = torch.tensor(table)[positions // BLOCK]
        pool[layer, 0, places, positions % BLOCK], pool[layer, 1, places, positions % BLOCK] = k, v
        keys, values = pool[layer][:, table].flatten(1, 2)[:, : len(text)]
        return softmax_attention(q, keys, values, done)

    while len(text) < len(ids) + new:
        while len(table) * BLOCK < len(text):
            table.append(take())
        logits = forward(config, weights, torch.tensor(text[done:]), torch.arange(done, len(text)), attend)
        done = len(text)
        text.append(int(logits[-1].argmax()))
    known = names(text[:done])
    for name, block in zip(known, table, strict=False):  # the last block is not full: it has no name
        named.setdefault(name, block)
    free.extend(set(table) - set(named.values()))
    return text[len(ids) :], shared


# %%
answers, skipped = zip(*(answer(ids, NEW) for ids in prompts()), strict=True)
check(list(answers))
again, shared = answer(prompts()[0], NEW)
assert again == answers[0] and not any(skipped)
assert shared == (len(prompts()[0]) - 1) // BLOCK * BLOCK
print(f"the first prompt again: {shared} of {len(prompts()[0])} tokens were not computed")
