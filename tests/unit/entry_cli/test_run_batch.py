"""Exit codes of `quire run-batch`. No line of these files can be sent, so no engine is loaded."""

import os
from pathlib import Path

import pytest

from quire.entry.cli.main import main


@pytest.mark.parametrize(
    ("lines", "code", "told"),
    [
        ("nonsense\n{}\n", 1, "0 answers and 2 errors in {out}; the commonest error: invalid_line, 2 of 2 (line 1: "),
        ("", 0, "0 answers and 0 errors in {out}\n"),
    ],
)
def test_a_run_without_an_answer_fails_and_says_why(
    lines: str, code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines)
    assert main(["run-batch", "-i", str(source), "-o", str(out)]) == code
    assert told.format(out=out) in capsys.readouterr().err


def test_an_output_that_is_not_a_regular_file_is_refused_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("")
    os.mkfifo(out)
    assert main(["run-batch", "-i", str(source), "-o", str(out)]) == 3
    assert f"{out} is not a regular file" in capsys.readouterr().err and out.is_fifo()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    source, out, link = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    source.write_text("")
    link.symlink_to(out)
    assert main(["run-batch", "-i", str(source), "-o", str(link)]) == 0
    assert link.is_symlink() and out.is_file()
