"""Configurations of large models, as they are published and cut to few layers or experts."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ...support.full import FULL

Models = Callable[[str], Path]


@pytest.fixture(scope="session")
def shallow(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Folder of a model of the shared data: whole with --full; else two layers of experts, if it has any."""

    @functools.cache
    def made(model: str) -> Path:
        folder = shared / model
        raw = json.loads((folder / "config.json").read_text())
        if FULL or "num_experts_per_tok" not in raw:
            return folder
        return write(tmp_path_factory, folder, {"num_hidden_layers": depth(raw)})

    return made


@pytest.fixture(scope="session")
def glm(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of GLM-4.5 with a tenth of the experts, each ten times as wide: it weighs the same. Whole with --full."""
    folder = shared / "hf" / "GLM-4.5"
    fewer = {"n_routed_experts": 16, "num_experts_per_tok": 1, "moe_intermediate_size": 15360, "n_shared_experts": 0}
    return folder if FULL else write(tmp_path_factory, folder, fewer)


def depth(raw: dict[str, Any]) -> int:
    """Return the fewest layers with two of experts behind the dense ones, and not as many on each of three stages."""
    return max(4, raw.get("first_k_dense_replace", 0) + 2)


def write(factory: pytest.TempPathFactory, folder: Path, changes: dict[str, int]) -> Path:
    """Write the files of a folder without weights anew, with other values in config.json."""
    made: Path = factory.mktemp("models") / folder.name
    made.mkdir()
    for file in folder.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    raw = json.loads((folder / "config.json").read_text()) | changes
    (made / "config.json").write_text(json.dumps(raw))
    return made
