"""Mamba 2: the reference against transformers' layers, and a CPU's kernel against the reference."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import FalconH1Config, GraniteMoeHybridConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

from quire.kernels.delta.inputs import Sequence
from quire.kernels.mamba import MambaForm, MambaWeights, native, ref
from quire.kernels.native.library import missing
from quire.kernels.states import StateView

from ...support.drafted_steps import LENGTH, PENDING, ROOM, check_schedule
from ...support.state_inputs import MAMBA, STEPS, check_bfloat16, in_bfloat16, mamba_step, meta_of, pending_rows, run

NO_COMPILER = pytest.mark.skipif(bool(why := missing()), reason=why or "runs")


def layer_of(kind: str) -> tuple[Any, MambaForm]:
    """A mixer of transformers with random weights, and the form of the kernel for it."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 24}
    sizes |= {"mamba_n_groups": 2, "mamba_chunk_size": 16, "mamba_conv_bias": True, "num_hidden_layers": 1}
    if kind == "granite":
        layer = GraniteMoeHybridMambaLayer(GraniteMoeHybridConfig(**sizes), 0)
    else:
        more = {"mamba_rms_norm": True, "mamba_norm_before_gate": kind == "falcon, norm first"}
        layer = FalconH1Mixer(FalconH1Config(**sizes, mamba_d_ssm=64, **more), 0)
        layer.mup_vector = torch.ones(())  # of the decoder around it
    with torch.no_grad():
        for one in layer.parameters():
            one.copy_(torch.randn_like(one) * (0.3 if one.ndim > 1 else 0.5) + (one.ndim == 1))
    norm = "first" if kind == "falcon, norm first" else "gated"
    return layer.eval(), replace(MAMBA[0], norm=norm, eps=layer.layer_norm_epsilon)


@pytest.mark.parametrize("kind", ["granite", "falcon", "falcon, norm first"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 129])
def test_the_reference_equals_the_layer_of_transformers(length: int, kind: str) -> None:
    layer, form = layer_of(kind)
    x = torch.randn(1, length, 32)
    with torch.no_grad():
        rows = layer.in_proj(x)[0]
        expected = layer(x)[0]
        gate, inner, step = rows.split((form.width, form.channels, form.heads), 1)
        weights = MambaWeights(
            conv=layer.conv1d.weight[:, 0].T.contiguous(),
            rate=layer.A_log,
            shift=layer.dt_bias,
            skip=layer.D,
            bias=layer.conv1d.bias,
            norm=layer.norm.weight,
        )
        state, meta = mamba_step(form, (Sequence(0, length),))[4:6]
        columns = torch.full((4, len(weights.conv) - 1, form.channels), torch.nan)
        found = ref.mix(inner, gate, step, weights, StateView(columns, state.matrix), meta, form)
        torch.testing.assert_close(layer.out_proj(found), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 127, 129])
def test_a_step_goes_on_from_the_state_of_the_last_one(cut: int) -> None:
    """In two steps as in one, from a copy as from the state itself."""
    whole = mamba_step(MAMBA[0], (Sequence(0, 130, (cut, 0)),))
    y, columns, matrix = run(ref.mix, whole)
    first = meta_of((Sequence(0, cut),))
    rows = [one[:cut] for one in whole[:3]]
    head, own, state = run(ref.mix, (*rows, whole[3], whole[4], first, MAMBA[0]))
    slot, copy = int(first.slots[0]), int(whole[5].kept[whole[5].slots[0], 0])
    torch.testing.assert_close((own[slot], state[slot]), (columns[copy], matrix[copy]))
    rest = replace(meta_of((Sequence(cut, 130 - cut),)), slots=first.slots)
    tail = ref.mix(*(one[cut:] for one in whole[:3]), whole[3], StateView(own, state), rest, MAMBA[0])
    torch.testing.assert_close(torch.cat((head, tail)), y)


@NO_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", MAMBA, ids=range(len(MAMBA)))
@pytest.mark.parametrize("step", [*STEPS, *PENDING])
def test_native(step: str, form: MambaForm, dtype: torch.dtype) -> None:
    given = mamba_step(form, (STEPS | PENDING)[step], dtype, ROOM * (step in PENDING))
    wanted, found = run(ref.mix, given), run(native.mix, given)
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    assert found[0].dtype == dtype
    torch.testing.assert_close(found[0], wanted[0], rtol=bound, atol=bound)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[2], wanted[2], rtol=2e-5, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(found[3:], wanted[3:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("implementation", [ref, pytest.param(native, marks=NO_COMPILER)], ids=["ref", "native"])
@pytest.mark.parametrize("number", range(12))
def test_drafts_change_nothing(number: int, implementation: ModuleType) -> None:
    """Outputs with drafts are those of plain decoding, whatever is accepted; so is a copy at a length."""
    plain, drafted = (mamba_step(MAMBA[number % 3], (Sequence(0, LENGTH),), room=room) for room in (0, ROOM))
    check_schedule(implementation.mix, ref.mix, plain, drafted, number)


@NO_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [*STEPS, *PENDING])
def test_matrices_in_bfloat16(step: str, dtype: torch.dtype) -> None:
    given = in_bfloat16(mamba_step(MAMBA[1], (STEPS | PENDING)[step], dtype, ROOM * (step in PENDING)))
    check_bfloat16(run(native.mix, given), run(ref.mix, given))


@pytest.mark.parametrize("implementation", [ref, pytest.param(native, marks=NO_COMPILER)], ids=["ref", "native"])
@pytest.mark.parametrize("number", [0, 3, 5, 8])
def test_a_rounded_matrix_depends_on_the_tokens_alone(number: int, implementation: ModuleType) -> None:
    """Chunks of any size, drafts and replays of them: outputs and copies are those of one token in each step."""
    plain, drafted = (in_bfloat16(mamba_step(MAMBA[0], (Sequence(0, LENGTH),), room=room)) for room in (0, ROOM))
    check_schedule(implementation.mix, implementation.mix, plain, drafted, number)


@NO_COMPILER
def test_what_the_code_cannot_read_is_an_error() -> None:
    inner, gate, step, weights, state, meta, form = mamba_step(MAMBA[0], (Sequence(0, 4),))
    with pytest.raises(ValueError, match="of one type"):
        native.mix(inner.half(), gate, step, weights, state, meta, form)
    with pytest.raises(ValueError, match="of widths"):
        native.mix(inner[:, 1:], gate, step, weights, state, meta, form)
    with pytest.raises(ValueError, match="matrices must be float32"):
        native.mix(inner, gate, step, weights, StateView(state.columns, state.matrix.double()), meta, form)
    with pytest.raises(ValueError, match="columns must be"):
        native.mix(inner, gate, step, weights, StateView(state.columns.bfloat16(), state.matrix), meta, form)
    later = pending_rows((Sequence(0, 4),), meta, ROOM, form.channels, torch.float32)
    with pytest.raises(ValueError, match="native mamba: pending rows must be"):
        native.mix(inner, gate, step, weights, StateView(state.columns, state.matrix, *later), meta, form)
    with pytest.raises(ValueError, match="norm must be float32"):
        native.mix(inner, gate, step, replace(weights, norm=None), state, meta, form)
