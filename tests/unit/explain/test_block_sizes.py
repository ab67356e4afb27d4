"""KV groups with blocks of different sizes, as they are explained."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from quire.config.engine import EngineConfig
from quire.explain.describe import plan_engine
from quire.explain.render import render
from quire.plan import kv_geometry

from ...support.tiny_models import Tiny, tiny_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two layers with full attention and two with a window."""
    windows = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 11, "num_hidden_layers": 4}
    config = tiny_config(Tiny(family="qwen3", changes=(*windows.items(),)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def text(folder: Path) -> str:
    """The plan of an engine, as it is printed."""
    config = EngineConfig.from_flat(model=str(folder), device="cpu", skip_tokenizer_init=True, load_format="dummy")
    console = Console(width=300, file=StringIO(), record=True)
    console.print(render(plan_engine(config).describe()))
    return console.export_text()


def test_groups_with_equal_blocks_have_one_line(folder: Path) -> None:
    found = text(folder)
    assert "a block of 32 tokens: " in found and "windows: 1 group of up to 2 layers keep the last 11 tokens" in found
    assert "blocks of" not in found


def test_each_size_has_its_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_geometry, "block_sizes", lambda *_, **__: (64, 16))
    found = text(folder)
    assert "1 group of up to 2 layers of full attention: blocks of 64 tokens take " in found
    assert "1 group of up to 2 layers with a window of 11 tokens: blocks of 16 tokens take " in found
    assert "a block of" not in found
