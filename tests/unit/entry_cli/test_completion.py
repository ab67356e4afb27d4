"""Completion scripts are made from the parser; the one for bash is tried in bash."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from quire.entry.cli.completion import SCRIPTS, commands_of
from quire.entry.cli.main import COMMANDS, build_parser, main


@pytest.fixture(scope="module")
def script() -> str:
    return SCRIPTS["bash"](list(commands_of(build_parser())))


def complete(script: str, line: str, tmp_path: Path) -> set[str]:
    """What bash offers for the last word of a line."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    code = (f"{script}\nCOMP_WORDS=({quoted})\nCOMP_CWORD={len(words) - 1}\n_quire\n"
            'printf "%s\\n" "${COMPREPLY[@]}"\n')
    done = subprocess.run([bash, "--norc"], input=code, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(("line", "offered"), [
    ("quire serve --max-m", {"--max-model-len"}),
    ("quire serve some/model --max-m", {"--max-model-len"}),
    ("quire serve --no-off", {"--no-offline"}),
    ("quire serve --dtype b", {"bfloat16"}),
    ("quire chat --dtype fl", {"float32", "float16", "float"}),
    ("quire do", {"doctor"}),
    ("quire bench la", {"latency"}),
    ("quire bench engine --st", {"--steps"}),
    ("quire bench latency --st", set()),
    ("quire ", set(COMMANDS)),
    ("quire completion ", {"bash", "zsh", "fish"}),
    ("quire serve --tensor-par", set()),  # vLLM's flags are taken and not proposed
])
def test_bash(script: str, line: str, offered: set[str], tmp_path: Path) -> None:
    assert complete(script, line, tmp_path) == offered


def test_bash_offers_folders_for_a_model(script: str, tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert "my-model" in complete(script, "quire serve my-", tmp_path)


@pytest.mark.parametrize("shell", list(SCRIPTS))
def test_every_command_and_flag_is_in_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"\b{name}\b", text)
    for flag in ("max-model-len", "quick", "steps", "print-config"):
        assert flag in text


def test_quotes_in_help_texts_end_no_string() -> None:
    """Every line of the fish script has its quotes in pairs."""
    for line in SCRIPTS["fish"](list(commands_of(build_parser()))).splitlines():
        assert line.replace("\\'", "").count("'") % 2 == 0, line
