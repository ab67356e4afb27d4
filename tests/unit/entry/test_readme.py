"""The README's section for users of vLLM says what is so."""

import re
from pathlib import Path

import pytest

from quire import LLM
from quire.entry.cli.main import main
from quire.entry.unsupported import METHODS
from quire.platforms.detect import MIN_CAPABILITY

README = (Path(__file__).parents[3] / "README.md").read_text()
SECTION = " ".join(README.partition("## If you come from vLLM")[2].partition("\n## ")[0].split())
HAS, LACKS = SECTION.partition("**It lacks**")[::2]


def test_what_the_class_has_and_lacks() -> None:
    public = {name for name, value in vars(LLM).items() if not name.startswith("_") and callable(value)}
    assert set(re.findall(r"`(\w+)`", HAS.partition("**`LLM` has**")[2])) == public - {"close"}
    assert set(METHODS) <= set(re.findall(r"`(\w+)`", LACKS))


def test_the_memory_of_a_real_model(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(shared / "hf" / "Qwen3-0.6B"), "--device", "h200"]) == 0
    plan = capsys.readouterr().out
    assert "1.11 GiB of weights" in plan and "1.11 GiB of weights" in SECTION
    assert "112.0 KiB per token" in plan and "112 KiB of KV cache per token" in SECTION
    assert "activations and graphs 3.9" in plan and "3.9 GiB of activations" in SECTION
    assert "gpu_memory_utilization 0.92" in plan and "92% of the memory" in SECTION


def test_the_gpus() -> None:
    assert f"capability {'.'.join(map(str, MIN_CAPABILITY))} " in SECTION
