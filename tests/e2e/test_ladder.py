"""The rungs of examples/ladder: their own checks pass, notebooks are theirs, and the files that they name exist."""

import json
import re
import runpy
from pathlib import Path

import pytest
from tools.notebooks import LADDER, notebook

ROOT = LADDER.parents[1]
RUNGS = sorted(LADDER.glob("rung*.py"))
pytest.importorskip("transformers", reason="the ladder compares with transformers")


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.stem)
def test_tokens_of_transformers(rung: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(LADDER))
    monkeypatch.setenv("PYTHONPATH", f"{LADDER}:{ROOT / 'src'}")  # of the processes of the last rung
    runpy.run_path(str(rung), run_name="__main__")
    out = capfd.readouterr().out
    assert "those of transformers" in out or "int8 weights" in out, out


def test_a_wrong_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LADDER))
    shared = runpy.run_path(str(LADDER / "model.py"))
    with pytest.raises(AssertionError):
        shared["check"]([[1, 2], [1, 2], [1, 2]])


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.stem)
def test_notebooks_are_the_files(rung: Path) -> None:
    """The cells are the code of the file that the test above runs: `python tools/notebooks.py` writes them."""
    made = rung.with_suffix(".ipynb").read_text()
    assert made == notebook(rung.read_text())
    code = ["".join(one["source"]) for one in json.loads(made)["cells"] if one["cell_type"] == "code"]
    compile("\n".join(code), rung.name, "exec")


def test_named_files_exist() -> None:
    texts = [*(rung.read_text() for rung in RUNGS), (LADDER / "README.md").read_text()]
    named = {name for text in texts for name in re.findall(r"`(\w+/[\w/.]*)`", text)}
    assert len(named) > 6
    for name in named:
        assert (ROOT / "src" / "quire" / name).exists(), name
