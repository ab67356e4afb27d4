"""How `quire run-batch` ends; here no line can be asked for, so that no engine is loaded."""

from pathlib import Path

import pytest

from quire.entry.cli.main import main


@pytest.mark.parametrize(("lines", "code", "told"), [
    ("nonsense\n{}\n", 1, "0 answers and 2 errors in {out}; the commonest error: invalid_line, 2 of 2 (line 1: "),
    ("", 0, "0 answers and 0 errors in {out}\n"),
])
def test_a_run_without_an_answer_fails_and_says_why(
    lines: str, code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines)
    assert main(["run-batch", "-i", str(source), "-o", str(out)]) == code
    assert told.format(out=out) in capsys.readouterr().err
