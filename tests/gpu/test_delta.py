"""The gated delta rule on a GPU against its reference in float32, at the sizes of real models; captured decodes."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels.delta import DeltaForm, DeltaWeights, ref, triton
from quire.kernels.delta.inputs import DeltaInputs, Sequence
from quire.kernels.delta.inputs import make as step_of
from quire.kernels.states import StateView

from ..support.drafted_steps import PENDING, ROOM
from ..support.state_inputs import LONG as STEPS
from ..support.state_inputs import close, in_bfloat16

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

FORMS = {
    "qwen3.5-0.8b": DeltaForm(key_heads=16, heads=16, key_dim=128, value_dim=128, eps=1e-6),
    "qwen3.5-9b": DeltaForm(key_heads=16, heads=32, key_dim=128, value_dim=128, eps=1e-6),
    "qwen3.5-27b": DeltaForm(key_heads=16, heads=48, key_dim=128, value_dim=128, eps=1e-6),
    "kimi": DeltaForm(key_heads=32, heads=32, key_dim=128, value_dim=128, eps=1e-5, act="sigmoid"),
    "olmo": DeltaForm(key_heads=6, heads=6, key_dim=96, value_dim=192, eps=1e-6, act="sigmoid", doubled=True),
    "tiny": DeltaForm(key_heads=2, heads=4, key_dim=16, value_dim=24, eps=1e-6),
    "odd": DeltaForm(key_heads=1, heads=3, key_dim=12, value_dim=40, eps=1e-6),
    "wide": DeltaForm(key_heads=2, heads=4, key_dim=128, value_dim=256, eps=1e-6, lowest=-5.0),
}
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def on_gpu(given: DeltaInputs) -> DeltaInputs:
    """The same step in the GPU's memory. Rows stay slices of longer rows."""
    device = torch.device("cuda")
    columns, matrix = given.state.columns.to(device), given.state.matrix.to(device)  # type: ignore[union-attr]
    weights = DeltaWeights(*(getattr(given.weights, name).to(device) for name in ("conv", "rate", "shift", "norm")))
    names = ("query_start", "seq_lens", "slots", "kept_at", "kept")
    meta = replace(given.meta, **{name: getattr(given.meta, name).to(device) for name in names}, plans={})
    rows = torch.cat(given[:4], 1).to(device).split([one.shape[1] for one in given[:4]], 1)
    qkv, gate, decay, strength = rows
    later = (None if one is None else one.to(device) for one in (given.state.pending, given.state.at))
    return DeltaInputs(qkv, gate, decay, strength, weights, StateView(columns, matrix, *later), meta, given.form)


def run(implementation: object, given: DeltaInputs, decode_rows: int = 1) -> tuple[Tensor, ...]:
    """y and the states after a step, which leaves the states that were given."""
    state, meta = deepcopy(given.state), replace(given.meta, decode_rows=decode_rows, plans={})
    y = implementation.mix(*given[:5], state, meta, given.form)  # type: ignore[attr-defined]
    assert state.matrix is not None
    return y, state.columns, state.matrix, *(one for one in (state.pending, state.at) if one is not None)


def compare(given: DeltaInputs, decode_rows: int = 1) -> None:
    """The kernels find what the reference finds: results, all columns to the bit, all matrices."""
    wanted, found, bound = run(ref, given), run(triton, given, decode_rows), BOUNDS[given.qkv.dtype]
    close(found[0], wanted[0], bound)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0, equal_nan=True)
    close(found[2], wanted[2], bound)
    for one, other in zip(found[3:], wanted[3:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("form", FORMS)
def test_steps(form: str, step: str, by_channel: bool, dtype: torch.dtype) -> None:
    compare(on_gpu(step_of(FORMS[form], STEPS[step], dtype, by_channel=by_channel)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["kimi", "wide"])
def test_decays_of_channels_from_none_to_all(form: str, dtype: torch.dtype) -> None:
    """A channel in four forgets all in a row, the next ones hardly anything: no exponent is above 0."""
    given = step_of(FORMS[form], (Sequence(0, 300, (70, 128)), Sequence(5, 66)), dtype, by_channel=True)
    widths = torch.tensor([300.0, -15.0, -6.0, 0.0], dtype=dtype)
    given.decay.copy_(widths[torch.arange(given.decay.shape[1]) % 4].expand_as(given.decay))
    compare(on_gpu(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_channel", [False, True])
def test_drafts_go_row_by_row(by_channel: bool, dtype: torch.dtype) -> None:
    steps = (*(Sequence(past, 1 + past % 9, (past + 1, 0)) for past in range(33)), Sequence(5, 100))
    for decode_rows in (0, 9):
        compare(on_gpu(step_of(FORMS["qwen3.5-9b"], steps, dtype, by_channel=by_channel)), decode_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("step", PENDING)
@pytest.mark.parametrize("form", ["qwen3.5-9b", "qwen3.5-27b", "tiny", "wide"])
def test_pending_rows(form: str, step: str, by_channel: bool, dtype: torch.dtype) -> None:
    """Rows that were accepted are replayed, also before a chunk of a prompt; those of a decode become pending ones."""
    compare(on_gpu(step_of(FORMS[form], PENDING[step], dtype, pending=ROOM, by_channel=by_channel)), decode_rows=ROOM)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_matrices_in_bfloat16(step: str, by_channel: bool) -> None:
    """Chunks of prompts round less often than the reference."""
    for form in ("qwen3.5-9b", "kimi", "olmo", "tiny"):
        given = step_of(FORMS[form], STEPS[step], torch.bfloat16, by_channel=by_channel)
        given = on_gpu(DeltaInputs(*in_bfloat16(given)))
        for found, wanted in zip(run(triton, given), run(ref, given), strict=True):
            close(found, wanted, 1e-2)


def test_many_sequences() -> None:
    """More programs than run at once: those that share columns wait for each other."""
    compare(on_gpu(step_of(FORMS["qwen3.5-27b"], tuple(Sequence(5, 1) for _ in range(300)), torch.bfloat16)))
    drafts = (Sequence(9, 4, accepted=2),) * 150
    compare(on_gpu(step_of(FORMS["qwen3.5-27b"], drafts, torch.bfloat16, pending=ROOM)), decode_rows=ROOM)


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_resumed_prompt_gives_the_same_bits(by_channel: bool) -> None:
    form, past = FORMS["qwen3.5-9b"], 640
    whole = on_gpu(step_of(form, (Sequence(0, 1000, (past, 0)),), torch.bfloat16, by_channel=by_channel))
    slot = int(whole.meta.slots[0])
    y, columns, matrix = run(triton, whole)
    copy, state = int(whole.meta.kept[slot, 0]), deepcopy(whole.state)
    assert state.matrix is not None
    state.columns[slot], state.matrix[slot] = columns[copy], matrix[copy]
    meta = replace(
        whole.meta,
        query_start=torch.tensor([0, 1000 - past], dtype=torch.int32, device="cuda"),
        kept_at=torch.zeros_like(whole.meta.kept_at),
        plans={},
    )
    qkv, gate, decay, strength = (one[past:] for one in (whole.qkv, whole.gate, whole.decay, whole.strength))
    rest = triton.mix(qkv, gate, decay, strength, whole.weights, state, meta, form)
    assert torch.equal(rest, y[past:]) and torch.equal(state.matrix[slot], matrix[slot])


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("step", ["decodes", "mixed"])
def test_a_captured_step(step: str, by_channel: bool) -> None:
    """A graph gives what launches give, each time that it runs: arrivals are counted from 0 again."""
    given = on_gpu(step_of(FORMS["qwen3.5-9b"], STEPS[step], torch.bfloat16, by_channel=by_channel))
    y, columns, matrix = run(triton, given)
    state = deepcopy(given.state)
    assert state.matrix is not None and given.state.matrix is not None
    graph, meta = torch.cuda.CUDAGraph(), replace(given.meta, plans={})
    with torch.cuda.graph(graph):
        captured = triton.mix(*given[:5], state, meta, given.form)
    for _ in range(3):
        state.columns.copy_(given.state.columns)
        state.matrix.copy_(given.state.matrix)
        graph.replay()
        assert torch.equal(captured, y)
        torch.testing.assert_close(state.columns, columns, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(state.matrix, matrix, rtol=0, atol=0, equal_nan=True)
