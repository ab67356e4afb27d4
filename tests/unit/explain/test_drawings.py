"""Drawings of plans: well-formed, inside their frame, and with the numbers of the plan that they show."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire import bench
from quire.config.bundled import bundled_model
from quire.entry.cli.main import main

BENCH = Path(bench.__file__).with_name("models")
SVG = "{http://www.w3.org/2000/svg}"
MODELS = {
    "experts": (BENCH / "qwen3-30b-a3b", "-tp", "4", "--device", "h200"),
    "latents": (BENCH / "deepseek-v2-lite", "--device", "h200"),
    "windows": (BENCH / "gemma-3-1b", "--device", "h200"),
    "recurrent": (BENCH / "qwen3.5-0.8b", "--device", "h200"),
    "cpu": (bundled_model(), "--device", "cpu"),
}


def words_of(file: Path) -> str:
    """The words of a drawing. All of it lies inside its frame."""
    root = ElementTree.fromstring(file.read_text())
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for one in root.iter(SVG + "rect"):
        x, y, wide, high = (float(one.get(key, "0")) for key in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and wide >= 0 and x + wide <= width and y + high <= height, file.name
    found = [(float(one.get("x", "0")), float(one.get("y", "0")), one.text or "") for one in root.iter(SVG + "text")]
    assert all(x <= width and y <= height for x, y, _ in found), file.name
    return "\n".join(text for _, _, text in found)


@pytest.mark.parametrize("kind", MODELS)
def test_numbers_of_the_plan(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, *flags = MODELS[kind]
    assert main(["explain", str(model), *map(str, flags), "--svg", str(tmp_path / "out"), "--batch", "64"]) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    drawn = {file.stem: words_of(file) for file in files}
    assert {"model", "attention", "ranks", "memory"} <= drawn.keys()
    assert "layers" in drawn["model"] and "logits" in drawn["model"] and "linear." in drawn["model"]
    assert ("step" in drawn) == (kind != "cpu") and ("experts" in drawn) == (kind in ("experts", "latents"))
    assert ("exchanges" in drawn) == (kind == "experts")
    expected = {
        "experts": (("ranks", "query heads 24-31, KV head 3"), ("exchanges", "all-gather")),
        "latents": (("attention", "absorbed"), ("step", "gaps between kernels")),
        "windows": (("attention", "the last 512 tokens"),),
        "recurrent": (("model", "gated delta"),),
        "cpu": (("memory", "pages"), ("attention", "query heads share a KV head")),
    }
    for name, words in expected[kind]:
        assert words in drawn[name], (name, words, drawn[name])
    if kind == "latents":
        assert "1.1 KiB of a token and layer" in drawn["attention"] and "10.0 KiB of a token" in drawn["attention"]
    if kind == "experts":
        assert "1 token hits 8.0 of them, 256 tokens 128.0" in drawn["experts"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["explain", "--svg", str(tmp_path / "file")]) != 0
    assert "choose another folder" in " ".join(capsys.readouterr().err.split())
