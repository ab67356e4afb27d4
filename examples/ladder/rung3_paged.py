"""Rung 3: a paged KV cache.

Rungs 1 and 2 keep room for the longest text that a request might have. Here all requests share one pool of small
blocks; a request takes a block when its text reaches one, and its block table says where they lie. Nothing is lost but
a part of each request's last block, and blocks that are given back serve the next request.

In Quire: `kv/allocator.py` gives blocks, `kernels/step/` writes block tables, `kernels/attention/` reads them.
"""

# %%
import torch
from model import NEW, check, forward, load, prompts, softmax_attention
from torch import Tensor

BLOCK, BLOCKS = 8, 24
config, weights = load()
layers, heads, size = config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]
pool = torch.full((layers, 2, BLOCKS, BLOCK, heads, size), torch.nan)  # what nobody wrote must not be read
free = list(range(BLOCKS))


class Request:
    """A text that grows. table: its blocks, in the order of its tokens"""

    def __init__(self, ids: list[int], new: int) -> None:
        self.text, self.wanted, self.done, self.table = list(ids), len(ids) + new, 0, list[int]()


# %%
def step(running: list[Request]) -> None:
    """Compute the new tokens of all requests in one pass, and append a token to each."""
    for one in running:
        while len(one.table) * BLOCK < len(one.text):
            one.table.append(free.pop())
    counts = [len(one.text) - one.done for one in running]
    ids = torch.tensor([token for one in running for token in one.text[one.done :]])
    positions = torch.cat([torch.arange(one.done, len(one.text)) for one in running])
    places = torch.tensor([one.table[p // BLOCK] for one in running for p in range(one.done, len(one.text))])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool[layer, 0, places, positions % BLOCK], pool[layer, 1, places, positions % BLOCK] = k, v
        read = []
        for one, own in zip(running, q.split(counts), strict=True):
            keys, values = pool[layer][:, one.table].flatten(1, 2)[:, : len(one.text)]
            read.append(softmax_attention(own, keys, values, one.done))
        return torch.cat(read)

    logits = forward(config, weights, ids, positions, attend)
    for one, token in zip(running, logits[torch.tensor(counts).cumsum(0) - 1].argmax(-1).tolist(), strict=True):
        one.done = len(one.text)
        one.text.append(token)


# %%
every = [Request(ids, NEW) for ids in prompts()]
running = list(every)
while running:
    step(running)
    for one in running:
        if len(one.text) == one.wanted:
            free.extend(one.table)
    running = [one for one in running if len(one.text) < one.wanted]
check([one.text[-NEW:] for one in every])
most = sum(len(one.table) for one in every)
assert sorted(free) == list(range(BLOCKS)), "a block was lost"
print(f"{most} blocks of {BLOCK} tokens at once; contiguous caches of 64 tokens would be {64 * len(every) // BLOCK}")
