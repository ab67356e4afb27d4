"""Loading in `quire explain`: bytes in stored types, tensors that are not read, devices, the most memory it takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.args.checkpoint import parse_checkpoint_config
from quire.entry.cli.main import main
from quire.plan.as_stored import with_prediction
from quire.plan.layout import layout, stored_names

from ...support.quantized_checkpoints import FORMS
from ...support.tiny_models import Tiny, tiny_config

SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}


def explain(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["explain", str(folder), "--device", "h200", "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def weight(plan: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for layer in plan["layers"] for one in layer["weights"] if one["name"] == name)


def test_scales_are_counted_as_they_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In bfloat16; without files, in the float32 to which they are converted."""
    raw = tiny_config(Tiny(), **SIZES) | {"quantization_config": FORMS["ct-int8-channel"].config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    name = "layers.0.mlp.down.weight"
    assert weight(explain(tmp_path, capsys, "--load-format", "dummy"), name)["raw_bytes"] == 128 * 256 + 4 * 128
    at = "model.layers.0.mlp.down_proj."
    stored = {f"{at}weight": torch.zeros(128, 256, dtype=torch.int8)}
    save_file(stored | {f"{at}weight_scale": torch.ones(128, 1).bfloat16()}, tmp_path / "model.safetensors")
    assert weight(explain(tmp_path, capsys), name)["raw_bytes"] == 128 * 256 + 2 * 128


def test_a_layer_that_drafts_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but its copies of embedding and head."""
    raw = tiny_config(Tiny(family="glm4_moe"), **SIZES) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    args = parse_checkpoint_config(raw)
    copies = [f"model.layers.{args.num_layers}.{name}.weight" for name in ("embed_tokens", "shared_head.head")]
    names = [*stored_names(layout(with_prediction(args, drafting=1))), *copies]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    drafting = ("-sc", json.dumps({"method": "mtp", "num_speculative_tokens": 1}))
    assert explain(tmp_path, capsys, *drafting)["not_read"] == dict.fromkeys(copies, 1)
    (group,) = explain(tmp_path, capsys)["not_read"]
    assert group == f"model.layers.{args.num_layers}.*"


@pytest.mark.parametrize("method", ["", "fp8"])
def test_weights_that_are_loaded_elsewhere(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--load-device cpu changes the lines, and the memory that loading takes, of unquantized models, too."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(Tiny(), **SIZES)))
    flags = ["--load-format", "dummy", "--dtype", "bfloat16", *(["-q", method] if method else [])]
    shown, memory = {}, {}
    for device in ("auto", "cpu"):
        more = [*flags, "--load-device", device]
        memory[device] = explain(tmp_path, capsys, *more)["memory"]
        assert main(["explain", str(tmp_path), "--device", "h200", *more]) == 0
        shown[device] = " ".join(capsys.readouterr().out.replace("│", " ").split())
    here, there = memory["auto"]["loading"], memory["cpu"]["loading"]
    assert (here["device"], there["device"]) == ("cuda", "cpu") and here["units"] == there["units"] > 0
    assert here["bytes"] == memory["auto"]["weights"] + there["bytes"]
    assert here["units"] == 2 * 2 * 512 * 128, "two of gate and up, before they are quantized"
    assert "64.0 KiB are loaded on cpu" in shown["cpu"] and "loaded on cpu" not in shown["auto"]
    assert "of cuda: the weights, 256.0 KiB for two units that are loaded" in shown["auto"]
    assert "of host memory for each rank that loads: 256.0 KiB for two units" in shown["cpu"]


def test_a_refusal_is_wrapped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(Tiny(), **SIZES)))
    monkeypatch.setattr("quire.entry.cli.explain.WIDTH", 60)
    assert main(["explain", str(tmp_path), "--device", "h200", "--load-format", "dummy", "--enable-dbo"]) == 0
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("quire: refused by quire serve: --enable-dbo:") and others
    assert all(line.startswith("  ") and len(line) <= 60 for line in others)
