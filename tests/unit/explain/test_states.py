"""States of recurrent layers, as they are explained: sizes in closed form, and what the options change."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quire.args.checkpoint import parse_checkpoint_config
from quire.config.engine import EngineConfig
from quire.explain.describe import plan_engine
from quire.explain.render import render
from quire.plan.memory import GIB
from quire.plan.sizing import resolve_sizing
from quire.reports.states import state_notes

from ...support.filled_models import planned
from ...support.tiny_models import Tiny, tiny_config


def plan(tmp_path: Path, family: str, **options: Any) -> dict[str, Any]:
    """The described plan of a tiny model with these options."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(Tiny(family=family))))
    given = {"device": "cpu", "skip_tokenizer_init": True, "load_format": "dummy", "dtype": "float32"} | options
    return plan_engine(EngineConfig.from_flat(model=str(tmp_path), **given)).describe()


def text(found: dict[str, Any]) -> str:
    """The plan, as it is printed."""
    console = Console(width=400, file=StringIO(), record=True)
    console.print(render(found))
    return console.export_text()


def test_sizes_of_states_are_told(tmp_path: Path) -> None:
    """Two layers with 8 value heads of 16 x 24, and 3 columns of 4 x 16 (q), 4 x 16 (k) and 8 x 24 (v) channels."""
    options = {"max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 22, "block_size": 16}
    found = plan(tmp_path, "qwen3_5_text", **options)
    states, memory = found["memory"]["states"], found["memory"]
    assert states["bytes"] == 2 * (8 * 16 * 24 + 3 * (2 * 4 * 16 + 8 * 24)) * 4
    assert states["tokens"] == round(states["bytes"] / memory["kv_bytes_per_token"])
    assert (states["slots"], states["places"]) == (4, "prompt,branch,turn")
    assert states["num_bytes"] == states["bytes"] * (4 + 1 + states["checkpoints"])
    assert "states of recurrent layers: 31.50 KiB for each request and checkpoint (as much as the KV of " in text(found)
    half = plan(tmp_path, "qwen3_5_text", **options, state_memory_fraction=0.5, state_checkpoint="turn")
    states = half["memory"]["states"]
    assert states["fraction"] == pytest.approx(0.5, abs=0.02) and states["places"] == "turn"
    rounded = plan(tmp_path, "qwen3_5_text", **options | {"block_size": 32}, state_checkpoint="prompt,every=48")
    assert rounded["memory"]["states"]["places"] == "prompt,every=64"
    assert "4 requests at once and " in text(half) and " checkpoints (turn) in " in text(half)


@pytest.mark.parametrize(("family", "matrices"), [("qwen3_5_text", 8 * 16 * 24), ("granite_mamba", 0), ("lfm2", 0)])
def test_matrices_in_bfloat16_have_half_the_bytes(family: str, matrices: int, tmp_path: Path) -> None:
    options = {"max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 22, "block_size": 16}
    whole = plan(tmp_path, family, **options)["memory"]["states"]
    found = plan(tmp_path, family, **options, mamba_ssm_cache_dtype="bfloat16")
    half, dtype = found["memory"]["states"], "" if family == "lfm2" else "bfloat16"
    assert whole["dtype"] == dtype.replace("bfloat16", "float32") and half["dtype"] == dtype
    assert not matrices or half["bytes"] == whole["bytes"] - 2 * 2 * matrices
    assert (half["bytes"] < whole["bytes"]) == (family != "lfm2")
    assert half["checkpoints"] >= whole["checkpoints"]
    assert ("with matrices in bfloat16" in text(found)) == bool(dtype)
    idle = "mamba_ssm_cache_dtype changes nothing: no layer keeps matrices" in found["model"]["notes"]
    assert idle == (family == "lfm2")


def test_nothing_is_reserved_that_nothing_takes(tmp_path: Path) -> None:
    """A pool has one checkpoint; running requests, and those that go on at files of earlier engines, have enough."""
    options: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 22, "kv_offload_gb": 0.5}
    disk = {"kv_offload_dir": str(tmp_path / "kv")}
    for more, count in (({}, 1), (disk, 5), ({"state_memory_fraction": 0.5}, 1)):
        memory = plan(tmp_path, "qwen3_5_text", **options, **more, state_checkpoint="none")["memory"]
        assert memory["states"]["checkpoints"] == count
        assert (memory["tiers"][0]["checkpoints"] == 1) == (count == 1)
    assert any("not state_memory_fraction=0.5: no checkpoints are taken" in note for note in memory["notes"])
    del options["kv_offload_gb"]
    found = plan(tmp_path, "qwen3_5_text", **options, enable_prefix_caching=False)
    assert found["memory"]["states"]["checkpoints"] == 5


def test_a_cap_by_places_is_told(tmp_path: Path) -> None:
    found = plan(tmp_path, "lfm2", kv_cache_memory_bytes=1 << 22, max_num_seqs=4, state_memory_fraction=0.5)
    states = found["memory"]["states"]
    assert states["fraction"] < 0.4
    said = f"states have {states['fraction']:.1%} of the memory of states and KV cache, not state_memory_fraction=0.5"
    assert any(note.startswith(f"{said}: the KV cache has ") for note in found["memory"]["notes"])
    assert said in " ".join(text(found).split())


@pytest.mark.parametrize("pp", [1, 2])
def test_each_request_has_a_checkpoint_and_there_is_one_more(pp: int, tmp_path: Path) -> None:
    found = plan(tmp_path, "nemotron_moe", num_gpu_blocks_override=100, max_num_seqs=256, pipeline_parallel_size=pp)
    assert found["memory"]["states"]["checkpoints"] >= 257
    assert not any("checkpoints of states for" in note for note in found["memory"]["notes"])


def test_too_few_checkpoints_are_told() -> None:
    engine = planned(parse_checkpoint_config(tiny_config(Tiny(family="qwen3_5_text"))), max_num_seqs=4)
    sizes = resolve_sizing(engine, GIB)
    assert sizes.checkpoints >= 5 and state_notes(engine, sizes) == ()
    (note,) = state_notes(engine, replace(sizes, checkpoints=4))
    assert note.startswith("4 checkpoints of states for 4 requests at once: each may hold one")
    nowhere = planned(engine.args, max_num_seqs=4, state_checkpoint="none")
    assert state_notes(nowhere, replace(sizes, checkpoints=1)) == ()


def test_tiers_hold_checkpoints_beside_blocks(tmp_path: Path) -> None:
    options = {"kv_cache_memory_bytes": 1 << 22, "kv_offload_gb": 0.5, "kv_offload_dir": str(tmp_path / "kv")}
    found = plan(tmp_path, "qwen3_5_text", **options)
    host, disk = found["memory"]["tiers"]
    assert host["checkpoints"] > 0 and disk["checkpoints"] > host["checkpoints"]
    said = text(found)
    for tier in (host, disk):
        assert f"{tier['tokens']:,} tokens, and {tier['checkpoints']:,} checkpoints" in said


def test_a_model_without_recurrent_layers_has_no_line(tmp_path: Path) -> None:
    found = plan(tmp_path, "qwen3", state_checkpoint="turn")
    assert found["memory"]["states"] == {} and "states of recurrent layers" not in text(found)
    assert "state_checkpoint changes nothing: no layer keeps states" in found["model"]["notes"]
