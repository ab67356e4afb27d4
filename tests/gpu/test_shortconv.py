"""The short convolution on a GPU against its reference in float32, at the sizes of LFM2; captured decodes."""

from typing import Any

import pytest
import torch

from quire.kernels.delta.inputs import Sequence
from quire.kernels.shortconv import ref, triton

from ..support.drafted_steps import PENDING, ROOM
from ..support.state_inputs import LONG as STEPS
from ..support.state_inputs import captured, close, conv_step, on_gpu, resumed, run, with_meta

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def compare(given: tuple[Any, ...], decode_rows: int = 1) -> None:
    """The kernels find what the reference finds: results, and all columns to the bit."""
    given, bound = with_meta(given, decode_rows=decode_rows), BOUNDS[given[0].dtype]
    wanted, found = run(ref.mix, given), run(triton.mix, given)
    close(found[0], wanted[0], bound)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("channels", "taps"), [(2048, 3), (1023, 4), (64, 2)])
@pytest.mark.parametrize("step", STEPS)
def test_steps(step: str, channels: int, taps: int, dtype: torch.dtype) -> None:
    for decode_rows in (0, 1):
        compare(on_gpu(conv_step(STEPS[step], channels, taps, dtype)), decode_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "taps"), [(2048, 3), (1023, 4), (64, 2)])
@pytest.mark.parametrize("step", PENDING)
def test_pending_rows(step: str, channels: int, taps: int, dtype: torch.dtype) -> None:
    """Rows that were accepted are replayed, also before a chunk of a prompt; those of a decode become pending ones."""
    compare(on_gpu(conv_step(PENDING[step], channels, taps, dtype, room=ROOM)), decode_rows=ROOM)


def test_many_sequences() -> None:
    drafts = [Sequence(9, 4, accepted=2)] * 300
    compare(on_gpu(conv_step(drafts, 2048, dtype=torch.bfloat16, room=ROOM)), decode_rows=ROOM)


def test_a_resumed_prompt_gives_the_same_bits() -> None:
    past = 100
    whole = on_gpu(conv_step((Sequence(0, 1000, (past, 0)),), 2048, dtype=torch.bfloat16))
    y, columns = run(triton.mix, whole)
    rest, ended = run(triton.mix, resumed(whole, (columns,), past))
    slot = int(whole[3].slots[0])
    assert torch.equal(rest, y[past:]) and torch.equal(ended[slot], columns[slot])


@pytest.mark.parametrize("step", ["decodes", "mixed"])
@pytest.mark.parametrize("room", [0, ROOM])
def test_a_captured_step(step: str, room: int) -> None:
    """A graph gives what launches give, each time that it runs."""
    given = on_gpu(conv_step(STEPS[step], 2048, dtype=torch.bfloat16, room=room))
    wanted = run(triton.mix, with_meta(given))
    for found in captured(triton.mix, with_meta(given)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
