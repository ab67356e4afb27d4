"""The gated delta rule: the reference against transformers' chunk form, and a CPU's kernel against the reference."""

from copy import deepcopy
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from quire.kernels.delta import native, ref
from quire.kernels.delta.inputs import FORMS, DeltaInputs, Sequence, make
from quire.kernels.native.library import missing

from ...support.drafted_steps import LENGTH, PENDING, ROOM, check_decodes, check_schedule
from ...support.state_inputs import check_bfloat16, in_bfloat16
from ...support.state_inputs import run as kernel_run

NO_COMPILER = pytest.mark.skipif(bool(why := missing()), reason=why or "runs")
STEPS = {
    "decodes": (Sequence(5, 1), Sequence(0, 1), Sequence(70, 1)),
    "prompts": (Sequence(0, 3), Sequence(0, 1), Sequence(2, 2), Sequence(9, 70)),
    "mixed": (Sequence(7, 1), Sequence(0, 0), Sequence(64, 5), Sequence(0, 33)),
    "copies": (
        Sequence(7, 1, (8, 0)),
        Sequence(0, 5, (2, 4)),
        Sequence(64, 9, (64, 74)),  # before the step and after it: no copy
        Sequence(0, 33, (0, 33)),
        Sequence(2, 2, (3, 4)),
    ),
}


def run(implementation: object, given: DeltaInputs) -> tuple[torch.Tensor, ...]:
    given = DeltaInputs(*(deepcopy(one) if name in ("state",) else one for name, one in given._asdict().items()))
    y = implementation.mix(*given)  # type: ignore[attr-defined]
    state = given.state
    return y, state.columns, state.matrix, *(one for one in (state.pending, state.at) if one is not None)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_the_reference_equals_the_chunk_form(length: int) -> None:
    form = FORMS[0]
    given = make(form, (Sequence(3, length),))
    before = given.state.matrix[given.meta.slots.long()].clone()
    inputs = torch.cat((given.state.columns[given.meta.slots.long()][0], given.qkv))
    u = torch.nn.functional.conv1d(inputs.T[None], given.weights.conv.T[:, None], groups=form.channels)[0].T
    u = torch.nn.functional.silu(u)
    width = form.key_heads * form.key_dim
    q, k, v = u.split((width, width, form.heads * form.value_dim), 1)
    q, k = (one.view(1, length, form.key_heads, -1).repeat_interleave(2, 2) for one in (q, k))
    g = -given.weights.rate.exp() * torch.nn.functional.softplus(given.decay + given.weights.shift)
    o, after = torch_chunk_gated_delta_rule(
        q,
        k,
        v.view(1, length, form.heads, -1),
        g=g[None],
        beta=given.strength.sigmoid()[None],
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    expected = ref.normalized(o[0].flatten(1), given.gate, given.weights.norm, form)
    y, columns, matrix, *_ = run(ref, given)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(matrix[given.meta.slots.long()], after, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(columns[given.meta.slots.long()][0], inputs[-3:])


@NO_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
@pytest.mark.parametrize("step", [*STEPS, *PENDING])
def test_native(step: str, form: object, by_channel: bool, dtype: torch.dtype) -> None:
    sequences, taps = (STEPS | PENDING)[step], 3 if by_channel else 4
    given = make(form, sequences, dtype, by_channel=by_channel, taps=taps, pending=ROOM * (step in PENDING))  # type: ignore[arg-type]
    wanted, found = run(ref, given), run(native, given)
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    assert found[0].dtype == dtype
    torch.testing.assert_close(found[0], wanted[0], rtol=bound, atol=bound)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[2], wanted[2], rtol=2e-5, atol=2e-5, equal_nan=True)
    for one, other in zip(found[3:], wanted[3:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("implementation", [ref, pytest.param(native, marks=NO_COMPILER)], ids=["ref", "native"])
@pytest.mark.parametrize("number", range(12))
def test_drafts_change_nothing(number: int, implementation: ModuleType) -> None:
    """Outputs with drafts are those of plain decoding, whatever is accepted; so is a copy at a length."""
    check_decodes(implementation, FORMS[1], number)


@NO_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [*STEPS, *PENDING])
def test_matrices_in_bfloat16(step: str, dtype: torch.dtype) -> None:
    sequences = (STEPS | PENDING)[step]
    given = in_bfloat16(make(FORMS[1], sequences, dtype, by_channel=True, pending=ROOM * (step in PENDING)))
    check_bfloat16(kernel_run(native.mix, given), kernel_run(ref.mix, given))


@pytest.mark.parametrize("implementation", [ref, pytest.param(native, marks=NO_COMPILER)], ids=["ref", "native"])
@pytest.mark.parametrize("number", [0, 3, 5, 8])
def test_a_rounded_matrix_depends_on_the_tokens_alone(number: int, implementation: ModuleType) -> None:
    """Chunks of any size, drafts and replays of them: outputs and copies are those of one token in each step."""
    mix = implementation.mix
    plain, drafted = (in_bfloat16(make(FORMS[0], (Sequence(0, LENGTH),), pending=room)) for room in (0, ROOM))
    check_schedule(mix, mix, plain, drafted, number)


@NO_COMPILER
def test_a_copy_is_the_state_at_its_length() -> None:
    whole, part = make(FORMS[1], (Sequence(0, 40, (25, 0)),)), make(FORMS[1], (Sequence(0, 40),))
    short = DeltaInputs(*(one[:25] for one in part[:4]), *part[4:])
    short.meta.query_start[1] = short.meta.seq_lens[0] = 25
    _, columns, matrix, *_ = run(native, short)
    _, all_columns, all_matrix, *_ = run(native, whole)
    slot, kept = int(whole.meta.slots[0]), int(whole.meta.kept[whole.meta.slots[0], 0])
    assert torch.equal(columns[slot], all_columns[kept]) and torch.equal(matrix[slot], all_matrix[kept])


@NO_COMPILER
def test_what_the_code_cannot_read_is_an_error() -> None:
    given = make(FORMS[0], (Sequence(0, 4),))
    with pytest.raises(ValueError, match="of one type"):
        native.mix(given.qkv.half(), *given[1:])
    with pytest.raises(ValueError, match="of widths"):
        native.mix(given.qkv[:, 1:], *given[1:])
    with pytest.raises(ValueError, match="matrices must be float32"):
        native.mix(*given[:5], given.state.__class__(given.state.columns, given.state.matrix.double()), *given[6:])
    with pytest.raises(ValueError, match="columns must be"):
        native.mix(*given[:5], given.state.__class__(given.state.columns.bfloat16(), given.state.matrix), *given[6:])


@NO_COMPILER
@pytest.mark.parametrize("lowest", [0.0, -5.0])
@pytest.mark.parametrize("by_channel", [False, True])
def test_decays_of_any_size(by_channel: bool, lowest: float) -> None:
    """With a strength of 0 a state is multiplied by its decays alone, here from none to all."""
    form = replace(FORMS[2], lowest=lowest)
    given = make(form, (Sequence(3, 1),), by_channel=by_channel)
    raws = torch.tensor([-200.0, -90.0, -21.0, -3.0, -1e-4, 0.0, 1e-4, 0.5, 3.0, 21.0, 90.0, 3e4])
    count, slot = given.decay.shape[1], int(given.meta.slots[0])
    raws = torch.cat((raws, torch.linspace(-25, 25, 30 * count)))
    given.weights.shift.zero_()
    given.strength.fill_(-1e4)
    given.state.matrix[slot] = 1
    before = deepcopy(given.state)
    rates = given.weights.rate.double().exp().repeat_interleave(count // form.heads)
    for own in raws.split(count):
        given.decay[0, : len(own)] = own
        raw = given.decay[0].double()
        softplus = torch.nn.functional.softplus(raw, threshold=50)
        wanted = (lowest * torch.sigmoid(rates * raw) if lowest else -rates * softplus).view(form.heads, -1, 1)
        found = run(native, given._replace(state=deepcopy(before)))[2][slot].double()
        apart = (found.log() - wanted).abs() - 4e-7 * wanted.abs()
        assert apart[(wanted > -80).expand_as(apart)].max() < 4e-7
        assert found[(wanted < -80).expand_as(found)].sum() < 1e-30
