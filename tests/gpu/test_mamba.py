"""Mamba 2 on a GPU against its reference in float32, at the sizes of real models; captured decodes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.kernels.delta.inputs import Sequence
from quire.kernels.mamba import MambaForm, ref, triton

from ..support.drafted_steps import PENDING, ROOM
from ..support.state_inputs import LONG as STEPS
from ..support.state_inputs import captured, close, in_bfloat16, mamba_step, on_gpu, resumed, run, with_meta

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

FORMS = {
    "nemotron-3-nano": MambaForm(heads=64, groups=8, head_dim=64, state_dim=128),
    "granite-4-h-small": MambaForm(heads=128, groups=1, head_dim=64, state_dim=128),
    "falcon-h1-34b": MambaForm(heads=32, groups=2, head_dim=128, state_dim=256, norm=""),
    "falcon-h1-0.5b": MambaForm(heads=24, groups=1, head_dim=64, state_dim=128, norm="first"),
    "tiny": MambaForm(heads=4, groups=2, head_dim=16, state_dim=24),
    "odd": MambaForm(heads=6, groups=1, head_dim=20, state_dim=9, norm="first", lowest=0.3, highest=0.9),
    "wide": MambaForm(heads=6, groups=3, head_dim=72, state_dim=40),
}
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def compare(given: tuple[Any, ...], decode_rows: int = 1) -> None:
    """The kernels find what the reference finds: results, all columns to the bit, all matrices."""
    given, bound = with_meta(given, decode_rows=decode_rows), BOUNDS[given[0].dtype]
    wanted, found = run(ref.mix, given), run(triton.mix, given)
    close(found[0], wanted[0], bound)
    close(found[2], wanted[2], bound)
    for one, other in zip((found[1], *found[3:]), (wanted[1], *wanted[3:]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("form", FORMS)
def test_steps(form: str, step: str, dtype: torch.dtype) -> None:
    compare(on_gpu(mamba_step(FORMS[form], STEPS[step], dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", PENDING)
@pytest.mark.parametrize("form", FORMS)
def test_pending_rows(form: str, step: str, dtype: torch.dtype) -> None:
    """Rows that were accepted are replayed, also before a chunk of a prompt; those of a decode become pending ones."""
    compare(on_gpu(mamba_step(FORMS[form], PENDING[step], dtype, room=ROOM)), decode_rows=ROOM)


@pytest.mark.parametrize("step", [*STEPS, "drafts"])
@pytest.mark.parametrize("form", FORMS)
def test_matrices_in_bfloat16(form: str, step: str) -> None:
    """Chunks of prompts round less often than the reference."""
    room = ROOM * (step in PENDING)
    given = on_gpu(in_bfloat16(mamba_step(FORMS[form], (STEPS | PENDING)[step], torch.bfloat16, room=room)))
    given = with_meta(given, decode_rows=room or 1)
    wanted, found = run(ref.mix, given), run(triton.mix, given)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, 1e-2)


@pytest.mark.parametrize("norm", ["", "gated", "first"])
def test_norms(norm: str) -> None:
    for form in ("nemotron-3-nano", "granite-4-h-small"):
        compare(on_gpu(mamba_step(replace(FORMS[form], norm=norm), STEPS["mixed"], torch.bfloat16)))


@pytest.mark.parametrize("decode_rows", [0, 9])
def test_wherever_decodes_end(decode_rows: int) -> None:
    steps = (*(Sequence(past, 1 + past % 9, (past + 1, 0)) for past in range(33)), Sequence(5, 100))
    compare(on_gpu(mamba_step(FORMS["nemotron-3-nano"], steps, torch.bfloat16)), decode_rows)


def test_many_sequences() -> None:
    """More programs than run at once: those of a group count each other."""
    compare(on_gpu(mamba_step(FORMS["granite-4-h-small"], [Sequence(5, 1)] * 150, torch.bfloat16)))
    drafts = [Sequence(9, 4, accepted=2)] * 150
    compare(on_gpu(mamba_step(FORMS["granite-4-h-small"], drafts, torch.bfloat16, room=ROOM)), decode_rows=ROOM)


def test_a_resumed_prompt_gives_the_same_bits() -> None:
    past = 640
    whole = on_gpu(mamba_step(FORMS["nemotron-3-nano"], (Sequence(0, 1000, (past, 0)),), torch.bfloat16))
    y, *states = run(triton.mix, whole)
    rest, *ended = run(triton.mix, resumed(whole, tuple(states), past))
    slot = int(whole[5].slots[0])
    assert torch.equal(rest, y[past:]) and torch.equal(ended[1][slot], states[1][slot])


@pytest.mark.parametrize("step", ["decodes", "mixed"])
@pytest.mark.parametrize("room", [0, ROOM])
def test_a_captured_step(step: str, room: int) -> None:
    """A graph gives what launches give, each time that it runs: arrivals are counted from 0 again."""
    given = on_gpu(mamba_step(FORMS["granite-4-h-small"], STEPS[step], torch.bfloat16, room=room))
    wanted = run(triton.mix, with_meta(given))
    for found in captured(triton.mix, with_meta(given)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
