"""Rung 5: chunked prefill.

A prompt of 8,192 tokens takes as long as fifty decodes of an 8B model on an H200. If it runs in one pass, every other
request waits for it.
So a step has a budget of tokens: decodes come first, one token each, and what is left goes to a piece of a prompt.
Nothing changes for attention: a chunk is a few new tokens behind a context, as a decode is.

In Quire: `engine/scheduler.py` (`--max-num-batched-tokens`); `quire trace` shows the chunks of a step.
"""

# %%
import torch
from model import NEW, check, forward, load, prompts, softmax_attention
from torch import Tensor

LONGEST, BUDGET = 64, 5
config, weights = load()


class Request:
    """A text that grows; `ready` of its tokens have been computed."""

    def __init__(self, ids: list[int], new: int) -> None:
        self.text, self.wanted, self.ready = list(ids), len(ids) + new, 0
        shape = (config["num_hidden_layers"], 2, LONGEST, config["num_key_value_heads"], config["head_dim"])
        self.cache = torch.zeros(shape)

    @property
    def left(self) -> int:
        """Tokens of the text that have not been computed; 1 in a request that decodes."""
        return len(self.text) - self.ready


# %%
def plan(running: list[Request]) -> list[tuple[Request, int]]:
    """Return how many tokens of each request the next step computes: decodes first, then prompts in order."""
    left, chosen = BUDGET, list[tuple[Request, int]]()
    for one in sorted(running, key=lambda one: one.left > 1):
        count = min(one.left, left)
        if count:
            chosen.append((one, count))
            left -= count
    return chosen


def step(chosen: list[tuple[Request, int]]) -> None:
    """Compute the chosen tokens; a request whose text is computed to its end gets a token more."""
    counts = [count for _, count in chosen]
    ids = torch.tensor([token for one, count in chosen for token in one.text[one.ready : one.ready + count]])
    positions = torch.cat([torch.arange(one.ready, one.ready + count) for one, count in chosen])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        read = []
        for (one, count), own_q, own_k, own_v in zip(
            chosen, q.split(counts), k.split(counts), v.split(counts), strict=True
        ):
            end = one.ready + count
            one.cache[layer, 0, one.ready : end], one.cache[layer, 1, one.ready : end] = own_k, own_v
            read.append(softmax_attention(own_q, *one.cache[layer, :, :end], one.ready))
        return torch.cat(read)

    logits = forward(config, weights, ids, positions, attend)
    ends = torch.tensor(counts).cumsum(0) - 1
    for (one, count), token in zip(chosen, logits[ends].argmax(-1).tolist(), strict=True):
        one.ready += count
        if one.ready == len(one.text):
            one.text.append(token)


# %%
every = [Request(ids, NEW) for ids in prompts()]
running, sizes = list(every), list[int]()
while running:
    chosen = plan(running)
    sizes.append(sum(count for _, count in chosen))
    step(chosen)
    running = [one for one in running if len(one.text) < one.wanted]
check([one.text[-NEW:] for one in every])
assert max(sizes) <= BUDGET
print(f"{len(sizes)} steps of at most {BUDGET} tokens; the longest prompt has {max(map(len, prompts()))}")
