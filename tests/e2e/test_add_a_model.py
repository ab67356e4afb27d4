"""The example of docs/add-a-model.md is a family that runs as transformers does, in under 60 lines of code.

The family is added as the page says, from its blocks, while a test runs: it is not built in.
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import quire.models
from quire.args import families
from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.entry.cli.main import main

from ..support import tiny_models
from ..support.default_configs import default_configs
from .test_parity import build, check_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-model.md").read_text()
FAMILY = "vaultgemma"
# Code blocks by the file that the sentence before them names; blocks of a terminal by their last command.
CODE = dict(re.findall(r"`([\w/]+\.py)`:\n\n```python\n(.*?)```", PAGE, re.S))
SHOWN = dict(re.findall(r"```console\n(?:\$ [^\n]*\n)*\$ (?:quire|pytest) (\S+)[^\n]*\n(.*?)```", PAGE, re.S))
ROW, NAMES, CASE = "src/quire/args/families.py", f"src/quire/models/{FAMILY}.py", "tests/support/tiny_models.py"
RUN = {"batch": 7, "chunk": 16, "block_size": 8, "prefix": True, "depth": 2, "pool": "small"}


def add(monkeypatch: pytest.MonkeyPatch, code: dict[str, str]) -> None:
    """Add the family of these blocks to the tables of the package and of the tests, until the test ends."""
    module = ModuleType(f"quire.models.{FAMILY}")
    exec(code[NAMES], vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for table, file in ((families, ROW), (tiny_models, CASE)):
        for name, row in eval("{" + code[file] + "}", dict(vars(table))).items():
            monkeypatch.setitem(table.FAMILIES, name, row)  # type: ignore[attr-defined]


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> str:
    add(monkeypatch, CODE)
    return FAMILY


def test_the_example_is_short_complete_and_not_built_in() -> None:
    assert CODE.keys() == {ROW, NAMES, CASE} and TOLD.keys() == MISTAKES.keys() and all(TOLD.values())
    lines = sum(len(block.splitlines()) for block in CODE.values())
    assert lines < 60 and f"{lines} lines" in PAGE
    assert FAMILY not in families.FAMILIES and FAMILY not in tiny_models.FAMILIES
    assert not (Path(quire.models.__file__).parent / f"{FAMILY}.py").exists()


def test_logits_and_tokens_are_those_of_transformers(
    family: str, oracle: Any, tiny: Any, engine: Any, prompts: list[list[int]], greedy: Callable[..., Any]
) -> None:
    checkpoint = oracle(tiny(family=family))
    check_run(build(engine, checkpoint.folder, RUN), checkpoint, prompts, RUN, greedy)


def read(raw: dict[str, Any]) -> ModelArgs:
    return replace(parse_checkpoint_config(raw), notes=(), dtype="")


def test_defaults_are_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without `tied` is not found by `quire verify`, as the page says, and by this comparison."""
    whole, sizes = default_configs(family)
    assert read(sizes) == read(whole)
    add(monkeypatch, CODE | {ROW: CODE[ROW].replace("tied=True, ", "")})
    assert read(sizes) != read(whole)


def lines_of(command: str) -> Iterator[str]:
    """The lines that the page shows of a command's output, without numbers that depend on the machine."""
    return (rounded(line) for line in SHOWN[command].splitlines() if line not in ("...", ""))


def rounded(text: str) -> str:
    return re.sub(r"\d\.\de[+-]\d\d", "#", text)


@pytest.mark.parametrize("command", ["explain", "verify"])
def test_commands_print_what_the_page_shows(
    family: str, command: str, oracle: Any, tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(oracle(tiny(family=family)).folder)]) == 0
    printed = rounded(capsys.readouterr().out).splitlines()
    assert [line for line in lines_of(command) if line not in printed] == []


PRE = '    ("model.layers.{i}.pre_feedforward_layernorm.weight", "layers.{i}.mlp_norm.weight", ""),\n'
MISTAKES = {
    "no `window=`": (ROW, '        window=Window(default=4096, layers="between", period=2),\n', ""),
    "a word is forgotten": (ROW, " query_pre_attn_scalar", ""),
    "a name is forgotten": (NAMES, PRE, ""),
    "a name is wrong": (NAMES, PRE, PRE.replace("pre_feedforward", "post_attention")),
    "no `plus_one=True`": (ROW, "plus_one=True, ", ""),
    "no `root_embeddings=True`": (ROW, "root_embeddings=True, ", ""),
    "`interleaved=True`": (ROW, "soft_cap=50.0", "soft_cap=50.0, interleaved=True"),
}


# The messages of each mistake, as the page's table has them.
TOLD = {
    mistake: re.findall(r"`([^`]+)`", messages)
    for mistake, messages in re.findall(r"^\| (.*) \| (`.*`) \|$", PAGE.split("## 5.")[1], re.M)
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_as_the_page_says(
    mistake: str,
    oracle: Any,
    tiny: Any,
    family: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = str(oracle(tiny(family=family)).folder)
    (file, right, wrong), messages = MISTAKES[mistake], TOLD[mistake]
    assert right in CODE[file]
    add(monkeypatch, CODE | {file: CODE[file].replace(right, wrong)})
    assert main(["verify", folder]) != 0
    told = "".join(capsys.readouterr())
    assert [part for part in messages if part not in told] == []
