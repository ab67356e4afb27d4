"""Bytes, names and files against the headers of a checkpoint that has nothing but headers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire.bench
from quire.config.engine import EngineConfig
from quire.contracts.errors import UnsupportedModel
from quire.contracts.parallel import ALONE, Parallel
from quire.explain.describe import plan_engine
from quire.plan.engine import EnginePlan, ModelFacts, resolve_engine
from quire.quantization.scheme_words import scheme_words
from quire.weights.files import StoredTensor, read_checkpoint

from ...support.explained import explained
from ...support.full import FULL
from .conftest import Models

MODELS = ("DeepSeek-V3", "Qwen3-30B-A3B", "GLM-4.5")
TOGETHER = Parallel(tp=8, experts=True)
PER_FILE = 20_000 if FULL else 1_000  # tensors: some files for each model
ITEM = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}


def tensors(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype) of every tensor of the published checkpoint, but in bfloat16; from its config.json alone."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden), "BF16"
    yield "model.norm.weight", (hidden,), "BF16"
    yield "lm_head.weight", (c["vocab_size"], hidden), "BF16"
    extra = c.get("num_nextn_predict_layers", 0)
    for i in range(c["num_hidden_layers"] + extra):
        at = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", (hidden,), "BF16"
        for name, shape in attention(c, hidden, heads):
            yield f"{at}self_attn.{name}", shape, "BF16"
        if i < c.get("first_k_dense_replace", 0):
            yield from gated(f"{at}mlp.", hidden, c["intermediate_size"])
        else:
            yield from experts(c, f"{at}mlp.", hidden)
        if i >= c["num_hidden_layers"]:
            yield f"{at}eh_proj.weight", (hidden, 2 * hidden), "BF16"


def attention(c: dict[str, Any], hidden: int, heads: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if "kv_lora_rank" in c:
        rank, rope, nope, value, q_rank = (
            c[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank")
        )
        yield "q_a_proj.weight", (q_rank, hidden)
        yield "q_a_layernorm.weight", (q_rank,)
        yield "q_b_proj.weight", (heads * (nope + rope), q_rank)
        yield "kv_a_proj_with_mqa.weight", (rank + rope, hidden)
        yield "kv_a_layernorm.weight", (rank,)
        yield "kv_b_proj.weight", (heads * (nope + value), rank)
        yield "o_proj.weight", (hidden, heads * value)
        return
    for name, count in (("q", heads), ("k", c["num_key_value_heads"]), ("v", c["num_key_value_heads"])):
        yield f"{name}_proj.weight", (count * c["head_dim"], hidden)
        if c["attention_bias"]:
            yield f"{name}_proj.bias", (count * c["head_dim"],)
    yield "o_proj.weight", (hidden, heads * c["head_dim"])
    yield "q_norm.weight", (c["head_dim"],)
    yield "k_norm.weight", (c["head_dim"],)


def gated(at: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    yield f"{at}gate_proj.weight", (width, hidden), "BF16"
    yield f"{at}up_proj.weight", (width, hidden), "BF16"
    yield f"{at}down_proj.weight", (hidden, width), "BF16"


def experts(c: dict[str, Any], at: str, hidden: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    count, width = c.get("n_routed_experts") or c["num_experts"], c["moe_intermediate_size"]
    yield f"{at}gate.weight", (count, hidden), "BF16"
    for e in range(count):
        yield from gated(f"{at}experts.{e}.", hidden, width)
    if c.get("n_shared_experts"):
        yield f"{at}gate.e_score_correction_bias", (count,), "F32"
        yield from gated(f"{at}shared_experts.", hidden, width * c["n_shared_experts"])


def write_headers(folder: Path, raw: dict[str, Any]) -> None:
    """A checkpoint of sparse files: headers, then holes."""
    write_tensors(folder, raw, list(tensors(raw)))


def write_tensors(folder: Path, raw: dict[str, Any], entries: list[tuple[str, tuple[int, ...], str]]) -> None:
    (folder / "config.json").write_text(json.dumps(raw))
    files = [entries[i : i + PER_FILE] for i in range(0, len(entries), PER_FILE)]
    for number, some in enumerate(files, 1):
        header, end = {}, 0
        for name, shape, dtype in some:
            start, end = end, end + ITEM[dtype] * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (folder / f"model-{number:05}-of-{len(files):05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shallow: Models) -> Path:
    raw = json.loads((shallow(f"hf/{request.param}") / "config.json").read_text())
    raw.pop("quantization_config", None)
    made: Path = tmp_path_factory.mktemp(request.param)
    write_headers(made, raw)
    return made


def engine_plan(folder: Path, parallel: Parallel = ALONE) -> EnginePlan:
    return explained(EngineConfig.from_flat(model=str(folder)), parallel, "h200")


def planned(folder: Path, parallel: Parallel = ALONE) -> dict[str, Any]:
    return engine_plan(folder, parallel).describe()


def held_in_all(folder: Path, parallel: Parallel) -> int:
    return sum(num_bytes for _, num_bytes in engine_plan(folder, parallel).holdings.held)


def held(tensor: StoredTensor, rank: int, raw: dict[str, Any]) -> int:
    """Bytes of a tensor on one of 8 ranks, by the rules of Megatron-LM and whole experts, from its name alone."""
    name = tensor.name
    if ".experts." in name:
        count = raw.get("n_routed_experts") or raw["num_experts"]
        return tensor.num_bytes * (int(name.split(".experts.")[1].split(".")[0]) * 8 // count == rank)
    if name.endswith(("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")):
        return tensor.num_bytes // min(8, raw["num_key_value_heads"])
    cut = (
        "q_proj.weight",
        "q_proj.bias",
        "q_b_proj.weight",
        "kv_b_proj.weight",
        "o_proj.weight",
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
        "lm_head.weight",
        "embed_tokens.weight",
    )
    return tensor.num_bytes // 8 if name.endswith(cut) else tensor.num_bytes


def test_bytes_are_those_of_the_headers(folder: Path) -> None:
    plan, raw = planned(folder), json.loads((folder / "config.json").read_text())
    stored = read_checkpoint(folder).tensors
    layers = raw["num_hidden_layers"]
    mine = {name: one for name, one in stored.items() if not name.startswith(f"model.layers.{layers}.")}
    assert plan["model"]["bytes"] == sum(one.num_bytes for one in mine.values())
    assert plan["memory"]["weights"] == plan["ranks"][0]["bytes"] == plan["model"]["bytes"]
    named = {name: file for layer in plan["layers"] for one in layer["weights"] for name, file in one["stored"].items()}
    assert named == {name: one.file.name for name, one in mine.items()}
    for layer in plan["layers"]:
        of_layer = {name for one in layer["weights"] for name in one["stored"]}
        assert layer["bytes"] == sum(mine[name].num_bytes for name in of_layer)
    left = len(stored) - len(mine)
    assert plan["not_read"] == ({f"model.layers.{layers}.*": left} if left else {})


def test_bytes_of_ranks_that_share(folder: Path) -> None:
    plan, raw = planned(folder, TOGETHER), json.loads((folder / "config.json").read_text())
    last = f"model.layers.{raw['num_hidden_layers']}."
    mine = [one for one in read_checkpoint(folder).tensors.values() if not one.name.startswith(last)]
    assert len(plan["ranks"]) == 8
    for rank in plan["ranks"]:
        assert rank["bytes"] == sum(held(one, rank["number"], raw) for one in mine)


def test_slices_of_experts_and_stages_hold_everything_once(folder: Path) -> None:
    """Without norms, routers and what else every rank has, the parts add up to the whole."""
    whole, parts = engine_plan(folder).holdings, {"": 0, "rows": 0, "columns": 0, "experts": 0}
    for param in whole.layout:
        parts[param.shard] += whole.num_bytes(param)
    total = sum(parts.values())
    assert held_in_all(folder, Parallel(tp=4)) == total + 3 * parts[""]
    assert held_in_all(folder, Parallel(pp=3)) == total
    assert held_in_all(folder, Parallel(dp=2, experts=True)) == 2 * total - parts["experts"]


def test_a_quantized_checkpoint_is_planned(shallow: Models) -> None:
    plan = planned(shallow("hf/DeepSeek-V3"))
    assert plan["model"]["format"] == "fp8 in blocks of 128 x 128" and plan["missing"] == []
    found = {one["name"]: one for one in plan["layers"][1]["weights"]}
    down = found["layers.0.attention.down.weight"]  # 1536 rows and 576, of which the last block of 128 is not full
    assert down["bytes"] == down["raw_bytes"] == (1536 + 576) * 7168 + 4 * (12 + 5) * 56
    assert down["dtype"] == "FP8 in blocks of 128 x 128, activations per token and 128 channels"
    assert down["run"].rpartition(".")[2] in ("run", "run_norm") and list(down["stored"].values()) == [None] * 4
    assert list(down["stored"])[3] == "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    assert (down["format"], down["decided_by"], down["convert"].rpartition(".")[2]) == (
        "fp8",
        "quantization_config",
        "convert",
    )
    up = found["layers.0.attention.kv_up.weight"]
    assert up["dtype"] == "bfloat16" and up["stored_as"] == down["dtype"] and up["bytes"] == 2 * 32768 * 512
    assert up["raw_bytes"] == 32768 * 512 + 4 * 256 * 4
    assert found["layers.0.attention_norm.weight"]["run"] == "quire.kernels.linear.scaled.run_norm", "fused"
    (linear,) = (one for one in plan["kernels"] if one["weights"])
    assert (linear["op"], linear["weights"]) == ("linear", ("fp8 block",))
    assert plan["moe"]["decode"]["quantize_at"] == "experts"


def test_bytes_say_on_which_device_they_are(shared: Path) -> None:
    found = {}
    for load_device in ("auto", "cpu"):
        config = EngineConfig.from_flat(
            model=str(shared / "hf" / "Qwen3-0.6B"), quantization="fp8", load_device=load_device
        )
        plan = plan_engine(config, "h200").describe()
        found[load_device] = {one["name"]: one for one in plan["layers"][1]["weights"]}["layers.0.mlp.down.weight"]
        assert plan["model"]["format"] == "online fp8"
    for load_device, one in found.items():
        assert (one["load_device"], one["device"]) == ({"auto": "cuda"}.get(load_device, "cpu"), "cuda")
        assert one["raw_bytes"] == 2 * 1024 * 3072 and one["bytes"] == 1024 * 3072 + 4 * 8 * 24
        assert one["decided_by"] == "--quantization" and one["dtype"].startswith("FP8 in blocks of 128 x 128")


def test_weights_are_told_in_the_schemes_that_their_slices_have() -> None:
    """An expert of 1,408 has slices of 704, which cut blocks of 128 x 128."""
    parallel = Parallel(tp=2, pp=2)
    folder = Path(quire.bench.__file__).parent / "models" / "deepseek-v2-lite"
    config = EngineConfig.from_flat(model=str(folder), quantization="fp8")
    report = explained(config, parallel, "h200")
    plan = report.plan
    told = {one["name"]: one["dtype"] for layer in report.describe()["layers"] for one in layer["weights"]}
    for number in range(parallel.size):
        own = resolve_engine(
            plan.config,
            ModelFacts(folder=Path(plan.folder), args=plan.args, dtype=plan.dtype, quantization=plan.quantization),
            plan.machine,
            lambda need: "",
            parallel=parallel,
            number=number,
        )
        packed = {param.name: scheme_words(param.scheme) for param in own.params if param.scheme}
        assert {name: told[name] for name in packed} == packed
        assert 2 <= len(set(packed.values())), "no slice cuts a block"


@pytest.mark.parametrize("indexed", [False, True])
def test_modules_that_are_not_converted_are_planned_as_they_are_stored(
    shared: Path, tmp_path: Path, indexed: bool
) -> None:
    """As the config names them, or, where there are files, as these have scales; the parts of a matrix agree."""
    raw = json.loads((shared / "hf" / "Qwen3-0.6B" / "config.json").read_text())
    kept = ["model.layers.0.self_attn.o_proj", "model.layers.1", "layers.2.mlp.down_proj", "model.layers.3.mlp.gate"]
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": kept}
    raw["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(raw))
    first = planned(tmp_path)
    if indexed:
        names = [name for layer in first["layers"] for one in layer["weights"] for name in one["stored"]]
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "a")}))
        quantization.pop("modules_to_not_convert")
        (tmp_path / "config.json").write_text(json.dumps(raw))
    found = {one["name"]: one for layer in planned(tmp_path)["layers"] for one in layer["weights"]}
    plain = {name for name, one in found.items() if len(one["shape"]) > 1 and one["dtype"] == "bfloat16"}
    assert plain == {
        "embed.weight",
        "layers.0.attention.output.weight",
        "layers.2.mlp.down.weight",
        *(f"layers.1.{name}.weight" for name in ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")),
    }
    output = found["layers.0.attention.output.weight"]
    assert output["bytes"] == 2 * 1024 * 2048 and output["run"].startswith("quire.kernels.linear.")
    assert output["decided_by"] == ("names of stored tensors" if indexed else "quantization_config")
    quantization["modules_to_not_convert"] = ["model.layers.4.self_attn.k_proj"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    with pytest.raises(UnsupportedModel, match="4.self_attn.q_proj.weight is fp8 .*k_proj.weight is unquantized"):
        planned(tmp_path)


def packed(raw: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Tensors of a checkpoint of 4 bits."""
    hidden, groups = raw["hidden_size"], raw["hidden_size"] // 128
    yield "model.embed_tokens.weight", (raw["vocab_size"], hidden), "F16"
    yield "model.norm.weight", (hidden,), "F16"
    yield "lm_head.weight", (raw["vocab_size"], hidden), "F16"
    for i in range(raw["num_hidden_layers"]):
        at, kv = f"model.layers.{i}.", raw["num_key_value_heads"] * hidden // raw["num_attention_heads"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", (hidden,), "F16"
        wide = raw["intermediate_size"]
        for name, inner, outer in (
            ("self_attn.q", hidden, hidden),
            ("self_attn.k", hidden, kv),
            ("self_attn.v", hidden, kv),
            ("self_attn.o", hidden, hidden),
            ("mlp.gate", hidden, wide),
            ("mlp.up", hidden, wide),
            ("mlp.down", wide, hidden),
        ):
            yield f"{at}{name}_proj.qweight", (inner, outer // 8), "I32"
            yield f"{at}{name}_proj.qzeros", (groups, outer // 8), "I32"
            yield f"{at}{name}_proj.scales", (groups, outer), "F16"
            if name[-1] in "qkv":
                yield f"{at}{name}_proj.bias", (outer,), "F16"


def test_sizes_of_groups_of_4_bits(shared: Path, tmp_path: Path) -> None:
    """Raw bytes are those of the headers; packed ones have float32 scales and zero points of a byte."""
    raw = json.loads((shared / "hf" / "Qwen2.5-7B-Instruct-AWQ" / "config.json").read_text())
    write_tensors(tmp_path, raw, list(packed(raw)))
    plan, stored = planned(tmp_path), read_checkpoint(tmp_path).tensors
    weights = [one for layer in plan["layers"] for one in layer["weights"]]
    assert {name for one in weights for name in one["stored"]} == stored.keys() and plan["not_read"] == {}
    assert plan["model"]["bytes"] == plan["memory"]["weights"] == sum(one["bytes"] for one in weights)
    found = {one["name"]: one for one in plan["layers"][3]["weights"]}
    qkv, bias = found["layers.2.attention.qkv.weight"], found["layers.2.attention.qkv.bias"]
    assert [name.rpartition("self_attn.")[2] for name in qkv["stored"]] == [
        f"{part}_proj.{kind}" for part in "qkv" for kind in ("qweight", "scales", "qzeros")
    ]
    assert qkv["raw_bytes"] == sum(stored[name].num_bytes for name in qkv["stored"])
    rows, columns = qkv["shape"]
    assert qkv["bytes"] == rows * columns // 2 + 5 * rows * columns // 128
    assert qkv["dtype"] == "4-bit in groups of 128, zero points"
    assert len(bias["stored"]) == 3 and bias["dtype"] == "float16" and bias["decided_by"] == ""
    shared_out = engine_plan(tmp_path, Parallel(tp=4))
    assert shared_out.holdings.held[0][1] < plan["model"]["bytes"] / 2


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Qwen2.5-7B-Instruct-GPTQ-Int4", "4-bit in groups of 128"),
        ("Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "FP8 per channel, activations per token"),
        ("Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "INT8 per channel, activations per token"),
    ],
)
def test_sizes_without_headers(shared: Path, model: str, words: str) -> None:
    plan = planned(shared / "hf" / model)
    found = {one["name"]: one for one in plan["layers"][1]["weights"]}
    output, head = found["layers.0.attention.output.weight"], plan["layers"][-1]["weights"][-1]
    rows, columns = output["shape"]
    assert output["dtype"] == words and head["dtype"] in ("bfloat16", "float16")
    packed = rows * columns // 2 + 4 * rows * columns // 128
    assert output["bytes"] == (packed if "4-bit" in words else rows * (columns + 4))


def test_formats_that_are_not_implemented_are_refused_by_name(shared: Path, tmp_path: Path) -> None:
    raw = json.loads((shared / "hf" / "Qwen3-0.6B" / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match="asks for 'mxfp8', which is not implemented: use the unquantized"):
        planned(tmp_path)


@pytest.mark.parametrize(
    "folder",
    [
        "qwen3-8b-fp8",
        "qwen3-8b-awq",
        "qwen3-8b-gptq",
        "qwen3-8b-fp8-dynamic",
        "qwen3-8b-w8a8-int8",
        "qwen3-30b-a3b-fp8",
    ],
)
def test_quantized_models_of_the_measurements_are_planned(shallow: Models, folder: str) -> None:
    for device in ("h200", "cpu"):
        config = EngineConfig.from_flat(
            model=str(shallow(f"bench/models/{folder}")),
            load_format="dummy",
            device="cpu" if device == "cpu" else "auto",
        )
        plan = plan_engine(config, "h200" if device == "h200" else "").describe()
        assert plan["missing"] == [] and plan["model"]["format"] != "unquantized"
