"""`quire explain` on the command line: without torch, without weights, for what serve refuses, and for one layer."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.entry.cli.main import main
from quire.entry.exit_codes import REFUSED
from quire.explain import describe
from quire.explain.describe import plan_engine
from quire.explain.render_ranks import folded
from quire.kernels.linear import onednn_support as units
from quire.kernels.native import library
from quire.platforms.detect import DriverProbe

from ...support.explained import explained

TINY = str(bundled_model())


def test_torch_is_not_imported() -> None:
    program = """
import sys
from quire.entry.cli.main import main
for flags in ([], ["--device", "cpu", "--json"], ["--device", "h200"]):
    code = main(["explain", *flags])
    print(flags, code, "torch" in sys.modules, "triton" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert [line.rsplit("]", 1)[-1] for line in done.stderr.splitlines() if line[0] == "["] == [" 0 False False"] * 3


def test_experts_of_a_layer_are_one_line_for_each_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    model = bundled_model().parents[1] / "bench" / "models" / "qwen3-30b-a3b"
    assert main(["explain", str(model), "--layer", "0", "--device", "h200"]) == 0
    out = capsys.readouterr().out
    assert "<- model.layers.0.mlp.experts.{0-127}.gate_proj.weight" in out and len(out.splitlines()) < 60


def test_json_is_the_whole_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", TINY, "--json", "--device", "h100", "-tp", "2", "--max-model-len", "1024"]) == 0
    text = capsys.readouterr().out
    config = EngineConfig.from_flat(model=TINY, max_model_len=1024, tensor_parallel_size=2)
    assert text == json.dumps(plan_engine(config, "h100").describe(), indent=1) + "\n"
    printed = json.loads(text)
    assert printed["memory"]["max_model_len"] == 1024 and len(printed["ranks"]) == 2


def test_a_machine_without_a_gpu_is_told_of_gpus_to_plan_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = partial(describe.resolve_device, probe=lambda: DriverProbe(missing="there is no NVIDIA driver"))
    monkeypatch.setattr(describe, "resolve_device", found)
    assert main(["explain", TINY, "--device", "cuda"]) == 3
    assert "--device h200, h100, a100 plans for a GPU that is not here" in capsys.readouterr().err


def test_a_cpu_that_packs_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "missing_bf16", lambda: "this CPU has no avx512bw")
    monkeypatch.setattr(library, "missing_amx", lambda: "this CPU has no amx_tile")
    monkeypatch.setattr(library, "missing", lambda: "this CPU has no avx2")
    plan = plan_engine(EngineConfig.from_flat(model=TINY, dtype="bfloat16"), described="cpu")
    linear = next(choice for choice in plan.plan.kernels if choice.op == "linear")
    assert linear.name == "ref" and ("cpu", "this CPU has no avx512bw") in linear.rejected


def test_one_layer_has_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", TINY, "--layer", "7", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "layer 7: grouped-query attention" in out and "layers.0" not in out and "memory" not in out
    assert "<- model.layers.7.self_attn.k_proj.weight in model-0000" in out
    assert main(["explain", TINY, "--layer", "8", "--device", "cpu"]) != 0
    assert "give embed, 0 to 7, or head" in capsys.readouterr().err


def test_one_layer_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", TINY, "--layer", "head", "--json", "--device", "cpu"]) == 0
    assert [one["layer"] for one in json.loads(capsys.readouterr().out)["layers"]] == ["head"]
    assert main(["explain", TINY, "--layer", "8", "--json", "--device", "cpu"]) != 0
    assert "give embed, 0 to 7, or head" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-tp", "3"], "-tp 3: 4 attention heads cannot be divided by 3: use -tp 1, 2 or 4."),
        (["-tp", "0"], "--tensor-parallel-size=0: must be at least 1."),
        (["-dp", "0"], "--data-parallel-size=0: must be at least 1"),
        (["-ep"], "has no experts"),
        (["-dp", "1000000"], "1,000,000 ranks"),
        (["--routing", "uniform"], "use it only with --load-format=dummy"),
        (["--routing", "uniform", "--load-format", "dummy"], "is for models with experts"),
        (["--max-num-seqs", "4097"], "at most 4096 sequences"),
        (["--max-model-len", "1m"], "exceeds the model's context"),
    ],
)
def test_what_cannot_be_is_an_error(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert main(["explain", TINY, "--device", "h200", *flags]) != 0
    assert said in capsys.readouterr().err


def test_tiers_below_the_device_have_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = [
        "--kv-offloading-size",
        "2",
        "--kv-offload-dir",
        "/kv",
        "--kv-offload-dir-gb",
        "3",
        "--kv-peers",
        "a:5700,b:5700",
    ]
    assert main(["explain", TINY, "--device", "cpu", "--dtype", "float32", *tiers]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "host tier, lazy: host memory, 2.00 GiB = 8,192 pages = 262,144 tokens" in printed
    assert "disk tier, lazy: files in /kv, at most 3.00 GiB = 12,288 pages = 393,216 tokens" in printed
    assert "peer tier: blocks in host memory of a:5700, b:5700" in printed
    assert main(["explain", TINY, "--kv-transfer-config", '{"kv_connector": "NixlConnector"}']) == REFUSED
    assert "NixlConnector' is not implemented" in capsys.readouterr().err


def test_names_are_folded_over_experts() -> None:
    names = [f"m.experts.{e}.{part}" for e in range(3) for part in ("up", "down")] + ["m.gate", "m.experts.7.w"]
    assert list(folded(names)) == ["m.experts.{0-2}.up", "m.experts.{0-2}.down", "m.gate", "m.experts.7.w"]


def test_a_folder_with_nothing_but_a_config_or_an_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(TINY) / "config.json").read_text())
    config = EngineConfig.from_flat(model=str(tmp_path))
    first = plan_engine(config, described="h200").describe()["layers"][0]["weights"][0]
    assert first["stored"] == {"model.embed_tokens.weight": None}
    placed = {"weight_map": {"model.embed_tokens.weight": "a.safetensors", "other": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(placed))
    plan = plan_engine(config, described="h200").describe()
    assert plan["layers"][0]["weights"][0]["stored"] == {"model.embed_tokens.weight": "a.safetensors"}
    assert plan["not_read"] == {"other": 1}


def test_hopper_s_kernels_need_hopper() -> None:
    config = EngineConfig.from_flat(model=TINY)
    chosen = {
        device: {choice.op: choice for choice in plan_engine(config, described=device).plan.kernels}["attention"]
        for device in ("h200", "a100")
    }
    assert chosen["h200"].name == "hopper" and chosen["a100"].name == "triton"
    assert dict(chosen["a100"].rejected)["hopper"] == "needs compute capability 9.0, this GPU has 8.0"


def test_a_gpu_too_small_is_a_line_of_the_plan_and_no_error(glm: Path) -> None:
    config = EngineConfig.from_flat(model=str(glm))
    memory = plan_engine(config, described="h100").describe()["memory"]
    assert "are missing" in memory["refused"] and memory["weights"] > 600 << 30


@pytest.mark.parametrize("options", [{}, {"kv_cache_memory_bytes": 1 << 30}], ids=str)
def test_a_cpu_with_less_memory_than_weights_says_so(
    shared: Path, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = replace(describe.read_cpu_facts(), free_memory=1 << 30)
    monkeypatch.setattr(describe, "read_cpu_facts", lambda: facts)
    flat = {"model": str(shared / "hf" / "Qwen3-8B"), "device": "cpu", **options}
    for dtype, size, remedy in (("float32", "30.51", "dtype=bfloat16"), ("bfloat16", "15.26", "a smaller model")):
        refused = plan_engine(EngineConfig.from_flat(dtype=dtype, **flat)).memory
        assert str(refused).startswith(f"{size} GiB of weights in {dtype} exceed the 1.00 GiB of free memory: ")
        assert remedy in str(refused) and ("dtype=" in str(refused)) == (dtype == "float32")


def test_what_changes_on_a_gpu_changes_its_plan() -> None:
    plans = {
        eager: plan_engine(EngineConfig.from_flat(model=TINY, enforce_eager=eager), described="h200")
        for eager in (False, True)
    }
    graphs = {eager: plan.describe()["phases"]["graphs"] for eager, plan in plans.items()}
    assert graphs == {False: "KV cache in what is left, CUDA graphs of steps", True: "KV cache in what is left"}
    free = {eager: plan.memory.free_bytes for eager, plan in plans.items()}  # type: ignore[union-attr]
    assert free[True] - free[False] == plans[False].plan.graphs.num_bytes > 0
    dummy = plan_engine(EngineConfig.from_flat(model=TINY, load_format="dummy"), described="h200").describe()
    loads = {(one["load"], *one["stored"].values()) for layer in dummy["layers"] for one in layer["weights"]}
    assert {load for load, *_ in loads} == {"quire.weights.dummy.load_dummy"}
    assert {file for _, *files in loads for file in files} == {None} and dummy["not_read"] == {}
    assert dummy["phases"]["weights"].startswith("random")


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["explain", *flags]) == 0
    return capsys.readouterr().out


def test_ranks_that_hold_as_much_are_one_line(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(shared / "hf" / "Qwen3-0.6B")
    out = printed(capsys, model, "--device", "h200", "-pp", "2", "-dp", "2048")
    assert "2,048 of ranks 0-4094 (stage 0): layers 0-13, query heads 0-15, KV heads 0-7, embedding," in out
    out = printed(capsys, model, "--device", "h200", "-tp", "2", "-pp", "2", "-dp", "2")
    assert "ranks 0-1, 4-5 (stage 0): layers 0-13" in out and "ranks 2-3, 6-7 (stage 1): layers 14-27" in out
    assert "ranks 0, 2, 4 (stage 0)" in printed(capsys, model, "--device", "h200", "-pp", "2", "-dp", "3")
    assert "ranks 0-3 (stage 0): layers 0-27, query heads 0-15 (4 each), KV heads 0-7 (2 each), embedding, head, " in (
        printed(capsys, model, "--device", "h200", "-tp", "4")
    )


def test_memory_is_that_of_one_rank(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three stages, those at the ends hold more weights, the one between more layers and so the larger pages."""
    config = EngineConfig.from_flat(model=str(shared / "hf" / "Qwen3-0.6B"))
    plan = explained(config, Parallel(pp=3), "h200").describe()
    weights = [rank["bytes"] for rank in plan["ranks"]]
    assert plan["memory"]["rank"] == 1 and weights[1] < min(weights[0], weights[2])
    assert plan["memory"]["weights"] == weights[1] and "weights 0.3" in plan["memory"]["budget"]
    assert plan["memory"]["page_bytes"] == 10 * 128 * 2 * 8 * 128 * 2
    alone = plan_engine(config, described="h200").describe()
    embedding = next(one["bytes"] for layer in alone["layers"] for one in layer["weights"])
    assert sum(weights) == alone["model"]["bytes"] + embedding, "the last stage has the tied embedding again"
    assert "memory of rank 1, which has least room: 300.0 MiB of weights" in (
        printed(capsys, config.model.model, "--device", "h200", "-pp", "3")
    )


def test_stages_that_weigh_the_same_and_differ_in_layers(tmp_path: Path) -> None:
    """An embedding as large as a layer: the first stage weighs as much as the second, which has two layers."""
    raw = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 2 + 4 * 64 + 3 * 128,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = EngineConfig.from_flat(model=str(tmp_path), kv_cache_memory_bytes=1 << 20)
    plan = explained(config, Parallel(pp=3), "h200")
    held = [num_bytes for _, num_bytes in plan.holdings.held]
    assert held[0] == held[1] != held[2]
    assert plan.fullest == 1 and plan.describe()["memory"]["page_bytes"] == 2 * 2 * 128 * 64 * 2


def test_sizes_that_do_not_divide_the_model() -> None:
    with pytest.raises(ConfigError):
        plan_engine(EngineConfig.from_flat(model=TINY, tensor_parallel_size=3), "h200")
    # In its own process: a server that leaves a thread behind ends the process that it runs in.
    serve = subprocess.run(
        [sys.executable, "-m", "quire", "serve", TINY, "-tp", "3", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert serve.returncode == REFUSED and "quire: error: " in serve.stderr
