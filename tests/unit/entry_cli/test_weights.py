"""The table tells what the headers say."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from quire.entry.cli.main import main


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    header, offset = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    data = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(offset))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_safetensors(
        tmp_path / "model-00001-of-00002.safetensors",
        {"embed.weight": ("BF16", [100, 8], 1600), "scale": ("F32", [], 4)},
    )
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"head.weight": ("BF16", [1000, 8], 16000)})
    return tmp_path


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", str(folder), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [t["name"] for t in found["tensors"]] == ["embed.weight", "scale", "head.weight"]
    assert found["tensors"][2] == {
        "name": "head.weight",
        "shape": [1000, 8],
        "dtype": "BF16",
        "bytes": 16000,
        "file": "model-00002-of-00002.safetensors",
    }
    assert (found["num_tensors"], found["num_elements"], found["num_bytes"]) == (3, 8801, 17604)
    assert found["bytes_by_dtype"] == {"BF16": 17600, "F32": 4}
    assert found["files"] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "--model", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["tensor", "shape", "dtype", "size", "file"]
    assert lines[4].split() == ["embed.weight", "100x8", "BF16", "1.6", "KiB", "model-00001-of-00002.safetensors"]
    assert lines[5].split() == ["scale", "scalar", "F32", "4", "B", "model-00001-of-00002.safetensors"]
    assert lines[-1] == "3 tensors, 8,801 elements, 17.2 KiB (BF16 17.2 KiB, F32 4 B) in 2 files"


def test_a_missing_shard_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert main(["weights", str(folder)]) == 3
    assert "model-00001-of-00002.safetensors is missing" in capsys.readouterr().err


def test_the_bundled_model_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"].endswith("quire-tiny")
