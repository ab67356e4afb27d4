"""The gated delta rule for GPUs in Triton's interpreter, over poisoned states, and compiled for sm_90 without a GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.args.checkpoint import parse_checkpoint_config
from quire.assemble.kv_views import model_views
from quire.assemble.states import keep_states
from quire.kernels import triton_runtime
from quire.kernels.delta import DeltaForm, ref, triton
from quire.kernels.delta.inputs import FORMS, DeltaInputs, Sequence, make
from quire.kernels.select import select_kernels
from quire.kernels.step.state import Limits
from quire.kvstore.arena import KVArena
from quire.kvstore.states import StateArena
from quire.layers.context import Build
from quire.layers.decoder import Decoder
from quire.plan.kinds.blocks import operations
from quire.plan.kv_geometry import rank_geometry
from quire.plan.layout import alone, layout
from quire.plan.linears import linear_plans
from quire.worker.construct import make_runner

from ..support import state_inputs
from ..support.compared import CPU, LIMITS, VOCAB
from ..support.drafted_steps import PENDING, ROOM, check_decodes
from ..support.filled_models import fill, normal
from ..support.full import full_rows
from ..support.naive_runner import agree
from ..support.state_inputs import CHUNKED as STEPS
from ..support.state_inputs import in_bfloat16
from ..support.thinned import thinned
from ..support.tiny_models import Tiny, tiny_config
from .test_cuda_worker import PLANS, StepRunner, cuda_runner, run_ahead

__all__ = ["cuda_runner"]

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

poisoned = pytest.fixture(autouse=True)(state_inputs.poisoned)


def run(implementation: object, given: DeltaInputs, decode_rows: int = 1) -> tuple[Tensor, ...]:
    """y and the states after a step, which leaves the states that were given."""
    state, meta = deepcopy(given.state), replace(given.meta, decode_rows=decode_rows, plans={})
    y = implementation.mix(*given[:5], state, meta, given.form)  # type: ignore[attr-defined]
    return y, state.columns, state.matrix, *(one for one in (state.pending, state.at) if one is not None)


def check(given: DeltaInputs, decode_rows: int = 1, bound: float = 5e-5) -> None:
    """The kernels find what the reference finds: results, all columns to the bit, all matrices."""
    wanted, found = run(ref, given), run(triton, given, decode_rows)
    assert found[0].dtype == given.qkv.dtype
    torch.testing.assert_close(found[0], wanted[0], rtol=bound, atol=bound)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[2], wanted[2], rtol=bound, atol=bound, equal_nan=True)
    for one, other in zip(found[3:], wanted[3:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("step", "form"),
    [(step, FORMS[i % len(FORMS)]) for i, step in enumerate(STEPS)]
    + list(full_rows((step, form) for step in STEPS for form in FORMS)),
    ids=str,
)
def test_steps(step: str, form: DeltaForm) -> None:
    check(make(form, STEPS[step]))


@pytest.mark.parametrize(("form", "decode_rows"), thinned(FORMS, [0, 9], every=2), ids=str)
def test_wherever_decodes_end(form: DeltaForm, decode_rows: int) -> None:
    """Rows are right whether a sequence goes row by row or in chunks."""
    check(make(form, STEPS["mixed"] + (Sequence(61, 9, (63, 70)), Sequence(5, 10))), decode_rows)


@pytest.mark.parametrize(
    ("step", "form"),
    [(step, FORMS[i % len(FORMS)]) for i, step in enumerate(STEPS, 1)]
    + list(full_rows((step, form) for step in STEPS for form in FORMS)),
    ids=str,
)
def test_decays_of_channels(step: str, form: DeltaForm) -> None:
    check(make(form, STEPS[step], by_channel=True, taps=3))


@pytest.mark.parametrize("decode_rows", [0, 9])
def test_decays_of_channels_wherever_decodes_end(decode_rows: int) -> None:
    check(make(FORMS[0], (*STEPS["mixed"], Sequence(61, 9, (63, 70))), by_channel=True), decode_rows)


@pytest.mark.parametrize("form", FORMS[1:], ids=range(1, len(FORMS)))
def test_decays_of_channels_from_none_to_all(form: DeltaForm) -> None:
    """A channel in four forgets all in a row, the next ones hardly anything: no exponent is above 0."""
    given = make(form, (Sequence(0, 130, (70, 128)), Sequence(5, 66)), by_channel=True)
    widths = torch.tensor([300.0, -15.0, -6.0, 0.0])
    given.decay.copy_(widths[torch.arange(given.decay.shape[1]) % 4].expand_as(given.decay))
    check(given)


@pytest.mark.parametrize(("step", "by_channel"), [("decodes", False), ("copies", False), ("copies", True)])
def test_half_precision(step: str, by_channel: bool) -> None:
    """The interpreter has no bfloat16."""
    check(make(FORMS[0], STEPS[step], torch.float16, by_channel=by_channel), bound=1e-2)


@pytest.mark.parametrize("taps", [2, 3, 5])
def test_taps(taps: int) -> None:
    check(make(FORMS[1], STEPS["mixed"], taps=taps))


@pytest.mark.parametrize("by_channel", [False, True])
def test_keys_that_are_alike(by_channel: bool) -> None:
    """Equal keys with strengths near 2 that hardly fade: the largest inverses that there are."""
    given = make(replace(FORMS[1], doubled=True), (Sequence(0, 128),), by_channel=by_channel)
    width = given.form.key_heads * given.form.key_dim
    given.qkv[:, width : 2 * width] = 1.0
    given.decay.fill_(-20.0)
    given.strength.fill_(3.0)
    check(given, bound=1e-4)


@pytest.mark.parametrize(("step", "form", "by_channel"), thinned(PENDING, FORMS, [False, True]), ids=str)
def test_pending_rows(step: str, form: DeltaForm, by_channel: bool) -> None:
    """Rows that were accepted are replayed, also before a chunk of a prompt; those of a decode become pending ones."""
    check(make(form, PENDING[step], pending=ROOM, by_channel=by_channel), decode_rows=ROOM)


@pytest.mark.parametrize(
    "step", ["decodes", "copies", "mixed with prompts", *full_rows(["mixed", *list(PENDING)[:-1]])]
)
def test_matrices_in_bfloat16(step: str) -> None:
    """Chunks of prompts round less often than the reference, and the interpreter cuts where a GPU rounds."""
    drafts = ROOM * (step in PENDING)
    given = DeltaInputs(*in_bfloat16(make(FORMS[0], (STEPS | PENDING)[step], pending=drafts)))
    wanted, found = run(ref, given), run(triton, given, drafts or 1)
    torch.testing.assert_close(found[0], wanted[0], rtol=4e-2, atol=4e-2)
    torch.testing.assert_close(found[2], wanted[2], rtol=4e-2, atol=4e-2, equal_nan=True)


@pytest.mark.parametrize("number", [2, 7, *full_rows([0, 1, 3, 4, 5, 6])])
def test_drafts_change_nothing(number: int) -> None:
    check_decodes(triton, FORMS[1], number)


@pytest.mark.parametrize(
    ("past", "by_channel"), [(63, False), (64, False), (100, True), *full_rows([(1, False), (100, False), (64, True)])]
)
def test_a_resumed_prompt(past: int, by_channel: bool) -> None:
    """A prompt cut anywhere gives what the unbroken one gives; at a multiple of the chunk, to the bit."""
    whole, form = make(FORMS[0], (Sequence(0, 150, (past, 0)),), by_channel=by_channel), FORMS[0]
    slot = int(whole.meta.slots[0])
    y, columns, matrix, *_ = run(triton, whole, 0)
    copy = int(whole.meta.kept[slot, 0])
    state = deepcopy(whole.state)
    state.columns[slot], state.matrix[slot] = columns[copy], matrix[copy]
    meta = replace(
        whole.meta,
        query_start=torch.tensor([0, 150 - past], dtype=torch.int32),
        kept_at=torch.zeros_like(whole.meta.kept_at),
        decode_rows=0,
        plans={},
    )
    rest = triton.mix(*(one[past:] for one in whole[:4]), whole.weights, state, meta, form)
    bound = 0.0 if past % 64 == 0 else 5e-5
    torch.testing.assert_close(rest, y[past:], rtol=bound, atol=bound)
    torch.testing.assert_close(state.matrix[slot], matrix[slot], rtol=bound, atol=bound)
    assert torch.equal(state.columns[slot], columns[slot])


def test_a_step_without_rows() -> None:
    given = make(FORMS[0], (Sequence(7, 0), Sequence(0, 0)))
    y, columns, matrix, *_ = run(triton, given)
    assert y.shape == (0, 64)
    torch.testing.assert_close(columns, given.state.columns, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(matrix, given.state.matrix, rtol=0, atol=0, equal_nan=True)


def test_what_the_kernels_cannot_read_is_an_error() -> None:
    given = make(FORMS[0], (Sequence(0, 4),))
    with pytest.raises(ValueError, match="matrices must be float32"):
        triton.mix(*given[:5], replace(given.state, matrix=given.state.matrix.double()), *given[6:])
    with pytest.raises(ValueError, match="columns must be"):
        triton.mix(*given[:5], replace(given.state, columns=given.state.columns.half()), *given[6:])


def recurrent_runner(target: str, limits: Limits, family: str) -> StepRunner:
    """A runner of a random model with recurrent layers, with the kernels of a GPU or the references; memory is NaN."""
    args = parse_checkpoint_config(tiny_config(Tiny(family=family)) | {"vocab_size": VOCAB})
    ops, params = operations(args), layout(args)
    forced = dict.fromkeys(ops, "ref") if target == "cpu" else None
    kernels = select_kernels(target, "float32", ops=ops, head_dim=args.attending[0].head_dim, forced=forced)
    (block,) = limits.block_sizes
    geometry = rank_geometry(args, alone(args), dtype="float32", device="cpu", block_size=block)
    linears, shapes = linear_plans(args, params, kernels.choices), {param.name: param for param in params}
    model = Decoder(args, params, Build(torch.float32, CPU, kernels, shapes, linears, kv_groups=geometry.groups))
    fill(model, normal(0.3))
    arena, states = KVArena(geometry, 32, CPU), StateArena(geometry, limits.num_slots + 1, CPU)
    views = model_views(model, arena.views, [], states.view)
    for part in (part for view in views for part in vars(view).values() if isinstance(part, Tensor)):
        part.fill_(float("nan"))
    runner = make_runner(model, views, limits, CPU, target=target)
    keep_states(runner, states)
    return runner


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen3_5_text", (2, 4)), ("lfm2", (2, 4)), *full_rows((("falcon_h1", (2, 4)), ("qwen3_5_text", ())))],
    ids=str,
)
def test_steps_of_a_gpu(
    cuda_runner: object, monkeypatch: pytest.MonkeyPatch, family: str, sizes: tuple[int, ...]
) -> None:
    """Chunks, decodes beside them and slots that change hands give the tokens of the references; steps are padded."""
    torch.set_deterministic_debug_mode("default")
    monkeypatch.setattr("quire.worker.graphs.NARROW", 2)
    limits = replace(LIMITS, graph_sizes=sizes, graph_tokens=(48,) if sizes else ())
    plain, runner = (recurrent_runner(*one, family) for one in (("cpu", LIMITS), ("cuda", limits)))
    for one, found in zip(PLANS, run_ahead(runner, PLANS), strict=True):
        plain.submit(one)
        agree(found, plain.collect())
    assert not sizes or {key[0] for key in runner.recorder.ran} >= {"decode", "mixed"}  # type: ignore[attr-defined]


def test_compiles(compiled: Callable[..., set[str]]) -> None:
    kinds = ("decode", "rows", "plan", "convolve", "scan", "states", "outputs")
    names = {f"_{kind}_kernel" for kind in kinds}
    names |= {f"{kind}_kernel" for kind in ("solve", "fade", "products", "solve_channels")}
    assert compiled("compile_delta") == names
