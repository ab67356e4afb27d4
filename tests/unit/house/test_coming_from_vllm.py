"""Each row of docs/coming-from-vllm.md has a side of Quire that exists."""

import re
from pathlib import Path

import pytest

import quire
from quire.config.env import PEER_NAMES
from quire.config.flags import flag_names, server_options
from quire.config.peer_flags import PEER_FLAGS
from quire.contracts import unknown_fields
from quire.entry.http.openai import decode
from quire.observe.metrics import FAMILIES

from ...support.named_code import NAMED, missing
from .test_deploy import SERIES as SERIES_ENDS

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from-vllm.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.+?)(?=^## |\Z)", PAGE, re.M | re.S))
ABSENT = "Metrics that are not here"
FIELDS, PYTHON = "Request fields", "Python: imports and SamplingParams"
OTHER = ("Flags", "Environment variables", "Metrics", ABSENT, FIELDS, PYTHON)  # sections without code
FLAGS = {name for _, option in server_options() for name in flag_names(option)}
METRICS = {family.name for family in FAMILIES}
SERIES = {f"quire:{family.name}{SERIES_ENDS[family.kind.split()[0]]}" for family in FAMILIES}
PEERS = {name for flag in PEER_FLAGS for name in flag.names}


def rows(section: str) -> list[list[str]]:
    cells = [line.strip("|\n ").split("|") for line in SECTIONS[section].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in [*row, "", ""][:3]] for row in cells[2:]]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_there_are_many() -> None:
    assert sum(len(rows(section)) for section in SECTIONS) >= 80
    assert set(OTHER) < set(SECTIONS)


@pytest.mark.parametrize("section", [section for section in SECTIONS if section not in OTHER])
def test_code(section: str) -> None:
    for _, ours, difference in rows(section):
        assert NAMED.search(ours) and missing(ours) + missing(difference) == []


def test_flags_variables_and_metrics() -> None:
    for theirs, ours, _ in rows("Flags"):
        assert set(named(theirs)) <= PEERS and named(ours) and set(named(ours)) <= FLAGS, theirs
    for theirs, ours, _ in rows("Environment variables"):
        (variable,) = named(theirs)
        assert set(named(ours)) <= FLAGS and all(name in PEER_NAMES[variable] for name in named(ours)), theirs
    for theirs, ours, _ in rows("Metrics"):
        assert named(theirs) == [f"vllm:{name}" for name in named(ours)] and set(named(ours)) <= METRICS, theirs
    for theirs, ours, _ in rows(ABSENT):
        assert not METRICS & {name.removeprefix("vllm:") for name in named(theirs)}, theirs
        assert set(re.findall(r"quire:\w+", ours)) <= SERIES, theirs


def test_fields_that_are_refused() -> None:
    """The page names fields that the server refuses, and fields of SamplingParams that raise; names to import exist."""
    for theirs, _, _ in rows(FIELDS):
        assert named(theirs) and set(named(theirs)) <= decode.REFUSED.keys(), theirs
    for theirs, ours, _ in rows(PYTHON):
        for name in re.findall(r"SamplingParams\((\w+)=", theirs):
            assert name in unknown_fields.REFUSED, name
        assert {name for name in re.findall(r"\b[A-Z]\w+", ours) if name != "TypeError"} <= set(quire.__all__), ours
