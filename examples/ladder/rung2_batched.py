"""Rung 2: many requests in one pass (continuous batching).

A decode reads all weights for a single token: the GPU waits for its memory. With 64 requests in the pass the weights
are read once for 64 tokens. Requests have different lengths, so their tokens are laid one behind the other, without
padding: only attention has to know which tokens belong together. A request enters between two passes, and leaves when
it is done.

In Quire: `engine/scheduler.py` decides who is in a step; `contracts/step.py` is the record of a step.
"""

# %%
import torch
from model import NEW, check, forward, load, prompts, softmax_attention
from torch import Tensor

LONGEST = 64
config, weights = load()


class Request:
    """A text that grows. cache: as on rung 1, of its own"""

    def __init__(self, ids: list[int], new: int) -> None:
        self.text, self.wanted, self.done = list(ids), len(ids) + new, 0
        shape = (config["num_hidden_layers"], 2, LONGEST, config["num_key_value_heads"], config["head_dim"])
        self.cache = torch.zeros(shape)


# %%
def step(running: list[Request]) -> None:
    """Compute the new tokens of all requests in one pass, and append a token to each."""
    counts = [len(one.text) - one.done for one in running]
    ids = torch.tensor([token for one in running for token in one.text[one.done :]])
    positions = torch.cat([torch.arange(one.done, len(one.text)) for one in running])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        read = []
        for one, own_q, own_k, own_v in zip(running, q.split(counts), k.split(counts), v.split(counts), strict=True):
            end = one.done + len(own_k)
            one.cache[layer, 0, one.done : end], one.cache[layer, 1, one.done : end] = own_k, own_v
            read.append(softmax_attention(own_q, *one.cache[layer, :, :end], one.done))
        return torch.cat(read)

    logits = forward(config, weights, ids, positions, attend)
    ends = torch.tensor(counts).cumsum(0) - 1  # a request samples from the logits of its last token alone
    for one, token in zip(running, logits[ends].argmax(-1).tolist(), strict=True):
        one.done = len(one.text)
        one.text.append(token)


# %% [markdown]
# The requests arrive one after the other: prefills and decodes share passes.

# %%
waiting = [Request(ids, NEW) for ids in prompts()]
every, running, passes = list(waiting), list[Request](), 0
while waiting or running:
    if waiting:
        running.append(waiting.pop(0))
    step(running)
    running = [one for one in running if len(one.text) < one.wanted]
    passes += 1
check([one.text[-NEW:] for one in every])
print(f"{passes} passes; one request after the other would take {NEW * len(every)}")
