"""Rung 8: tensor parallelism on two processes.

Each process holds half of every matrix. Queries, keys, values, gate and up are cut by rows, so each process has some
of the heads and some of the inner numbers, and needs nothing from the other to compute with them. The next matrix is
cut by columns: its result is a sum of two parts, and an all-reduce adds them, twice in each layer. The KV cache is cut
with its heads. Rows and columns are those of a stored matrix [outputs, inputs]: Megatron and vLLM call the first cut
column parallel, and the second row parallel.

In Quire: `plan/placement.py` decides the slices, `distributed/` sums, `quire explain -tp 2 --rank 1` shows what a rank
reads.
"""

# %%
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model import NEW, check, forward, load, prompts, softmax_attention
from torch import Tensor

RANKS = 2
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")


# %%
def slices(weights: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return this rank's part of the weights; norms and the embedding are whole on both."""
    found = dict(weights)
    for name, one in weights.items():
        part = name.split(".")[-2]
        if part in BY_ROWS + BY_COLUMNS:
            found[name] = one.chunk(RANKS, 0 if part in BY_ROWS else 1)[rank].contiguous()
    return found


def run(rank: int, store: str, out: str) -> None:
    """Answer the prompts as rank `rank`; rank 0 writes the answers."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{store}", timeout=timedelta(seconds=120), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    config, weights = load()
    own = slices(weights, rank)

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ own[name].T
        if name.split(".")[-2] in BY_COLUMNS:
            dist.all_reduce(y)  # both ranks add their parts, and both have the sum
        return y

    answers = []
    for ids in prompts():
        cache, text, done = dict[int, tuple[Tensor, Tensor]](), list(ids), 0

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if done:  # noqa: B023
                k, v = (torch.cat(pair) for pair in zip(cache[layer], (k, v), strict=True))  # noqa: B023
            cache[layer] = k, v  # noqa: B023
            return softmax_attention(q, k, v, done)  # noqa: B023

        while len(text) < len(ids) + NEW:
            fresh, positions = torch.tensor(text[done:]), torch.arange(done, len(text))
            logits = forward(config, own, fresh, positions, attend, linear)
            done = len(text)
            text.append(int(logits[-1].argmax()))  # both ranks have the same logits, so they choose the same token
        answers.append(text[len(ids) :])
    if rank == 0:
        torch.save(answers, out)
    dist.destroy_process_group()


# %%
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (f"{folder}/store", f"{folder}/answers"), RANKS)
        answers = torch.load(Path(folder, "answers"))
    check(answers)
    config, _ = load()
    sums, size = 2 * config["num_hidden_layers"], 4 * config["hidden_size"]
    print(f"{RANKS} processes, each with half of the heads: {sums} sums of {size:,} bytes for a token")
