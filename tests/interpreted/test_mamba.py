"""Mamba 2 for GPUs in Triton's interpreter, over poisoned states, and compiled for sm_90 without a GPU."""

import mmap
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch

from quire.kernels import triton_runtime
from quire.kernels.delta.inputs import Sequence
from quire.kernels.mamba import MambaForm, ref, triton
from quire.kernels.states import StateView

from ..support import state_inputs
from ..support.drafted_steps import PENDING, ROOM
from ..support.full import full_rows, only_full
from ..support.state_inputs import CHUNKED as STEPS
from ..support.state_inputs import MAMBA, in_bfloat16, mamba_step, resumed, run, with_meta

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

poisoned = pytest.fixture(autouse=True)(state_inputs.poisoned)


def check(given: tuple[Any, ...], decode_rows: int = 1, bound: float = 5e-5) -> None:
    """The kernels find what the reference finds: results, all columns to the bit, all matrices."""
    wanted, found = run(ref.mix, given), run(triton.mix, with_meta(given, decode_rows=decode_rows))
    assert found[0].dtype == given[0].dtype
    torch.testing.assert_close(found[0], wanted[0], rtol=bound, atol=bound)
    torch.testing.assert_close(found[2], wanted[2], rtol=bound, atol=bound, equal_nan=True)
    for one, other in zip((found[1], *found[3:]), (wanted[1], *wanted[3:]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("step", "form"),
    [(step, MAMBA[i % len(MAMBA)]) for i, step in enumerate(STEPS)]
    + list(full_rows((step, form) for step in STEPS for form in MAMBA)),
    ids=str,
)
def test_steps(step: str, form: MambaForm) -> None:
    check(mamba_step(form, STEPS[step]))


@pytest.mark.parametrize(
    ("form", "decode_rows"), [(MAMBA[0], 0), (MAMBA[1], 9), *full_rows(product(MAMBA, [0, 1, 9]))], ids=str
)
def test_wherever_decodes_end(form: MambaForm, decode_rows: int) -> None:
    """Rows are right whether a sequence of one row goes by itself or in chunks."""
    check(mamba_step(form, STEPS["mixed"] + (Sequence(61, 9, (63, 70)), Sequence(5, 10))), decode_rows)


@pytest.mark.parametrize(
    ("step", "form"), [*zip(PENDING, cycle(MAMBA), strict=False), *full_rows(product(PENDING, MAMBA))], ids=str
)
def test_pending_rows(step: str, form: MambaForm) -> None:
    """Rows that were accepted are replayed, also before a chunk of a prompt; those of a decode become pending ones."""
    check(mamba_step(form, PENDING[step], room=ROOM), decode_rows=ROOM)


@pytest.mark.parametrize("norm", ["", "gated", "first"])
def test_norms(norm: str) -> None:
    """Groups of several heads whose numbers are no power of two, for decodes and prompts."""
    check(mamba_step(replace(MAMBA[1], heads=9, groups=3, norm=norm), STEPS["mixed"]))


@pytest.mark.parametrize("form", MAMBA[:2], ids=range(2))
def test_programs_with_several_parts(form: MambaForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read a part ahead, also past sequences that have no row."""
    monkeypatch.setattr("quire.kernels.mamba.triton_decode.PROGRAMS", 5)
    check(mamba_step(form, STEPS["decodes"] + STEPS["mixed"]))


@pytest.mark.parametrize("step", ["decodes", "edges", *full_rows(["copies"])])
def test_half_precision(step: str) -> None:
    """The interpreter has no bfloat16."""
    check(mamba_step(MAMBA[0], STEPS[step], torch.float16), bound=1e-2)


@pytest.mark.parametrize("step", ["decodes", "mixed", "copies", "drafts"])
def test_matrices_in_bfloat16(step: str) -> None:
    """Chunks of prompts round less often than the reference, and the interpreter cuts where a GPU rounds."""
    room = ROOM * (step in PENDING)
    given = in_bfloat16(mamba_step(MAMBA[0], (STEPS | PENDING)[step], room=room))
    wanted, found = run(ref.mix, given), run(triton.mix, with_meta(given, decode_rows=room or 1))
    torch.testing.assert_close(found[0], wanted[0], rtol=4e-2, atol=4e-2)
    torch.testing.assert_close(found[2], wanted[2], rtol=4e-2, atol=4e-2, equal_nan=True)


@pytest.mark.parametrize("past", [63, 64, *full_rows([1, 100])])
def test_a_resumed_prompt(past: int) -> None:
    """A prompt cut anywhere gives what the unbroken one gives; at a multiple of the chunk, to the bit."""
    whole = with_meta(mamba_step(MAMBA[0], (Sequence(0, 150, (past, 0)),)), decode_rows=0)
    y, *states = run(triton.mix, whole)
    slot, bound = int(whole[5].slots[0]), 0.0 if past % 64 == 0 else 5e-5
    rest, *ended = run(triton.mix, resumed(whole, tuple(states), past))
    torch.testing.assert_close(rest, y[past:], rtol=bound, atol=bound)
    torch.testing.assert_close(ended[1][slot], states[1][slot], rtol=bound, atol=bound)
    assert torch.equal(ended[0][slot], states[0][slot])


@only_full
def test_rows_that_lie_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of a chunk lies 2^31 numbers behind the first one: offsets of rows have 64 bits."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *given: None)  # or all would be copied
    given, apart = mamba_step(MAMBA[0], (Sequence(0, 130),), torch.float16), 1 << 24
    inner = given[0]
    numbers = (1 << 31) + 129 * apart + inner.shape[1]
    memory = torch.frombuffer(mmap.mmap(-1, 2 * numbers), dtype=torch.float16)  # zeros, there where they are touched
    far = memory.as_strided((130, inner.shape[1]), (apart, 1), 1 << 31)
    far.copy_(inner)
    torch.testing.assert_close(
        run(triton.mix, (far, *given[1:])), run(triton.mix, given), rtol=0, atol=0, equal_nan=True
    )


def test_a_step_without_rows() -> None:
    given = mamba_step(MAMBA[0], (Sequence(7, 0), Sequence(0, 0)))
    y, columns, matrix = run(triton.mix, given)
    assert y.shape == (0, 64)
    torch.testing.assert_close((columns, matrix), (given[4].columns, given[4].matrix), rtol=0, atol=0, equal_nan=True)


def test_what_the_kernels_cannot_read_is_an_error() -> None:
    *rows, weights, state, meta, form = mamba_step(MAMBA[0], (Sequence(0, 4),))
    with pytest.raises(ValueError, match="matrices must be float32"):
        triton.mix(*rows, weights, StateView(state.columns, state.matrix.double()), meta, form)
    with pytest.raises(ValueError, match="columns must be"):
        triton.mix(*rows, weights, StateView(state.columns.half(), state.matrix), meta, form)
    with pytest.raises(ValueError, match="needs weights.norm"):
        triton.mix(*rows, replace(weights, norm=None), state, meta, form)


def test_compiles(compiled: Callable[..., set[str]]) -> None:
    kinds = ("decode", "rows", "plan", "convolve", "scan", "states", "outputs", "norm")
    assert compiled("compile_mamba") == {f"_{kind}_kernel" for kind in kinds}
