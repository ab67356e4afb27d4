"""Comparison of measurements: equal results pass, a result 6% slower fails. No engine runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.bench.against import compare_results, read_stored
from quire.contracts.errors import ConfigError
from quire.entry.cli.main import main
from quire.entry.exit_codes import DONE, FAILED, REFUSED


def result(factor: float = 1.0, **more: Any) -> dict[str, Any]:
    size = {"requests": 4, "input_tokens": 64, "output_tokens": 16}
    runs = [{"workload": name, "seconds": seconds * factor, **size} for name, seconds in (("a", 2.0), ("b", 0.5))]
    return {"engine": "quire", "model": "tiny", "device": "cpu", "runs": runs} | more


@pytest.mark.parametrize(("factor", "slower"), [(1.0, False), (1.04, False), (0.9, False), (1.06, True)])
def test_a_result_is_slower_above_five_percent(factor: float, slower: bool) -> None:
    found = compare_results(result(factor), result())
    assert [one.name for one in found] == ["a", "b"] and {one.slower for one in found} == {slower}
    assert [one.ratio for one in found] == pytest.approx([1 / factor] * 2)


def test_starts_are_compared_by_their_fastest() -> None:
    start = {"model": "tiny", "phases": {}, "totals": [1.2, 1.0]}
    (one,) = compare_results(start | {"totals": [1.3, 1.07]}, start)
    assert one.slower and one.stored == 1.0


@pytest.mark.parametrize("other", [{"model": "large"}, {"device": "cuda"}, {"runs": []}])
def test_results_of_other_things_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--against"):
        compare_results(result(), result(**other))


@pytest.mark.parametrize("text", [None, "no json", "[]", '{"model": "tiny"}'])
def test_files_that_are_no_results_are_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "stored.json").write_text(text)
    with pytest.raises(ConfigError, match="--against"):
        read_stored(tmp_path / "stored.json")


@pytest.mark.parametrize(("factor", "code"), [(1.0, DONE), (1.06, FAILED)])
def test_the_exit_code_of_the_command(
    factor: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps(result()))
    monkeypatch.setattr("quire.entry.cli.bench._workloads", lambda args: result(factor))
    assert main(["bench", "throughput", "--against", str(stored)]) == code
    assert ("slower" in capsys.readouterr().err) == (code == FAILED)
    assert main(["bench", "throughput", "--against", str(tmp_path / "nothing.json")]) == REFUSED
