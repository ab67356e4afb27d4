"""Cases of `quire bench kernels`: operations with the shapes of a model, each beside the library's version.

A new operation is one generator in `quire.kernels.cases`, or here if it needs a layer or the worker, and a name in
`OPERATIONS`. `num_bytes` are the bytes that must move (inputs once, outputs once), `flops` the operations that must be
done. They give the floor; a time below it shows a mistake here.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.args.layers import NormArgs
from quire.bench.kernel_setup import Setup
from quire.contracts.params import Param
from quire.contracts.sampling import SamplerSpec
from quire.kernels.cases import EPS, FEW_ROWS, LOGIT_ROWS, KernelCase, Pair, made
from quire.kernels.cases.latent import latent_cases
from quire.kernels.cases.operations import (
    activation_cases,
    attention_cases,
    heads_cases,
    linear_cases,
    norm_cases,
    shared_cases,
    step_cases,
)
from quire.kernels.cases.quantized import expert_cases, quantized_cases
from quire.kernels.cases.recurrent import delta_cases, mamba_cases, shortconv_cases
from quire.kernels.sampling import ref, triton
from quire.kernels.sampling.sampler import Sampler
from quire.kernels.sampling.table import SamplingTable
from quire.layers.context import StepContext
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import GatedLinear, Linear
from quire.layers.norm import Norm

# kind -> (sampling parameters, the PyTorch operations of the baseline)
SAMPLING: dict[str, tuple[dict[str, Any], str]] = {
    "greedy": ({"temperature": 0.0}, "argmax"),
    "unfiltered": ({}, "softmax, noise, argmax"),
    "top-p": ({"top_p": 0.9}, "sort, cumsum, noise"),
    "top-k, top-p": ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, "topk, cumsum, noise"),
}


def layer_cases(setup: Setup) -> Iterator[KernelCase]:
    """Yield cases of projections fused with norm, gate or residual, as a decoder layer runs them for few rows."""
    shapes = setup.projections
    build = setup.build(*(Param(f"{name}.weight", shape, ()) for name, shape in shapes.items()))

    def pair(name: str, rows: int) -> Pair:
        (n, k), gated, added = shapes[name], name == "gate_up", name in ("o", "down")
        layer, weight = (GatedLinear if gated else Linear)(name, build), setup.randn(n, k, scale=k**-0.5)
        step = StepContext(torch.empty(0, dtype=torch.int64), (), [])  # read by no projection of one request
        norm, x, residual = Norm("norm", NormArgs(eps=EPS), build), setup.randn(rows, k), setup.randn(rows, n)
        norm.take({"weight": setup.randn(k)}, 0)
        layer.take({"weight": weight.clone()}, 0)
        ours = residual.clone()  # grows with every call

        def library() -> Tensor:
            y = F.linear(x if added else F.rms_norm(x, (k,), norm.weight, EPS), weight)
            return residual + y if added else F.silu(y[:, : n // 2]) * y[:, n // 2 :] if gated else y

        return Pair(lambda: layer.add(x, ours, step) if added else layer.normed(x, norm, step), library)

    for name, words in (("qkv", "norm"), ("o", "add"), ("gate_up", "norm, gate"), ("down", "add")):
        n, k = shapes[name]
        for rows in (rows for rows in setup.rows if rows <= FEW_ROWS):
            other = {"norm": k + rows * n, "add": 2 * rows * n, "norm, gate": k + rows * n // 2}[words]
            yield KernelCase(
                shape=f"{name} ({words}) {rows} x {k} -> {n}",
                num_bytes=(n * k + rows * k + other) * setup.item,
                flops=2 * rows * n * k,
                baseline=f"F.linear, {words}",
                make=made(pair, name, rows),
            )


def embedding_cases(setup: Setup) -> Iterator[KernelCase]:
    """Yield cases of the token embedding lookup."""
    vocab, dim = setup.args.vocab_size, setup.args.hidden_size
    build, weight = setup.build(Param("embed.weight", (vocab, dim), ())), setup.randn(vocab, dim)
    layer = VocabEmbedding("embed", None, build)
    layer.take({"weight": weight}, 0)

    def pair(rows: int) -> Pair:
        ids = torch.randint(vocab, (rows,), device=setup.device)
        return Pair(lambda: layer(ids), lambda: F.embedding(ids, weight))

    for rows in setup.rows:
        yield KernelCase(
            shape=f"{rows} x {dim} of {vocab}",
            num_bytes=rows * (2 * dim * setup.item + 8),
            baseline="F.embedding",
            make=made(pair, rows),
        )


def sampler_cases(setup: Setup) -> Iterator[KernelCase]:
    """Yield cases of sampling. Quire's PyTorch sampler is the reference: the timed baseline draws other noise."""
    vocab, device = setup.args.vocab_size, setup.device

    def pairs(kind: str, rows: int, count: int) -> list[Pair]:
        slots, history = torch.arange(rows, device=device), torch.zeros((rows, 1), dtype=torch.int32, device=device)
        table, ones = SamplingTable(rows, vocab, device), torch.ones_like(slots)
        for slot in range(rows):
            spec = SamplerSpec(seed=slot, num_prompt=1, **SAMPLING[kind][0])
            ((_, _, words),) = table.admit(slot, spec)
            table.rows[slot] = torch.from_numpy(words).to(device)
        mode = table.mode(np.arange(rows, dtype=np.int32))
        ours, theirs = (
            Sampler(made.operations(rows, vocab, device), table, slots, ones, history) for made in (triton, ref)
        )

        def drawn(sampler: Sampler, logits: Tensor) -> Tensor:
            sampler.sample(logits, mode)
            return sampler.tokens

        run, reference = partial(drawn, ours), partial(drawn, theirs)

        given = [torch.randn(rows, vocab, device=device).mul_(3) for _ in range(count)]
        return [Pair(partial(run, one), partial(_drawn, one, spec), partial(reference, one)) for one in given]

    for kind, (_, library) in SAMPLING.items():
        for rows in (rows for rows in setup.rows if rows <= LOGIT_ROWS):
            yield KernelCase(
                shape=f"{kind} {rows} x {vocab}",
                num_bytes=rows * (4 * vocab + 8),
                baseline=library,
                make=partial(pairs, kind, rows),
            )


def _drawn(logits: Tensor, spec: SamplerSpec) -> Tensor:
    """Sample tokens of logits [R, V] with PyTorch.
    It divides by exponential noise, as `torch.multinomial` does. That function itself would wait for the GPU."""
    if not spec.temperature:
        return logits.argmax(-1)
    scaled = logits / spec.temperature
    narrow = spec.top_k or spec.top_p < 1
    if narrow:
        scaled, ids = scaled.topk(spec.top_k) if spec.top_k else scaled.sort(descending=True)
    weight = scaled.softmax(-1)
    if narrow:
        weight = weight.masked_fill(weight.cumsum(-1) - weight >= spec.top_p, 0)
    drawn = (weight / torch.empty_like(weight).exponential_()).argmax(-1, keepdim=True)
    return (ids.gather(1, drawn) if narrow else drawn).squeeze(1)


OPERATIONS: dict[str, Callable[[Setup], Iterator[KernelCase]]] = {
    "norm": norm_cases,
    "heads": heads_cases,
    "activation": activation_cases,
    "linear": linear_cases,
    "quantized": quantized_cases,
    "experts": expert_cases,
    "layer": layer_cases,
    "embedding": embedding_cases,
    "attention": attention_cases,
    "shared": shared_cases,
    "latent": latent_cases,
    "delta": delta_cases,
    "mamba": mamba_cases,
    "shortconv": shortconv_cases,
    "sampler": sampler_cases,
    "step": step_cases,
}
