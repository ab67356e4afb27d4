"""Completion scripts are made from the parser; each is tried in its shell, where that is installed."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from quire.entry.cli.completion import SHELLS, rows, script
from quire.entry.cli.main import COMMANDS, build_parser, main

ASKING = {  # a line in which everything but the last word is typed -> how a shell is made to offer words for it
    "bash": "COMP_WORDS=({words})\nCOMP_CWORD={last}\n_quire\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n",
    "zsh": '_describe() {{ [[ $1 == -* ]] || print -l -- "${{(@P)2}}" }}\n_files() {{ }}\nwords=({words})\n'
    "CURRENT={last}+1\n_quire\n",
    "fish": "function commandline; switch $argv[1]; case -opc; printf '%s\\n' {before}; case -ct; echo {current}; end; "
    "end\n_quire\n",
}


def complete(shell: str, line: str, folder: Path) -> dict[str, str]:
    """Return the words that a shell offers for the last word of a line, with their help."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"there is no {shell}")
    quoted = [f"'{word}'" for word in line.split(" ")]
    asking = ASKING[shell].format(
        words=" ".join(quoted), last=len(quoted) - 1, before=" ".join(quoted[:-1]), current=quoted[-1]
    )
    done = subprocess.run(
        [found],
        input=f"{script(shell, build_parser())}\n{asking}",
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    typed = line.split(" ")[-1]  # what bash filters by, the others leave to the shell
    lines = [line for line in done.stdout.splitlines() if line.startswith(typed)]
    return {word: "".join(help) for word, *help in (re.split(r"\t|(?<!\\):", line, maxsplit=1) for line in lines)}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("quire serve --max-m", {"--max-model-len"}),
        ("quire serve some/model --max-m", {"--max-model-len"}),
        ("quire serve --no-off", {"--no-offline"}),
        ("quire serve --dtype b", {"bfloat16"}),
        ("quire chat --dtype fl", {"float32", "float16", "float"}),
        ("quire do", {"doctor"}),
        ("quire bench la", {"latency"}),
        ("quire bench startup --rep", {"--repeat"}),
        ("quire bench serve --rep", set()),
        ("quire ", set(COMMANDS)),
        ("quire completion ", {"bash", "zsh", "fish"}),
        ("quire serve --tensor-par", {"--tensor-parallel-size"}),
        ("quire serve --prefill-context-parallel-si", set()),  # flags of vLLM that Quire refuses are not proposed
    ],
)
def test_what_is_offered(shell: str, line: str, offered: set[str], tmp_path: Path) -> None:
    assert {word for word in complete(shell, line, tmp_path) if word} == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_help_is_shown_with_a_word(shell: str, tmp_path: Path) -> None:
    assert complete(shell, "quire serve --max-m", tmp_path)["--max-model-len"].startswith("context length in tokens (")
    assert complete(shell, "quire do", tmp_path)["doctor"].startswith("check this machine")


def test_zsh_completes_at_the_first_tab_when_the_script_lies_in_its_folder_of_functions(tmp_path: Path) -> None:
    """In a terminal. zsh takes the file for the body of `_quire`, which must call the function that it defines."""
    found = shutil.which("zsh")
    if found is None:
        pytest.skip("there is no zsh")
    (tmp_path / "_quire").write_text(script("zsh", build_parser()))
    child, terminal = pty.fork()
    if child == 0:
        os.execve(found, ["zsh", "-f", "-i"], {"TERM": "dumb", "PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    try:
        os.write(
            terminal, f"fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -D; print -r R''EADY\n".encode()
        )
        read_until(terminal, b"READY")
        os.write(terminal, b"quire do\t")
        read_until(terminal, b"doctor")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def read_until(terminal: int, words: bytes) -> None:
    """Read what a terminal shows until it has shown these words."""
    shown = b""
    while words not in shown:
        assert select.select([terminal], [], [], 30)[0], shown
        shown += os.read(terminal, 65536)


def test_bash_offers_folders_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert "my-model" in complete("bash", "quire serve my-", tmp_path)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_flag_is_in_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"\b{name}\b", text)
    for flag in ("max-model-len", "quick", "repeat", "print-config"):
        assert flag in text


def test_nothing_in_the_table_ends_a_string() -> None:
    table = list(rows(build_parser()))
    assert any("'" in help for *_, help in table), "this test would see nothing"
    assert not any(set("\t\n\\") & set(cell) or "'" in word for *cells, word, _ in table for cell in cells)
    assert not any(set("\t\n\\") & set(help) for *_, help in table)
    for shell in SHELLS:
        assert script(shell, build_parser()).count("'") % 2 == 0
