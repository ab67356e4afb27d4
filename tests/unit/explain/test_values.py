"""`quire weights`: a tensor's numbers beside their closed forms, quantized matrices as they are read, and the tree."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.assemble.quantize_checkpoint import Recipe, quantize_checkpoint
from quire.config.bundled import bundled_model
from quire.entry.cli.main import main
from quire.explain.values import statistics

TINY = bundled_model()
PROJECTION = "model.layers.3.self_attn.k_proj"


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["weights", *words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_statistics_of_a_known_tensor() -> None:
    values = torch.zeros(100, 100)
    values[3, 7], values[50, 1], values[0, 0], values[0, 1] = 1000.0, -500.0, math.nan, math.inf
    values[10:20] += 2
    found = statistics(values)
    finite = values[values.isfinite()].double()
    assert (found["count"], found["nan"], found["infinite"]) == (10_000, 1, 1)
    assert found["zeros"] == 10_000 - 1000 - 4 and found["outliers"] == 2
    assert found["least"] == -500 and found["most"] == 1000
    assert found["mean"] == pytest.approx(float(finite.mean())) and found["norm"] == pytest.approx(float(finite.norm()))
    assert found["farthest"][:2] == [[[3, 7], 1000.0], [[50, 1], -500.0]]
    first, width, counts = found["histogram"]
    assert sum(counts) == len(finite) and first < 0 < first + width * len(counts)
    assert counts[len(counts) // 2] == found["zeros"] + 1000, "zeros and twos lie in the bin around zero"
    assert statistics(torch.full((3,), math.nan))["least"] is None
    assert statistics(torch.ones(4))["std"] == 0


def test_a_tensor_and_the_nearest_names(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, str(TINY), PROJECTION)
    (stored,) = found["stored"]  # type: ignore[misc]
    truth = {name: one for file in TINY.glob("*.safetensors") for name, one in load_file(file).items()}
    assert stored["name"] == PROJECTION + ".weight" and found["weight"] is None
    assert stored["values"]["norm"] == pytest.approx(float(truth[stored["name"]].double().norm()))
    assert main(["weights", str(TINY), PROJECTION + "x"]) != 0
    assert PROJECTION in capsys.readouterr().err
    assert main(["weights", str(TINY), PROJECTION, "--tree"]) != 0


@pytest.mark.parametrize(("scheme", "error"), [("fp8-block", 0.05), ("awq-int4", 0.2), ("w8a8-int8", 0.02)])
def test_quantized_matrices_are_dequantized(
    scheme: str, error: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize_checkpoint(TINY, tmp_path / "out", Recipe(scheme=scheme), lambda done, total: None)
    plain = told(capsys, str(TINY), PROJECTION)["stored"][0]["values"]  # type: ignore[index]
    found = told(capsys, str(tmp_path / "out"), PROJECTION)
    weight = found["weight"]
    assert weight["shape"] == [128, 256]  # type: ignore[index]
    for name in ("norm", "least", "most", "std"):
        assert weight[name] == pytest.approx(plain[name], rel=error)  # type: ignore[index]
    assert weight["norm"] != plain["norm"]  # type: ignore[index]
    assert main(["weights", str(tmp_path / "out"), PROJECTION]) == 0
    assert "dequantized: 128x256" in capsys.readouterr().out


def test_numbers_that_are_none_stand_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a.weight": torch.tensor([1.0, math.nan, 0.0])}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert main(["weights", str(tmp_path), "a.weight"]) == 0
    assert "3 numbers, 1 of them zero; 1 NaN, 0 infinite" in capsys.readouterr().out


def test_modules_that_are_alike_are_one(capsys: pytest.CaptureFixture[str], shared: Path) -> None:
    """Also of a model that Quire does not know: names are enough."""
    tree = told(capsys, str(TINY), "--tree")
    assert list(tree["model"]["layers"]) == ["0-7"]  # type: ignore[index]
    assert main(["weights", str(TINY), "--tree"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"0-7 +12\.0 MiB", out) and "k_norm" in out
    assert main(["weights", str(shared / "models" / "quire-tiny-moe"), "--tree"]) == 0
    assert re.search(r"experts .*\n.*── 0-\d+ ", capsys.readouterr().out)
