"""Tilings of a decode's kernels at one row, measured inside the chain of a dense layer.

There each kernel reads its first weights while the one before it ends.

    python tools/measure_tilings.py [--models qwen3-0.6b,qwen3-8b,qwen3-8b-fp8] [--context 640] [--layers 28] [--json F]

A CUDA graph has the five kernels of --layers layers with weights of their own: projection, attention, output, gate and
up, down. One kernel after the other gets each of its tilings, the others keep their best so far. A tiling must be 1%
faster than the best so far, in three turns of both. Prints us a layer for each tiling, and the best.

Attention alone: `--only attention`. The best tilings belong into `gemv.tiles`, `scaled_few.walk_of` and
`decode_attention.TILINGS`, whose rules must then be measured as a whole by tools/measure_launches.py.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.joined import decode_attention
from quire.kernels.linear import gemv, scaled, scaled_few
from quire.kernels.linear.epilogue import Epilogue
from quire.kernels.linear.gemv import Tiles, bucket
from quire.kernels.linear.scaled_few import Walk
from quire.kernels.pack.matrix import QuantizedMatrix

BLOCK = 128  # tokens of a KV block
FP8 = Scheme(values="e4m3", block=(128, 128), inputs="group")


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense layer. eight_bits: weights are FP8 in blocks."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int = 128
    eight_bits: bool = False

    def products(self) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of each product; of gate and up, outputs of one of both."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.dim, self.hidden),
            "output": (self.hidden, self.heads * self.dim),
            "gate_up": (self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }


SHAPES = {
    "qwen3-0.6b": Shape(1024, 3072, 16, 8),
    "qwen3-8b": Shape(4096, 12288, 32, 8),
    "qwen3-8b-fp8": Shape(4096, 12288, 32, 8, eight_bits=True),
    "tiny": Shape(128, 256, 4, 2, 64),
    "tiny-fp8": Shape(128, 256, 4, 2, 64, eight_bits=True),
}
Tilings = dict[str, Any]


def main() -> int:
    """Print the measurements of each model. Return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-8b,qwen3-8b-fp8")
    parser.add_argument("--only", default="attention,output,gate_up,down,qkv", help="kernels, in this order")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=110.0, help="for each model")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = {}
    for name in asked.models.split(","):
        found[name] = search(Chain(SHAPES[name], asked), name, asked)
        if asked.json is not None:
            asked.json.write_text(json.dumps(found, indent=1))
    print(json.dumps(found), flush=True)
    return 0


class Chain:
    """The kernels of some layers at one row, with random weights."""

    def __init__(self, shape: Shape, asked: argparse.Namespace) -> None:
        self.shape, self.device = shape, torch.device(asked.device)
        torch.manual_seed(0)
        self.layers = [
            {name: self._weight(name, *size) for name, size in shape.products().items()} for _ in range(asked.layers)
        ]
        self.norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=self.device)
        self.head_norm = torch.ones(shape.heads + shape.kv_heads, shape.dim, dtype=torch.bfloat16, device=self.device)
        self.angle = torch.ones(1, shape.dim, dtype=torch.bfloat16, device=self.device)
        blocks = -(-asked.context // BLOCK)
        arena = torch.randn(
            asked.layers, 2, blocks + 1, shape.kv_heads, BLOCK, shape.dim, device=self.device
        ).bfloat16()
        self.caches = [KVView(own[0], own[1]) for own in arena]
        ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=self.device)  # noqa: E731
        self.meta = AttentionMeta(
            ints(0, 1),
            ints(asked.context),
            torch.arange(1, blocks + 1, dtype=torch.int32, device=self.device)[None],
            ints(blocks * BLOCK + (asked.context - 1) % BLOCK).long(),
            max_query_len=1,
        )
        self.start = torch.randn(1, shape.hidden, device=self.device).bfloat16()

    def _weight(self, name: str, n: int, k: int) -> Any:
        rows = n << (name == "gate_up")
        weight = torch.randn(rows, k, device=self.device).mul_(k**-0.5)
        if not self.shape.eight_bits:
            return weight.bfloat16()
        scale = torch.full((-(-rows // 128), -(-k // 128)), 0.01, device=self.device)
        values = (weight / 0.01).clamp_(-448, 448).to(torch.float8_e4m3fn)
        return scaled.pack(QuantizedMatrix(FP8, values, scale))

    def run(self, tilings: Tilings) -> Tensor:
        """Launch the chain with these tilings. Return the states [1, hidden]."""
        hidden, shape, meta = self.start.clone(), self.shape, replace(self.meta, plans={})
        decode_attention.TILINGS[shape.dim] = tilings["attention"]
        for layer, kv in zip(self.layers, self.caches, strict=True):
            qkv = self._product(hidden, layer["qkv"], tilings["qkv"], norm=True).view(1, -1, shape.dim)
            heads = decode_attention.HeadInputs(self.head_norm, 1e-6, self.angle, self.angle)
            out = decode_attention.attention(qkv, heads, kv, meta, shape.dim**-0.5).view(1, -1)
            self._product(out, layer["output"], tilings["output"], residual=hidden)
            inner = self._product(hidden, layer["gate_up"], tilings["gate_up"], norm=True, act="silu")
            self._product(inner, layer["down"], tilings["down"], residual=hidden)
        return hidden

    def _product(
        self, x: Tensor, weight: Any, walk: Any, *, norm: bool = False, act: str = "", residual: Tensor | None = None
    ) -> Tensor:
        factor = self.norm if norm else None
        if not self.shape.eight_bits:
            return gemv.product(x, weight, residual=residual, norm=factor, eps=1e-6, act=act, out=residual, walk=walk)
        n = weight.values.shape[0] >> (act != "")
        y = x.new_empty(1, n) if residual is None else residual
        scaled_few.walk_of = lambda k, gated: walk
        return scaled_few.product(x, weight, Epilogue(y, None, act, residual), norm=factor, eps=1e-6)

    def first(self) -> Tilings:
        """Return the tilings of the package."""
        found: Tilings = {"attention": TILINGS[self.shape.dim]}
        for name, (n, k) in self.shape.products().items():
            gated = name == "gate_up"
            found[name] = WALK_OF(k, gated) if self.shape.eight_bits else gemv.tiles(1, n, k, gated)
        return found

    def others(self, name: str) -> Iterator[Any]:
        """Yield tilings of a kernel that may be better."""
        if name == "attention":
            for keys, warps, programs in itertools.product((32, 64, 128), (4, 8), (1, 2, 3)):
                if keys * self.shape.dim // warps <= 4096:  # registers
                    yield decode_attention.Tiling(keys, warps, programs)
            return
        (n, k), gated = self.shape.products()[name], name == "gate_up"
        whole = bucket(k)
        if self.shape.eight_bits:
            sizes = (1, 2, 4, 8), (whole, whole // 2), (2, 4, 8, 16), (2, 3, 4, 6)
            for block_n, deep, warps, programs in itertools.product(*sizes):
                each = block_n * deep * (1 + gated) // (32 * warps)
                if 32 <= each <= 128 and 512 <= deep <= 8192 and warps * programs <= 32:
                    yield Walk(block_n, deep, warps, programs)
            return
        for block_n, deep, warps in itertools.product((1, 2, 4, 8), (whole, whole // 2, whole // 4), (1, 2, 4, 8, 16)):
            each = block_n * deep * (1 + gated) // (32 * warps)
            if 16 <= each <= 64 and 256 <= deep <= 4096 and n // block_n <= 8192:
                yield Tiles(block_n, deep, warps)


WALK_OF, TILINGS = scaled_few.walk_of, dict(decode_attention.TILINGS)


def search(chain: Chain, name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Return us a layer with the package's tilings and with the best, and the best."""
    until, best = time.monotonic() + asked.seconds, chain.first()
    wanted = chain.run(best).float()
    assert wanted.isfinite().all()
    start = least = timed(chain, best, asked)
    print(f"{name}: {start:.2f} us a layer with {best}", flush=True)
    for kernel in asked.only.split(","):
        tried: list[tuple[float, Any]] = []
        for other in chain.others(kernel):
            if time.monotonic() > until or other == best[kernel]:
                continue
            given = best | {kernel: other}
            states = chain.run(given).float()
            error = float((states - wanted).abs().max() / wanted.abs().max())
            assert error < 0.1, (kernel, other, error)
            tried.append((timed(chain, given, asked), other))
        for spent, other in sorted(tried, key=lambda one: one[0])[:8]:
            print(f"{name} {kernel}: {spent:.2f} us a layer with {other}", flush=True)
        spent, other = min(tried, key=lambda one: one[0], default=(least, None))
        if other is not None and spent < 0.99 * least:
            turns = [(timed(chain, best, asked), timed(chain, best | {kernel: other}, asked)) for _ in range(3)]
            before, after = (statistics.median(times) for times in zip(*turns, strict=True))
            if after < 0.99 * before:
                best, least = best | {kernel: other}, after
                print(f"{name} {kernel}: takes {other}, {before:.2f} -> {after:.2f}", flush=True)
    last = statistics.median(timed(chain, best, asked) for _ in range(3))
    again = statistics.median(timed(chain, chain.first(), asked) for _ in range(3))
    print(f"{name}: {again:.2f} -> {last:.2f} us a layer with {best}", flush=True)
    return {"before": again, "after": last, "best": {kernel: repr(own) for kernel, own in best.items()}}


def timed(chain: Chain, tilings: Tilings, asked: argparse.Namespace) -> float:
    """Return the us of a layer, out of a graph."""
    if asked.device != "cuda":
        start = time.perf_counter()
        chain.run(tilings)
        return (time.perf_counter() - start) * 1e6 / asked.layers
    chain.run(tilings)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run(tilings)
    return statistics.median(replayed(graph.replay) for _ in range(15)) / asked.layers


def replayed(replay: Callable[[], None]) -> float:
    """Return the us of a replay: the mean of five behind each other."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    first.record()
    for _ in range(5):
        replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 200


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
