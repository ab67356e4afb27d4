"""The short convolution: the reference against transformers' layer, and a CPU's kernel against the reference."""

from types import ModuleType

import pytest
import torch
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from quire.kernels.delta.inputs import Sequence
from quire.kernels.native.library import missing
from quire.kernels.shortconv import ShortConvWeights, native, ref
from quire.kernels.states import StateMeta, StateView

from ...support.drafted_steps import LENGTH, PENDING, ROOM, check_schedule
from ...support.state_inputs import STEPS, conv_step, run

NO_COMPILER = pytest.mark.skipif(bool(why := missing()), reason=why or "runs")


@pytest.mark.parametrize("cut", [0, 1, 2, 63, 64, 127])
@pytest.mark.parametrize("length", [1, 64, 65, 129])
def test_the_reference_equals_the_layer_of_transformers(length: int, cut: int) -> None:
    """In one step, or in two of which the first has `cut` rows."""
    torch.manual_seed(0)
    config = Lfm2Config(hidden_size=24, conv_bias=True, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=3)
    layer = Lfm2ShortConv(config, 0).eval()
    x = torch.randn(1, length, 24)
    with torch.no_grad():
        rows, expected = layer.in_proj(x)[0], layer(x)[0]
        weights = ShortConvWeights(layer.conv.weight[:, 0].T.contiguous(), layer.conv.bias)
        state = StateView(torch.full((2, 2, 24), torch.nan))
        found = []
        for first, end in [(0, cut), (cut, length)] if 0 < cut < length else [(0, length)]:
            meta = StateMeta(
                query_start=torch.tensor([0, end - first]),
                seq_lens=torch.tensor([end]),
                slots=torch.tensor([1]),
                kept_at=torch.zeros(2, 2, dtype=torch.int32),
                kept=torch.zeros(2, 2, dtype=torch.int32),
            )
            found.append(ref.mix(rows[first:end], weights, state, meta))
        torch.testing.assert_close(layer.out_proj(torch.cat(found)), expected, rtol=1e-5, atol=1e-5)


@NO_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "taps"), [(24, 3), (531, 4), (1024, 2)])
@pytest.mark.parametrize("step", [*STEPS, *PENDING])
def test_native(step: str, channels: int, taps: int, dtype: torch.dtype) -> None:
    given = conv_step((STEPS | PENDING)[step], channels, taps, dtype, ROOM * (step in PENDING))
    wanted, found = run(ref.mix, given), run(native.mix, given)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert found[0].dtype == dtype
    torch.testing.assert_close(found[0], wanted[0], rtol=bound, atol=bound)
    torch.testing.assert_close(found[1:], wanted[1:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("implementation", [ref, pytest.param(native, marks=NO_COMPILER)], ids=["ref", "native"])
@pytest.mark.parametrize("number", range(12))
def test_drafts_change_nothing(number: int, implementation: ModuleType) -> None:
    """Outputs with drafts are those of plain decoding, whatever is accepted; so is a copy at a length."""
    plain, drafted = (conv_step((Sequence(0, LENGTH),), 31, 2 + number % 3, room=room) for room in (0, ROOM))
    check_schedule(implementation.mix, ref.mix, plain, drafted, number)


@NO_COMPILER
def test_what_the_code_cannot_read_is_an_error() -> None:
    rows, weights, state, meta = conv_step((Sequence(0, 4),), 16)
    with pytest.raises(ValueError, match="rows must be"):
        native.mix(rows.half(), weights, state, meta)
    with pytest.raises(ValueError, match="columns must be"):
        native.mix(rows, weights, StateView(state.columns[:, :1]), meta)
    with pytest.raises(ValueError, match="weights must be"):
        native.mix(rows, ShortConvWeights(weights.conv.double()), state, meta)
