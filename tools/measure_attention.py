"""Time of a layer's attention on a GPU, for a head size, a number of heads and some steps; TFLOP/s or TB/s of each.

    python tools/measure_attention.py DIM HEADS/KV_HEADS [STEP ...] [--window 1024] [--cap 50] [--kernels hopper]
                                      [--gib 4]

A step is SEQUENCES x ROWS @ CONTEXT, such as 1x8192@32768 (a chunk of a prompt) or 64x1@1024 (decodes). Calls are
replayed from a CUDA graph, 15 times; the median counts, without the plan of the step. Decodes read other blocks in
every call of a graph, so that the L2 cache does not hold them. Blocks are drawn across an arena of --gib GiB; larger
steps read a block more than once.
"""

import argparse
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView

STEPS = "1x8192@8192 1x8192@32768 2x4096@4096 1x512@16384 1x1@1024 1x1@32768 64x1@1024 256x1@1024".split()
SIZE = 128  # tokens of a block
READ = 400 << 20  # bytes that a graph of decodes reads, at least
MOST_CALLS = 24  # calls of a graph


@dataclass(frozen=True)
class Step:
    """A step of `count` sequences of `rows` query rows each, at the end of contexts of `length` tokens."""

    count: int
    rows: int
    length: int

    @property
    def decodes(self) -> bool:
        """True if the step is measured by the bytes that it reads."""
        return self.rows <= 8

    def pairs(self, window: int | None) -> int:
        """Return the number of pairs (row, key that it sees)."""
        ends = range(self.length - self.rows + 1, self.length + 1)
        return self.count * sum(min(end, window or end) for end in ends)

    def keys(self, window: int | None) -> int:
        """Return the number of keys that the step reads."""
        return self.count * min(self.length, (window or self.length) + self.rows - 1)


def make_meta(kv: KVView, step: Step) -> AttentionMeta:
    """Return the step with random blocks."""
    device, blocks = kv.k.device, -(-step.length // SIZE)
    num_blocks, needed = kv.k.shape[0], step.count * blocks
    rounds = [torch.randperm(num_blocks, device=device) for _ in range(-(-needed // num_blocks))]
    return AttentionMeta(
        query_start=torch.arange(step.count + 1, dtype=torch.int32, device=device) * step.rows,
        seq_lens=torch.full((step.count,), step.length, dtype=torch.int32, device=device),
        block_tables=torch.cat(rounds)[:needed].int().view(step.count, blocks),
        kv_slots=torch.zeros(step.count * step.rows, dtype=torch.int64, device=device),
        max_query_len=step.rows,
        decode_len=step.rows if step.decodes else 1,
    )


def microseconds(call: Callable[[], object], rounds: int = 15) -> float:
    """Return the median time of a call, replayed from a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph, taken = torch.cuda.CUDAGraph(), list[float]()
    with torch.cuda.graph(graph):
        call()
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3)
    return sorted(taken[1:])[rounds // 2]


def measure(asked: argparse.Namespace, arena: Tensor, step: Step) -> str:
    """Return the line of a step."""
    heads, kv_heads = map(int, asked.heads.split("/"))
    part = 2 * kv_heads * SIZE * asked.dim
    pages = arena[: len(arena) // part * part].view(-1, 2, kv_heads, SIZE, asked.dim)
    kv = KVView(pages[:, 0], pages[:, 1])
    num_bytes = step.keys(asked.window) * 2 * kv_heads * asked.dim * arena.element_size()
    calls = max(1, min(MOST_CALLS, -(-READ // num_bytes))) if step.decodes else 1
    metas = [make_meta(kv, step) for _ in range(calls)]
    q = torch.randn(step.count * step.rows, heads, asked.dim, dtype=arena.dtype, device=arena.device)
    attention = importlib.import_module(f"quire.kernels.attention.{asked.kernels}").paged_attention
    scale, limits = asked.dim**-0.5, (asked.window, asked.cap)
    took = microseconds(lambda: [attention(q, kv, meta, scale, *limits) for meta in metas]) / calls
    operations = 4 * heads * asked.dim * step.pairs(asked.window)
    rate = f"{num_bytes / took / 1e6:.2f} TB/s" if step.decodes else f"{operations / took / 1e6:.0f} TFLOP/s"
    return f"{asked.heads} heads of {asked.dim}, {step.count}x{step.rows}@{step.length}: {took:.1f} us, {rate}"


def main() -> None:
    """Print a line for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dim", type=int)
    parser.add_argument("heads")
    parser.add_argument("steps", nargs="*", default=STEPS)
    parser.add_argument("--window", type=int)
    parser.add_argument("--cap", type=float)
    parser.add_argument("--kernels", default="hopper", choices=["hopper", "triton"])
    parser.add_argument("--gib", type=int, default=4)
    asked = parser.parse_args()
    arena = torch.empty(asked.gib << 29, dtype=torch.bfloat16, device="cuda")
    for piece in arena.split(1 << 28):
        piece.normal_()
    for text in asked.steps:
        count, rows, length = map(int, re.split("[x@]", text))
        print(measure(asked, arena, Step(count, rows, length)), flush=True)


if __name__ == "__main__":
    main()
