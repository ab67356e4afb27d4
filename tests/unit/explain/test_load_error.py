"""A plan of a folder with weights ends with the words by which the loader would refuse them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.config.engine import EngineConfig
from quire.contracts.errors import WeightsError
from quire.entry.cli.main import main
from quire.explain.describe import plan_engine
from quire.weights.load import load_weights

from ..weights.test_load import CONFIG, build, write_weights

UP = "model.layers.1.mlp.up_proj.weight"


def damaged(change: dict[str, torch.Tensor | None]) -> Callable[[Path, dict[str, torch.Tensor]], None]:
    def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        save_file(changed, folder / "model.safetensors")

    return write


def index(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    placed = dict.fromkeys(tensors, "model.safetensors") | {UP: "gone.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def truncated(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def pickled(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


DAMAGES = {
    "missing": (damaged({UP: None}), f"lacks {UP}"),
    "shape": (damaged({"model.norm.weight": torch.ones(15)}), "has shape [15], config.json makes it [16]"),
    "extra": (damaged({"model.norm.extra": torch.ones(1)}), "has no place in a qwen3 model"),
    "type": (damaged({"model.norm.weight": torch.ones(16, dtype=torch.int8)}), "is stored as I8"),
    "index": (index, "gone.safetensors is missing (model.safetensors.index.json names it)"),
    "truncated": (truncated, "is truncated"),
    "pickles": (pickled, "has only pytorch_model.bin"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def error_of(folder: Path, **options: Any) -> str:
    return plan_engine(EngineConfig.from_flat(model=str(folder), **options), described="h200").load_error


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_words_are_the_loader_s(folder: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = build()
    write, said = DAMAGES[damage]
    tensors = write_weights(folder, model)
    assert error_of(folder) == ""
    write(folder, tensors)
    with pytest.raises(WeightsError) as refused:
        load_weights(model, folder)
    assert said in error_of(folder) == str(refused.value)
    assert main(["explain", str(folder), "--device", "cpu"]) == 0
    assert "".join(capsys.readouterr().out.splitlines()[-3:]).replace("\n", "").endswith(str(refused.value).split()[-1])
    assert main(["explain", str(folder), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["load_error"] == str(refused.value)


def test_it_is_the_last_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DAMAGES["extra"][0](folder, write_weights(folder, build()))
    assert main(["explain", str(folder), "--device", "cpu", "--layer", "0"]) == 0
    assert "\nwould not load: model.norm.extra (in model.safetensors) has no place" in capsys.readouterr().out


def test_folders_without_weights_and_dummy_weights_are_planned(folder: Path) -> None:
    assert error_of(folder) == "", "a config alone is planned"
    DAMAGES["missing"][0](folder, write_weights(folder, build()))
    assert error_of(folder) and error_of(folder, load_format="dummy") == ""


def test_quantized_weights_are_checked_as_others_are(folder: Path) -> None:
    raw = CONFIG | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 8}}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = write_weights(folder, build())
    damaged({"model.layers.0.mlp.down_proj.qweight": torch.ones(2, dtype=torch.int32)})(folder, tensors)
    assert "down_proj.qweight has shape [2], config.json makes it [24, 2]" in error_of(folder)
    truncated(folder, tensors)
    assert "is truncated" in error_of(folder)
