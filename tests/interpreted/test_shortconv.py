"""Short convolutions for GPUs in Triton's interpreter, over poisoned states, and compiled for sm_90 without a GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.kernels import triton_runtime
from quire.kernels.delta.inputs import Sequence
from quire.kernels.shortconv import ref, triton
from quire.kernels.states import StateView

from ..support import state_inputs
from ..support.drafted_steps import PENDING, ROOM
from ..support.state_inputs import CHUNKED as STEPS
from ..support.state_inputs import conv_step, resumed, run, with_meta

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

poisoned = pytest.fixture(autouse=True)(state_inputs.poisoned)


def check(given: tuple[Any, ...], decode_rows: int = 1, bound: float = 1e-5) -> None:
    """The kernels find what the reference finds: results, and all columns to the bit."""
    wanted, found = run(ref.mix, given), run(triton.mix, with_meta(given, decode_rows=decode_rows))
    assert found[0].dtype == given[0].dtype
    torch.testing.assert_close(found[0], wanted[0], rtol=bound, atol=bound)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("step", STEPS)
def test_steps(step: str) -> None:
    check(conv_step(STEPS[step], 72))


@pytest.mark.parametrize("decode_rows", [0, 1, 9])
@pytest.mark.parametrize(("channels", "taps"), [(301, 4), (64, 2)])
def test_wherever_decodes_end(channels: int, taps: int, decode_rows: int) -> None:
    """Rows are right whether a sequence of one row goes by itself or in chunks."""
    check(conv_step(STEPS["mixed"] + STEPS["copies"], channels, taps), decode_rows)


@pytest.mark.parametrize("step", PENDING)
def test_pending_rows(step: str) -> None:
    """Rows that were accepted are replayed, also before a chunk of a prompt; those of a decode become pending ones."""
    check(conv_step(PENDING[step], 72, room=ROOM), decode_rows=ROOM)


@pytest.mark.parametrize("step", ["decodes", "copies"])
def test_half_precision(step: str) -> None:
    """The interpreter has no bfloat16."""
    check(conv_step(STEPS[step], 71, dtype=torch.float16), bound=4e-3)


@pytest.mark.parametrize("past", [1, 2, 64])
def test_a_resumed_prompt_gives_the_same_bits(past: int) -> None:
    whole = conv_step((Sequence(0, 90, (past, 0)),), 40)
    y, columns = run(triton.mix, whole)
    rest, ended = run(triton.mix, resumed(whole, (columns,), past))
    slot = int(whole[3].slots[0])
    assert torch.equal(rest, y[past:]) and torch.equal(ended[slot], columns[slot])


def test_what_the_kernels_cannot_read_is_an_error() -> None:
    rows, weights, state, meta = conv_step((Sequence(0, 4),), 16)
    with pytest.raises(ValueError, match="columns must be"):
        triton.mix(rows, weights, StateView(state.columns.half()), meta)
    with pytest.raises(ValueError, match="columns must be"):
        triton.mix(rows, weights, StateView(state.columns[:, :1]), meta)


def test_compiles(compiled: Callable[..., set[str]]) -> None:
    assert compiled("compile_mamba", "short") == {
        f"_{kind}_kernel" for kind in ("decode", "rows", "plan", "chunks", "columns")
    }
