"""Cases of recurrent layers: the gated delta rule, for decodes and for prompts."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from quire.args.delta import DeltaArgs
from quire.kernels.cases import EPS, KernelCase, KernelSetup, Pair, Result
from quire.kernels.delta import DeltaForm, DeltaWeights, ref
from quire.kernels.states import StateMeta, StateView

TAPS, MOST_CPU_ROWS = 4, 2048
QWEN = DeltaForm(key_heads=16, heads=32, key_dim=128, value_dim=128, eps=EPS)  # Qwen3.5 9B
LIBRARY = "fla, rule alone"  # flash-linear-attention, without convolution, norms of heads and gates


def delta_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield cases with the sizes of the model's recurrent layers; of those of Qwen3.5 9B, if it has none."""
    own = next((one for one in setup.args.mixers if isinstance(one, DeltaArgs) and not one.low_rank), None)
    form = own and DeltaForm(own.key_heads, own.heads, own.key_dim, own.value_dim, EPS, own.act)
    for seqs, rows in setup.recurrent:
        if setup.device.type == "cuda" or rows <= MOST_CPU_ROWS:
            yield _case(setup, form or QWEN, seqs, rows)


def _case(setup: KernelSetup, form: DeltaForm, seqs: int, rows: int) -> KernelCase:
    matrix, values, library = form.heads * form.key_dim * form.value_dim, form.heads * form.value_dim, _library(rows)
    states = 2 * (4 * matrix + (TAPS - 1) * form.channels * setup.item)
    per_row = (form.channels + 2 * values + 2 * form.heads) * setup.item
    return KernelCase(
        shape=f"{seqs} x {rows}, {form.key_heads}/{form.heads}x{form.key_dim}x{form.value_dim}",
        num_bytes=seqs * (states + rows * per_row) + 4 * TAPS * form.channels,
        flops=6 * seqs * rows * matrix,
        baseline=LIBRARY if library else "",
        make=lambda count: [_pair(setup, form, seqs, rows, library) for _ in range(count)],
    )


def _library(rows: int) -> Callable[..., Result] | None:
    """Return the library's function for decodes or for prompts; None: it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    name = "fused_recurrent_gated_delta_rule" if rows == 1 else "chunk_gated_delta_rule"
    found: Callable[..., Result] = getattr(importlib.import_module("fla.ops.gated_delta_rule"), name)
    return found


def _pair(setup: KernelSetup, form: DeltaForm, seqs: int, rows: int, library: Callable[..., Result] | None) -> Pair:
    device, tokens, values = setup.device, seqs * rows, form.heads * form.value_dim

    def floats(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=device) * scale

    def places(start: int) -> torch.Tensor:
        return torch.arange(start, start + seqs, dtype=torch.int32, device=device)

    mixed, rates = setup.randn(tokens, form.channels + values), setup.randn(tokens, 2 * form.heads)
    weights = DeltaWeights(
        floats(TAPS, form.channels, scale=0.5), floats(form.heads), floats(form.heads), 1 + floats(form.value_dim)
    )
    state = StateView(
        setup.randn(seqs, TAPS - 1, form.channels), floats(seqs, form.heads, form.key_dim, form.value_dim, scale=0.1)
    )
    none = torch.zeros(seqs, 2, dtype=torch.int32, device=device)
    meta = StateMeta(
        rows * torch.cat((places(0), places(seqs)[:1])), places(0) * 0 + 4096 + rows, places(0), none, none
    )
    meta.max_rows = rows
    given = mixed[:, : form.channels], mixed[:, form.channels :], rates[:, form.heads :], rates[:, : form.heads]
    before = StateView(state.columns.clone(), None if state.matrix is None else state.matrix.clone())

    def run(mix: Callable[..., torch.Tensor], states: StateView) -> Result:
        y = mix(*given, weights, states, meta, form)
        assert states.matrix is not None
        return y, states.columns, states.matrix

    def theirs() -> Callable[[], Result]:
        heads = (setup.randn(1, tokens, form.heads, dim) for dim in (form.key_dim, form.key_dim, form.value_dim))
        q, k, v = (one.view(seqs, rows, *one.shape[2:]) for one in heads)
        g, b = -F.softplus(floats(seqs, rows, form.heads)), setup.randn(seqs, rows, form.heads).sigmoid()
        more = {"initial_state": before.matrix, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return partial(library, q, k, v, g, b, **more)  # type: ignore[arg-type]

    return Pair(
        partial(run, setup.kernels.delta.mix, state), theirs() if library else None, partial(run, ref.mix, before)
    )
