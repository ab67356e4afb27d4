"""Slots of redundant experts in `quire explain`: no expert that does not exist, and the rank of each copy."""

import json
from pathlib import Path

import pytest

from quire.entry.cli.main import main

from ...support.tiny_models import Tiny, tiny_config

FLAGS = ("--device", "h200", "-dp", "4", "-ep", "--enable-eplb", "--load-format", "dummy")


def explain(folder: Path, capsys: pytest.CaptureFixture[str], *more: str, copies: int = 4) -> str:
    """16 experts on 4 ranks."""
    raw = tiny_config(Tiny(family="glm4_moe", changes=(("n_routed_experts", 16),)))
    (folder / "config.json").write_text(json.dumps(raw))
    settings = json.dumps({"num_redundant_experts": copies})
    assert main(["explain", str(folder), *FLAGS, "--eplb-config", settings, *more]) == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_experts_and_copies_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = explain(tmp_path, capsys)
    assert "experts 0-15 and copies of experts 0-3 at the start (5 each)" in shown
    assert "experts 10-14 at the start on rank 2; expert 15 and copies of experts 0-3 at the start on rank 3" in shown


def test_a_rank_with_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = explain(tmp_path, capsys, "--rank", "3")
    assert "expert map: expert 15 and copies of experts 0-3 at the start to slots 0-4; the 11 others to -1" in shown
    assert "experts 10-14 on rank 2; expert 15 on rank 3" in shown
    assert "copies at the start: of experts 0-3 on rank 3" in shown
    assert ".mlp.experts.{15, 0-3}.gate_proj.weight: whole" in shown


def test_every_slot_has_an_expert_and_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More copies than slots of a rank: they lie on several ranks."""
    found = json.loads(explain(tmp_path, capsys, "--rank", "0", "--json", copies=12))
    places = [*map(tuple, found["routing_table"]), *((rank, slot) for _, rank, slot in found["copies"])]
    assert sorted(places) == [(rank, slot) for rank in range(4) for slot in range(7)]
    assert sorted(expert for expert, *_ in found["copies"]) == list(range(12))
    assert found["expert_ids"] == list(range(7))


def test_experts_that_may_move_are_told_as_those_of_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "experts 12-15 at the start on rank 3" in explain(tmp_path, capsys, copies=0)
