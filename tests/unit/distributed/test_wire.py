"""Replicas that send rows to experts in 8 bits: the logits of rows that travel as they are, and one rank's tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.quantize.rows import QuantizedRows
from quire.layers.expert_dispatch import AllGatherExchange
from quire.plan import engine as plans

from ...support.full import full_rows
from ...support.quantized_checkpoints import FORMS, quantize_checkpoint
from ...support.simulated_groups import SimulatedGroup
from ...support.tiny_models import Tiny, random_model
from .test_engine import Answers, clear, run

HEADS, TOP_K = (16, 4), 3
HIDDEN = 16 * HEADS[0]  # two groups of columns
BYTES = {
    "fp8-block": HIDDEN + 2 * 4,
    "ct-fp8-channel": HIDDEN + 4,
    "ct-int8-channel": HIDDEN + 4,
    "ct-fp8-tensor": 4 * HIDDEN,
}  # of a row: numbers and scales; the last has a scale of each expert's own


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    plain: Path = tmp_path_factory.mktemp("plain")
    random_model(Tiny(family="qwen3_moe", heads=HEADS), 0).save_pretrained(plain)

    def made(form: str) -> Path:
        folder = plain.with_name(form)
        if not folder.exists():
            quantize_checkpoint(plain, folder, FORMS[form])
        return folder

    return made


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Bytes of the packed rows that ranks gathered."""
    found: set[int] = set()
    gather = SimulatedGroup.gather_rows

    def noted(group: SimulatedGroup, x: Tensor, counts: Any) -> Tensor:
        if x.dtype == torch.uint8:
            found.add(x.shape[1])
        return gather(group, x, counts)

    monkeypatch.setattr(SimulatedGroup, "gather_rows", noted)
    return found


def as_they_are(folder: Path, **sizes: Any) -> Answers:
    """The answers of replicas whose rows travel as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "with_wire", lambda plan, *given: plan)
        return run(folder, skip_tokenizer_init=True, experts=True, **sizes)


def same(found: Answers, expected: Answers) -> bool:
    """True where all logits have the same bits."""
    return (
        found.tokens == expected.tokens
        and found.logits.keys() == expected.logits.keys()
        and all(torch.equal(row, expected.logits[key]) for key, row in found.logits.items())
    )


@pytest.mark.parametrize(
    ("form", "sizes"), [*((form, {"dp": 2}) for form in BYTES), ("ct-int8-channel", {"dp": 2, "tp": 2})], ids=str
)
def test_no_logit_changes(
    checkpoint: Callable[[str], Path], widths: set[int], form: str, sizes: dict[str, int]
) -> None:
    folder = checkpoint(form)
    expected = as_they_are(folder, **sizes)
    assert widths == {4 * HIDDEN + 8 * TOP_K}
    widths.clear()
    found = run(folder, skip_tokenizer_init=True, experts=True, **sizes)
    assert widths == {BYTES[form] + 8 * TOP_K}
    assert same(found, expected)


@pytest.mark.parametrize("form", ["fp8-block", *full_rows(("ct-fp8-channel", "ct-int8-channel"))])
def test_tokens_of_one_rank(checkpoint: Callable[[str], Path], form: str) -> None:
    """No greedy choice is close. Sums of ranks differ in the last bit, so an 8-bit number may be a neighbour."""
    expected = run(checkpoint(form), skip_tokenizer_init=True)
    found = run(checkpoint(form), skip_tokenizer_init=True, experts=True, dp=2)
    assert clear(expected) and found.tokens == expected.tokens


def test_a_wrong_scale_is_seen(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first row that one rank sends."""
    folder, real = checkpoint("ct-int8-channel"), AllGatherExchange.dispatch

    def wrong(exchange: AllGatherExchange, *given: Any) -> Any:
        x, weights, ids = real(exchange, *given)
        assert isinstance(x, QuantizedRows)
        if exchange._ep.rank == 1:
            x.scales[:1] *= 1.01
        return x, weights, ids

    expected = as_they_are(folder, dp=2)
    monkeypatch.setattr(AllGatherExchange, "dispatch", wrong)
    assert not same(run(folder, skip_tokenizer_init=True, experts=True, dp=2), expected)
