"""Time of the products of adapters (LoRA) in decode steps of Llama-3.1-8B, by tiling, in one process on a GPU.

    python tools/measure_lora.py [--batches 1,64,256] [--ranks 16,64] [--adapters 1,16] [--forms default,joined]
                                 [--layers 32] [--base] [--each]

A CUDA graph has the four linear layers of each of --layers layers; every layer has its own matrices, so that they are
cold, and they are views of the slots' memory as an engine has them. Rows have the adapters in turn. Rows of output, in
us per layer, medians of --runs replays:

    alone   shrink and expand alone, beside the floor: the bytes of the matrices over --bandwidth GB/s
    plain   with --base: norms, products and activations in bfloat16, as layers launch them, without attention
    with    with --base: the same and adapters; in brackets what they add, and the share of a step that stays, for a
            step in which "plain" and --rest us per layer of other kernels (attention, sampling) were there before
    fork    "with", but shrink runs beside the product on another stream, launched before it;  after: behind it
    each    with --each: a chain of shrink alone and one of expand alone, for each linear layer

--forms: names of FORMS, changes of the default. Each is compared with the reference before it is timed; a wrong or
changing result ends the run. One process takes about 15 s and a second for each kernel that it compiles.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.activation.triton import gated
from quire.kernels.linear import cuda as linear
from quire.kernels.lora import TALL, TILE, AdapterRows, AdapterWeights, OutputRun, group_rows, ref, tiles_of
from quire.kernels.lora import triton as lora
from quire.kernels.norm.triton import rms_norm
from quire.kernels.streams import Fork, side_stream

HIDDEN, INNER, SLOTS = 4096, 14336, 16
LINEARS = {  # name -> inputs, and outputs of its modules
    "qkv": (HIDDEN, (4096, 1024, 1024)),
    "output": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (INNER, INNER)),
    "down": (INNER, (HIDDEN,)),
}
EPS = 1e-5


class Form(NamedTuple):
    """A way to launch the products.

    walk          changes the tiling
    tile, early   of `AdapterRows`
    pdl           dependent launches are used
    fused         the activation is part of expand
    """

    walk: Callable[[lora.Tiling], lora.Tiling] = lambda one: one
    tile: int = TILE
    early: bool = True
    pdl: bool = True
    fused: bool = True


FORMS = {
    "default": Form(),
    "unfused": Form(fused=False),
    "fewer": Form(lambda one: one._replace(parts=max(1, one.parts // 2))),
    "more": Form(lambda one: one._replace(parts=min(32, 2 * one.parts))),
    "narrow": Form(lambda one: one._replace(outputs=max(16, one.outputs // 2))),
    "wide": Form(lambda one: one._replace(outputs=2 * one.outputs)),
    "shallow": Form(lambda one: one._replace(deep=one.deep // 2)),
    "deep": Form(lambda one: one._replace(deep=2 * one.deep)),
    "staged": Form(lambda one: one._replace(stages=one.stages + 1)),
    "tall": Form(tile=TALL),
    "late": Form(early=False),
    "undependent": Form(pdl=False),
}


class Steps:
    """Inputs of steps of `batch` rows over layers with adapters of a rank.

    memory   [slots, numbers] of all matrices;  base  of each layer the weights by name, or nothing
    """

    def __init__(self, weights: list[dict[str, AdapterWeights]], base: list[dict[str, Tensor]], batch: int, count: int):
        self.weights, self.base = weights, base
        self.slots = (np.arange(batch) % count).astype(np.int32)
        random = torch.Generator("cuda").manual_seed(batch)
        made = {"generator": random, "device": "cuda", "dtype": torch.bfloat16}
        self.x = {size: torch.randn(batch, size, **made) for size in (HIDDEN, INNER)}  # type: ignore[call-overload]
        self.y = {
            name: torch.randn(batch, sum(sizes), **made)  # type: ignore[call-overload]
            for name, (_, sizes) in LINEARS.items()
        }
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def rows(self, form: Form, *, known: bool = False) -> AdapterRows:
        """Return the rows as a captured step has them. known: the host knows the groups"""
        order, groups = group_rows(self.slots)
        batch, made = len(order), tiles_of(groups, form.tile)
        tiles = np.zeros((-(-batch // form.tile) + min(batch, SLOTS), 3), np.int32)
        tiles[: len(made)] = made
        sent = [torch.from_numpy(one).cuda() for one in (self.slots, order, tiles, np.array([len(made)], np.int32))]
        slots, order_, tiles_, used = sent
        return AdapterRows(slots, order_, tiles_, groups if known else (), used, form.early, form.tile)

    def add(self, y: Tensor, x: Tensor, weights: AdapterWeights, rows: AdapterRows, form: Form) -> Tensor:
        """Add the products of adapters to y, or return the activation of the sum."""
        walk = form.walk(lora.tiling(weights, rows, len(x)))
        return self.expand(y, lora.shrink(x, weights, rows, walk=walk), weights, rows, form)

    def expand(self, y: Tensor, inner: Tensor, weights: AdapterWeights, rows: AdapterRows, form: Form) -> Tensor:
        """Add the products of B to y, or return the activation of the sum."""
        if form.fused and lora.fuses(weights):
            return lora.expand_gated(y, inner, weights, rows, "silu")
        lora.expand(y, inner, weights, rows, walk=form.walk(lora.tiling(weights, rows, len(y))))
        return y

    def check(self, form: Form) -> None:
        """Compare the products of the last layer with the reference, and with themselves."""
        rows, known = self.rows(form), self.rows(form, known=True)
        for name, weights in self.weights[-1].items():
            x, found = self.x[LINEARS[name][0]], [self.y[name].clone() for _ in range(3)]
            truth = self.y[name].double()
            ref.expand(truth, ref.shrink(x, weights, known), weights, known)
            found = [self.add(y, x, weights, rows, form) for y in found]
            if found[0].shape != truth.shape:
                gate, up = truth.chunk(2, 1)
                truth = torch.nn.functional.silu(gate) * up
            torch.testing.assert_close(found[0].double(), truth, rtol=3e-2, atol=3e-2)
            assert all(torch.equal(found[0], y) for y in found[1:]), f"{name}: results change"

    def alone(self, form: Form) -> Callable[[], None]:
        """Return the products of adapters alone."""
        rows = self.rows(form)

        def run() -> None:
            for layer in self.weights:
                for name, weights in layer.items():
                    self.add(self.y[name], self.x[LINEARS[name][0]], weights, rows, form)

        return run

    def one(self, form: Form, name: str, half: str) -> Callable[[], None]:
        """Return shrink, or expand, of a linear layer of all layers."""
        rows, x, y = self.rows(form), self.x[LINEARS[name][0]], self.y[name]
        walk = form.walk(lora.tiling(self.weights[0][name], rows, len(x)))
        inner = [lora.shrink(x, layer[name], rows, walk=walk) for layer in self.weights]

        def run() -> None:
            for layer, found in zip(self.weights, inner, strict=True):
                if half == "shrink":
                    lora.shrink(x, layer[name], rows, walk=walk)
                else:
                    self.expand(y, found, layer[name], rows, form)

        return run

    def plain(self) -> Callable[[], None]:
        """Return the linear layers without adapters."""

        def run() -> None:
            h, attended = self.x[HIDDEN].clone(), self.x[HIDDEN]
            for base in self.base:
                linear.run_norm(h, self.norm, EPS, base["qkv"], None)
                h = linear.run_add(attended, base["output"], None, h)
                inner = linear.run_norm_gated(h, self.norm, EPS, base["gate_up"], None)
                h = linear.run_add(inner, base["down"], None, h)

        return run

    def adapted(self, form: Form, order: str) -> Callable[[], None]:
        """Return the linear layers with adapters, as layers launch them. order: see `ORDERS`"""
        rows = self.rows(form)

        def around(product: Callable[[], Tensor], x: Tensor, weights: AdapterWeights) -> Tensor:
            walk = form.walk(lora.tiling(weights, rows, len(x)))
            with Fork(None if order == "with" else side_stream(x.device)) as forked:
                y = product() if order == "after" else None
                with forked.beside:
                    inner = lora.shrink(x, weights, rows, walk=walk)
                y = product() if y is None else y
            return self.expand(y, inner, weights, rows, form)

        def layer(h: Tensor, base: dict[str, Tensor], own: dict[str, AdapterWeights]) -> Tensor:
            given, attended = rms_norm(h, self.norm, EPS), self.x[HIDDEN]
            around(lambda: linear.run(given, base["qkv"], None), given, own["qkv"])
            h = around(lambda: linear.run_add(attended, base["output"], None, h), attended, own["output"])
            normed = rms_norm(h, self.norm, EPS)
            both = around(lambda: linear.run(normed, base["gate_up"], None), normed, own["gate_up"])
            inner = both if both.shape[1] == INNER else gated(both)
            return around(lambda: linear.run_add(inner, base["down"], None, h), inner, own["down"])

        def run() -> None:
            h = self.x[HIDDEN].clone()
            for base, own in zip(self.base, self.weights, strict=True):
                h = layer(h, base, own)

        return run


ORDERS = ("with", "fork", "after")  # of shrink and the product: one behind the other; beside it, launched before, after


def adapters(layers: int, rank: int) -> list[dict[str, AdapterWeights]]:
    """Return the matrices of SLOTS random adapters."""
    sizes = {name: (len(out) * rank * width, sum(out) * rank) for name, (width, out) in LINEARS.items()}
    numbers = layers * sum(map(sum, sizes.values()))
    memory = torch.empty(SLOTS, numbers, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    ranks, at, found = torch.full((SLOTS,), rank, dtype=torch.int32, device="cuda"), 0, []
    for _ in range(layers):
        layer = {}
        for name, (width, out) in LINEARS.items():
            of_a, of_b = sizes[name]
            firsts = np.cumsum((0, *out)).tolist()
            runs = tuple(OutputRun(number, firsts[number], size, firsts[number]) for number, size in enumerate(out))
            a = memory[:, at : at + of_a].unflatten(1, (len(out), rank, width))
            b = memory[:, at + of_a : at + of_a + of_b].unflatten(1, (sum(out), rank))
            layer[name] = AdapterWeights(a, b, ranks.clone(), runs)
            at += of_a + of_b
        found.append(layer)
    return found


def timed(work: Callable[[], None], layers: int, runs: int) -> float:
    """Return the us of a layer of `work` in a CUDA graph: the median of its replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        work()
    times = []
    for _ in range(runs + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    del graph
    return 1000 * statistics.median(times[3:]) / layers


@torch.inference_mode()
def main() -> None:
    """Print a row for each rank, number of adapters, batch and form."""
    asked = parse()
    batches, counts = ([int(one) for one in given.split(",")] for given in (asked.batches, asked.adapters))
    began, base, plain = time.perf_counter(), list[dict[str, Tensor]](), dict[int, float]()
    if asked.base:
        for _ in range(asked.layers):
            shapes = {name: (sum(out), width) for name, (width, out) in LINEARS.items()}
            base.append({name: linear.pack(random_weight(*shape)) for name, shape in shapes.items()})
    for rank in (int(one) for one in asked.ranks.split(",")):
        weights = adapters(asked.layers, rank)
        numbers = sum(one.a[0].numel() + one.b[0].numel() for one in weights[0].values())
        for batch in batches:
            if base and batch not in plain:
                plain[batch] = timed(Steps(weights, base, batch, 1).plain(), asked.layers, asked.runs)
                print(f"plain: batch {batch:3}: {plain[batch]:7.2f} us", flush=True)
            for count in (one for one in counts if one <= max(batch, min(counts))):
                steps = Steps(weights, base, batch, count)
                floor = 2e-3 * numbers * min(count, batch) / asked.bandwidth
                for name in asked.forms.split(","):
                    pdl.ENABLED = FORMS[name].pdl
                    row = f"rank {rank:3}, {count:2} adapters, batch {batch:3}, {name}"
                    report(row, steps, FORMS[name], floor, plain.get(batch), asked)
                    pdl.ENABLED = True
        del weights, steps
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s in all")


def report(row: str, steps: Steps, form: Form, floor: float, plain: float | None, asked: argparse.Namespace) -> None:
    """Check and time a form, and print its rows."""
    try:
        steps.check(form)
    except RuntimeError as error:  # of Triton: a form that does not fit the GPU's registers or shared memory
        print(f"{row}: does not run: {str(error)[:90]}", flush=True)
        return
    alone = timed(steps.alone(form), asked.layers, asked.runs)
    print(f"{row}: alone {alone:7.2f} us (floor {floor:.2f})", end="", flush=True)
    if plain is not None:
        whole = plain + asked.rest
        for order in ORDERS:
            found = timed(steps.adapted(form, order), asked.layers, asked.runs)
            share = whole / (whole + found - plain)
            print(f", {order} {found:7.2f} (+{found - plain:.2f}, {share:.3f})", end="", flush=True)
    print()
    for name in LINEARS if asked.each else ():
        halves = [timed(steps.one(form, name, half), asked.layers, asked.runs) for half in ("shrink", "expand")]
        print(f"    {name:8} shrink {halves[0]:6.2f}, expand {halves[1]:6.2f}", flush=True)


def random_weight(rows: int, width: int) -> Tensor:
    """Return a random weight, whose products with numbers about 1 are about 0.1."""
    return torch.empty(rows, width, device="cuda", dtype=torch.bfloat16).normal_(0, 0.1 / width**0.5)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--batches", "1,64,256"), ("--ranks", "16,64"), ("--adapters", "1,16")):
        parser.add_argument(name, default=value)
    parser.add_argument("--forms", default="default", help=", ".join(FORMS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--bandwidth", type=float, default=4300.0)
    parser.add_argument("--rest", type=float, default=25.0)
    parser.add_argument("--base", action="store_true")
    parser.add_argument("--each", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
