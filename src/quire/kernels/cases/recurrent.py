"""Cases of recurrent layers, for decodes and for prompts: the gated delta rule, Mamba 2, short convolutions."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from quire.args.delta import DeltaArgs
from quire.args.mamba import MambaArgs
from quire.args.shortconv import ShortConvArgs
from quire.kernels.cases import EPS, KernelCase, KernelSetup, Pair, Result, made
from quire.kernels.delta import DeltaForm, DeltaWeights, ref
from quire.kernels.mamba import MambaForm, MambaWeights
from quire.kernels.mamba import ref as mamba
from quire.kernels.shortconv import ShortConvWeights
from quire.kernels.shortconv import ref as shortconv
from quire.kernels.states import StateMeta, StateView

TAPS, MOST_CPU_ROWS = 4, 2048
QWEN = DeltaForm(key_heads=16, heads=32, key_dim=128, value_dim=128, eps=EPS)  # Qwen3.5 9B
KIMI = DeltaForm(key_heads=32, heads=32, key_dim=128, value_dim=128, eps=EPS, act="sigmoid")  # Kimi-Linear 48B
NEMOTRON = MambaForm(heads=64, groups=8, head_dim=64, state_dim=128, eps=EPS)  # Nemotron 3 Nano
LFM = ShortConvArgs(width=2048, taps=3)  # LFM2 1.2B
LIBRARY = "fla, rule alone"  # flash-linear-attention, without convolution, norms of heads and gates


def delta_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield cases with decays of heads, then of channels, with the sizes of the model's recurrent layers.

    A model without such layers gets the sizes of Qwen3.5 9B, and of Kimi-Linear.
    """
    for by_channel, known in ((False, QWEN), (True, KIMI)):
        mixers = (one for one in setup.args.mixers if isinstance(one, DeltaArgs))
        own = next((one for one in mixers if (one.decays > 1) == by_channel), None)
        form = own and DeltaForm(own.key_heads, own.heads, own.key_dim, own.value_dim, EPS, own.act)
        for seqs, rows in _steps(setup):
            yield _case(setup, form or known, seqs, rows, by_channel)


def mamba_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield cases with the sizes of the model's layers with Mamba 2; of those of Nemotron 3 Nano, if it has none."""
    own = next((one for one in setup.args.mixers if isinstance(one, MambaArgs)), None)
    form = MambaForm(own.heads, own.groups, own.head_dim, own.state_dim, own.norm, EPS) if own else NEMOTRON
    matrix = form.heads * form.state_dim * form.head_dim
    states = 2 * (4 * matrix + (TAPS - 1) * form.channels * setup.item)
    per_row = (form.channels + 2 * form.width + form.heads) * setup.item
    for seqs, rows in _steps(setup):
        yield KernelCase(
            shape=f"{seqs} x {rows}, {form.heads}x{form.state_dim}x{form.head_dim} in {form.groups}",
            num_bytes=seqs * (states + rows * per_row) + 4 * TAPS * form.channels,
            flops=4 * seqs * rows * matrix,
            make=made(_mamba_pair, setup, form, seqs, rows),
        )


def shortconv_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield cases with the sizes of the model's short convolutions; of those of LFM2 1.2B, if it has none."""
    own = next((one for one in setup.args.mixers if isinstance(one, ShortConvArgs)), LFM)
    for seqs, rows in _steps(setup):
        yield KernelCase(
            shape=f"{seqs} x {rows}, {own.width}",
            num_bytes=(seqs * 2 * (own.taps - 1) + 4 * seqs * rows) * own.width * setup.item,
            make=made(_conv_pair, setup, own, seqs, rows),
        )


def _steps(setup: KernelSetup) -> Iterator[tuple[int, int]]:
    """Yield the steps that are measured on the device: sequences, new tokens of each."""
    yield from (one for one in setup.recurrent if setup.device.type == "cuda" or one[1] <= MOST_CPU_ROWS)


def _step(device: torch.device, seqs: int, rows: int) -> StateMeta:
    """Return a step of sequences that have 4096 tokens behind them."""
    every = torch.arange(seqs + 1, dtype=torch.int32, device=device)
    none = torch.zeros(seqs, 2, dtype=torch.int32, device=device)
    return StateMeta(rows * every, every[1:] * 0 + 4096 + rows, every[:seqs], none, none, max_rows=rows)


def _both(run: Callable[..., Result], ours: Any, theirs: Any, state: StateView) -> Pair:
    """Return a pair of two implementations, each with states of its own."""
    before = StateView(state.columns.clone(), None if state.matrix is None else state.matrix.clone())
    return Pair(partial(run, ours.mix, state), None, partial(run, theirs.mix, before))


def _mamba_pair(setup: KernelSetup, form: MambaForm, seqs: int, rows: int) -> Pair:
    def floats(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=setup.device) * scale

    widths = [form.width, form.channels, form.heads]
    gate, inner, step = setup.randn(seqs * rows, sum(widths)).split(widths, 1)
    weights = MambaWeights(
        floats(TAPS, form.channels, scale=0.5),
        *(floats(form.heads) for _ in range(3)),
        floats(form.channels),
        1 + floats(form.width, scale=0.2) if form.norm else None,
    )
    matrix = floats(seqs, form.heads, form.state_dim, form.head_dim, scale=0.1)
    state, meta = StateView(setup.randn(seqs, TAPS - 1, form.channels), matrix), _step(setup.device, seqs, rows)

    def run(mix: Callable[..., torch.Tensor], states: StateView) -> Result:
        y = mix(inner, gate, step, weights, states, meta, form)
        assert states.matrix is not None
        return y, states.columns, states.matrix

    return _both(run, setup.kernels.mamba, mamba, state)


def _conv_pair(setup: KernelSetup, own: ShortConvArgs, seqs: int, rows: int) -> Pair:
    given, meta = setup.randn(seqs * rows, 3 * own.width), _step(setup.device, seqs, rows)
    weights = ShortConvWeights(torch.randn(own.taps, own.width, device=setup.device))

    def run(mix: Callable[..., torch.Tensor], states: StateView) -> Result:
        return mix(given, weights, states, meta), states.columns

    state = StateView(setup.randn(seqs, own.taps - 1, own.width))
    return _both(run, setup.kernels.shortconv, shortconv, state)


def _case(setup: KernelSetup, form: DeltaForm, seqs: int, rows: int, by_channel: bool) -> KernelCase:
    matrix, values = form.heads * form.key_dim * form.value_dim, form.heads * form.value_dim
    library, decays = _library(rows, by_channel), form.heads * (form.key_dim if by_channel else 1)
    states = 2 * (4 * matrix + (TAPS - 1) * form.channels * setup.item)
    per_row = (form.channels + 2 * values + decays + form.heads) * setup.item
    return KernelCase(
        shape=f"{seqs} x {rows}, {form.key_heads}/{form.heads}x{form.key_dim}x{form.value_dim}"
        + " by channel" * by_channel,
        num_bytes=seqs * (states + rows * per_row) + 4 * TAPS * form.channels,
        flops=6 * seqs * rows * matrix,
        baseline=LIBRARY if library else "",
        make=lambda count: [_pair(setup, form, seqs, rows, decays, library) for _ in range(count)],
    )


def _library(rows: int, by_channel: bool) -> Callable[..., Result] | None:
    """Return the library's function for decodes or for prompts; None: it is not installed."""
    rule, kind = "kda" if by_channel else "gated_delta_rule", "fused_recurrent" if rows == 1 else "chunk"
    module = f"fla.ops.{rule}"
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec(module) is None:
        return None
    found: Callable[..., Result] = getattr(importlib.import_module(module), f"{kind}_{rule}")
    return found


def _pair(
    setup: KernelSetup, form: DeltaForm, seqs: int, rows: int, decays: int, library: Callable[..., Result] | None
) -> Pair:
    device, tokens, values = setup.device, seqs * rows, form.heads * form.value_dim

    def floats(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=device) * scale

    mixed, rates = setup.randn(tokens, form.channels + values), setup.randn(tokens, form.heads + decays)
    weights = DeltaWeights(
        floats(TAPS, form.channels, scale=0.5), floats(form.heads), floats(decays), 1 + floats(form.value_dim)
    )
    state = StateView(
        setup.randn(seqs, TAPS - 1, form.channels), floats(seqs, form.heads, form.key_dim, form.value_dim, scale=0.1)
    )
    meta = _step(device, seqs, rows)
    given = mixed[:, : form.channels], mixed[:, form.channels :], rates[:, form.heads :], rates[:, : form.heads]
    before = StateView(state.columns.clone(), None if state.matrix is None else state.matrix.clone())

    def run(mix: Callable[..., torch.Tensor], states: StateView) -> Result:
        y = mix(*given, weights, states, meta, form)
        assert states.matrix is not None
        return y, states.columns, states.matrix

    def theirs() -> Callable[[], Result]:
        heads = (setup.randn(1, tokens, form.heads, dim) for dim in (form.key_dim, form.key_dim, form.value_dim))
        q, k, v = (one.view(seqs, rows, *one.shape[2:]) for one in heads)
        g = -F.softplus(floats(seqs, rows, decays))
        g = g if decays == form.heads else g.unflatten(2, (form.heads, -1))
        b = setup.randn(seqs, rows, form.heads).sigmoid()
        more = {"initial_state": before.matrix, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return partial(library, q, k, v, g, b, **more)  # type: ignore[arg-type]

    return Pair(
        partial(run, setup.kernels.delta.mix, state), theirs() if library else None, partial(run, ref.mix, before)
    )
