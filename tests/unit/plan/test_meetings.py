"""The table of what works with what: each row applies, pairs without a row resolve, all conflicts are told together."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from meetings_page import DRAFT, EXAMPLES, HEAD, MODEL, NGRAM, arguments, example, together
from quire.args.checkpoint import parse_checkpoint_config
from quire.args.foreign import ForeignEnds, ForeignNorm
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError, InvalidParameter, UnsupportedModel
from quire.entry.cli.main import main
from quire.explain.describe import plan_engine
from quire.explain.render_ranks import not_runnable
from quire.kernels.select import probe_of
from quire.plan.dtype import DTypePlan
from quire.plan.engine import EnginePlan, Machine, ModelFacts, resolve_engine
from quire.plan.meeting_rows.features import FEATURES
from quire.plan.meeting_rows.records import (
    ENGINE,
    IDLE,
    MISSING,
    REFUSED,
    REQUEST,
    STEPS,
    VERIFY,
    AskedFields,
    Inputs,
    Row,
)
from quire.plan.meeting_rows.rows import ROWS
from quire.plan.meetings import Meeting, check, check_fields, idle_notes, inputs_of, met, rows_of
from quire.plan.placement import parallel_sizes

from ...support.changed_args import with_layers, with_mixer
from ...support.tiny_models import Tiny, tiny_config

MOVES = EXAMPLES["EPLB"]
SHARED = {"data_parallel_size": 2, "enable_expert_parallel": True}
MTP, EAGLE = EXAMPLES["MTP"], EXAMPLES["EAGLE"]
RECURRENT = {key: value for key, value in DRAFT.items() if key != "architectures"} | {"model_type": "qwen3_5_text"}
RECURRENT["full_attention_interval"] = 2
INVARIANT = EXAMPLES["batch invariance"]
HOSTS = {"cpu": "a CPU", "mock": "mock"}
DIVIDED = {"decode_context_parallel_size": 2, "tensor_parallel_size": 2}
LIFE = EXAMPLES["sleep"] | EXAMPLES["new weights"]
ALL = {"chunks": "kv_chunks", "text": True, "transfer": True, "truncated": True}
# Options, changes of the inputs, and the rows (feature, other) that apply, among others of the same options.
SAMPLES: list[tuple[dict[str, Any], dict[str, Any], set[tuple[str, str]]]] = [
    ({"tensor_parallel_size": 3}, {}, {("-tp", "uneven heads")}),
    ({"tensor_parallel_size": 2}, {"heads": (6, 3)}, {("-tp", "uneven KV heads")}),
    ({"pipeline_parallel_size": 7}, {}, {("-pp", "fewer layers")}),
    ({"pipeline_parallel_size": 2, "pipeline_layer_partition": (3, 4)}, {}, {("layer partition", "other layers")}),
    ({"data_parallel_size": 5000}, {}, {("several ranks", "too many ranks")}),
    ({"nnodes": 3, "tensor_parallel_size": 2}, {}, {("hosts", "uneven hosts")}),
    ({"nnodes": 2, "distributed_executor_backend": "ray"}, {}, {("hosts", "Ray"), ("Ray", "one rank")}),
    ({"data_parallel_size": 4, "data_parallel_size_local": 5}, {}, {("local replicas", "other replicas")}),
    (EXAMPLES["Ray"] | {"data_parallel_size": 4, "data_parallel_size_local": 2}, {}, {("local replicas", "Ray")}),
    (EXAMPLES["collective checks"] | {"enforce_eager": False}, {}, {("collective checks", "captured exchanges")}),
    (MOVES, {"dense": True}, {("-ep", "no experts"), ("EPLB", "no experts")}),
    (SHARED | {"data_parallel_size": 16}, {}, {("-ep", "fewer experts")}),
    ({"enable_eplb": True}, {}, {("EPLB", "one expert rank")}),
    ({"enable_expert_parallel": True}, {}, {("-ep", "one expert rank")}),
    (MOVES | {"eplb_config": {"num_redundant_experts": 1}}, {}, {("EPLB", "uneven slots")}),
    (MOVES | {"eplb_config": {"num_redundant_experts": 10}}, {}, {("EPLB", "too many slots")}),
    ({"all2all_backend": "deepep_low_latency"}, {}, {("exchange", "no exchange")}),
    ({"expert_placement_strategy": "round_robin"}, {}, {("round robin", "idle placement")}),
    ({"routing": "uniform"}, {"dense": True}, {("routing", "no experts"), ("routing", "real weights")}),
    ({"speculative_config": {"method": "medusa", "model": "x"}}, {}, {("drafts", "planned method")}),
    (MTP, {"dense": True}, {("MTP", "not one MTP layer")}),
    (
        {"speculative_config": MTP["speculative_config"] | {"index_share_for_mtp_iteration": True}},
        {},
        {("shared choice", "no indexer")},
    ),
    (
        {"speculative_config": EAGLE["speculative_config"] | {"draft_tensor_parallel_size": 3}},
        {},
        {("drafts of another model", "other ranks")},
    ),
    (
        EXAMPLES["draft model"] | {"tensor_parallel_size": 8},
        {"heads": (8, 8)},
        {("drafts of another model", "uneven drafter")},
    ),
    (EAGLE, {"head": {"rope_scaling": {"type": "dynamic", "factor": 2.0}}}, {("EAGLE", "dynamic rope")}),
    (EAGLE, {"head": {"hidden_size": 32}}, {("EAGLE", "other width")}),
    (EAGLE, {"head": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, {("EAGLE", "lacking layers")}),
    (EAGLE, {"head": {"vocab_size": 200}}, {("drafts of another model", "other vocabulary")}),
    (
        {"speculative_config": EXAMPLES["draft model"]["speculative_config"] | {"max_model_len": 255}},
        {"length": 90},
        {("drafts of another model", "shorter context"), ("drafts of another model", "shorter draft length")},
    ),
    (
        EXAMPLES["n-grams"] | EXAMPLES["host memory"] | {"enable_cache_blend": True},
        {"recurrent": True},
        {("CacheBlend", "states")},
    ),
    (
        {"state_checkpoint": "none", "state_memory_fraction": 0.5},
        {},
        {("places of checkpoints", "no states"), ("state memory", "no states")},
    ),
    ({"mamba_ssm_cache_dtype": "bfloat16"}, {"conv": True, "device": "cpu"}, {("type of matrices", "no matrices")}),
    (
        EXAMPLES["draft model"] | {"enable_cache_blend": True},
        {"recurrent drafts": True},
        {("CacheBlend", "states")},
    ),
    ({"speculative_config": NGRAM | {"draft_tensor_parallel_size": 2}}, {}, {("drafts of the model", "other ranks")}),
    (
        {"enable_cache_blend": True, "enable_prefix_caching": False},
        {},
        {("CacheBlend", "no prefix cache")},
    ),
    ({"enable_cache_blend": True}, {"layers": 2}, {("CacheBlend", "few layers")}),
    ({"kv_cache_dtype": "fp8_ds_mla"}, {}, {("rows of latents", "other attention")}),
    (
        EAGLE | {"decode_context_parallel_size": 2, "tensor_parallel_size": 3, "enable_cache_blend": True},
        {},
        {("-dcp", one) for one in ("uneven contexts", "other attention", "drafts of another model", "CacheBlend")},
    ),
    (
        EXAMPLES["sharing"] | EXAMPLES["peers"] | DIVIDED,
        {"chosen": True},
        {("-dcp", one) for one in ("chosen tokens", "sharing", "peers")},
    ),
    (
        {"kv_cache_dtype": "fp8_ds_mla", "enable_cache_blend": True},
        {"latent": True, "device": "cpu"},
        {("CacheBlend", "rows of latents")},
    ),
    (
        EAGLE | EXAMPLES["KV events"] | {"enable_prompt_embeds": True, "enable_cache_blend": True},
        {},
        {("prompt embeddings", other) for other in ("CacheBlend", "KV events")},
    ),
    (
        {"enable_prompt_embeds": True},
        {"gemma4": True, "device": "mock"},
        {("prompt embeddings", "layer inputs"), ("prompt embeddings", "mock")},
    ),
    ({"enable_cache_blend": True}, {"chosen": True}, {("CacheBlend", "chosen tokens")}),
    (
        EAGLE | {"enable_cache_blend": True, "tensor_parallel_size": 2},
        {"foreign": True},
        {("CacheBlend", "layers of transformers"), ("EAGLE", "layers of transformers"), ("-tp", "layers in one piece")},
    ),
    (
        SHARED | {"routing": "uniform", "enable_lora": True, "hf_overrides": {"vocab_size": 8}},
        {"foreign": True},
        {(one, "layers of transformers") for one in ("overrides", "-ep", "routing")},
    ),
    (
        {"pipeline_parallel_size": 2},
        {"gemma4": True},
        {("-pp", "shared KV"), ("-pp", "layer inputs")},
    ),
    (
        {"kv_share": ":5", "kv_peers": ("a:1",), "kv_offload_dir": "kv", "kv_offload_policy": "write_through"},
        {},
        {(one, "no host memory") for one in ("sharing", "peers", "disk", "tier policy")},
    ),
    (
        {"kv_offload_gb": 1.0, "kv_offload_dir_gb": 5.0, "kv_offload_dir_shared": True},
        {},
        {("folder size", "no folder"), ("shared folder", "no folder")},
    ),
    (
        EXAMPLES["KV events"] | {"kv_offload_gb": 1.0, "enable_prefix_caching": False},
        {},
        {("host memory", "no prefix cache"), ("KV events", "no prefix cache")},
    ),
    (
        {"kv_transfer_config": {"kv_connector": "QuireConnector", "kv_role": "kv_both"}},
        {},
        {("prefill node", "no sharing"), ("decode node", "no peers")},
    ),
    (
        EXAMPLES["disk"] | EXAMPLES["sharing"] | EXAMPLES["peers"] | EXAMPLES["Ray"],
        {"platform": "darwin"},
        {("sharing", "not Linux")},
    ),
    (EXAMPLES["adapters"] | EXAMPLES["routing"], {}, {("adapters", "routing")}),
    (
        EXAMPLES["adapters"] | MOVES | SHARED | {"lora_target_modules": ("all-linear", "experts")},
        {},
        {("adapters of experts", one) for one in ("lock-step", "EPLB")},
    ),
    (
        {"max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4, "lora_target_modules": ("q_proj",)}
        | {"fully_sharded_loras": True},
        {},
        {
            (f"{one} adapters" if one == "sharded" else one, "no adapters")
            for one in ("slots of adapters", "rank of adapters", "held adapters", "modules of adapters", "sharded")
        }
        | {("sharded adapters", "no slices")},
    ),
    (
        {"enable_lora": True, "fully_sharded_loras": True, "tensor_parallel_size": 2},
        {},
        {("sharded adapters", "-tp")},
    ),
    (
        SHARED | INVARIANT | {"enable_cache_blend": True, "enable_lora": True, "tensor_parallel_size": 2},
        {"foreign": True},
        {("batch invariance", other) for other in ("-tp", "lock-step", "CacheBlend", "adapters")}
        | {("batch invariance", "layers of transformers")},
    ),
    (INVARIANT, {"latent": True}, {("batch invariance", "latent attention")}),
    (INVARIANT | {"kv_cache_dtype": "fp8"}, {}, {("batch invariance", "coded cache")}),
    (INVARIANT, {"recurrent": True}, {("batch invariance", "recurrent layers on a GPU")}),
    (INVARIANT, {"gated": True, "device": "cpu"}, {("batch invariance", "gated shared experts on a CPU")}),
    (
        LIFE | EXAMPLES["disk"] | EXAMPLES["sharing"] | EXAMPLES["peers"],
        {"foreign": True},
        {("new weights", other) for other in ("disk", "sharing", "peers", "layers of transformers")}
        | {("sleep", other) for other in ("sharing", "layers of transformers")},
    ),
    (LIFE | MOVES, {}, {(one, "EPLB") for one in ("sleep", "new weights")}),
    (LIFE | {"cpu_offload_gb": 1.0}, {}, {("weights in host memory", other) for other in ("new weights", "sleep")}),
    (EXAMPLES["restarts"] | EXAMPLES["new weights"], {}, {("restarts", "new weights")}),
    (EXAMPLES["restarts"] | EXAMPLES["hosts"], {}, {("restarts", "hosts or Ray")}),
    (LIFE, {"device": "mock"}, {("mock", "sleep"), ("mock", "new weights")}),
    (
        {"gpu_memory_utilization": 0.5, "cudagraph_capture_sizes": (4,), "max_cudagraph_capture_size": 8},
        {"device": "cpu"},
        {(one, "a CPU") for one in ("GPU memory", "graph sizes", "largest graph")},
    ),
    (
        {"kv_offload_gb": 1.0, "speculative_config": MTP["speculative_config"]},
        {"device": "mock"},
        {("mock", "KV tiers"), ("mock", "drafts of layers")},
    ),
    (
        {"speculative_config": NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}},
        {"device": "mock"},
        {("mock", "made-up acceptance")},
    ),
    *(({"cpu_offload_gb": 4.0}, {"device": name}, {("weights in host memory", row)}) for name, row in HOSTS.items()),
    (MOVES | {"cpu_offload_gb": 4.0}, {}, {("weights in host memory", "EPLB")}),
    (
        {},
        {"request": AskedFields(**ALL, stream=True)},
        {("numbered chunks", "truncated prompt")} | {("numbered chunks", "text prompt"), ("transfer", "stream")},
    ),
    (
        {},
        {"request": AskedFields(**ALL, embeds=True, repetition=True, prompt_logprobs=True)},
        {("given embeddings", other) for other in ("chunks", "transfer", "prompt logprobs")}
        | {("given embeddings", other) for other in ("repetition penalty", "truncated prompt")},
    ),
    (
        MOVES | EXAMPLES["Ray"] | {"data_parallel_size": 2, "load_format": "dummy", "dtype": "bfloat16"},
        {"foreign": True},
        {("verify", "-dp"), ("verify", "hosts or Ray"), ("verify", "random weights"), ("verify", "EPLB")}
        | {("verify", "layers of transformers"), ("verify", "other dtype")},
    ),
    (
        {"kv_cache_dtype": "fp8", "cpu_offload_gb": 1.0, "hf_overrides": {"vocab_size": 8}},
        {"chosen": True},
        {("coded cache", "chosen tokens"), ("verify", "weights in host memory"), ("verify", "overrides")},
    ),
]


def sample(options: dict[str, Any], changes: dict[str, Any]) -> Inputs:
    """Return the inputs of a sample."""
    given, more = changes, dict(changes)
    inputs = example(options, more.pop("device", "cuda"))
    args, draft = inputs.args, inputs.draft
    assert args is not None
    if more.pop("dense", False):
        args = parse_checkpoint_config(DRAFT)
    if heads := more.pop("heads", ()):
        args = with_mixer(args, num_heads=heads[0], num_kv_heads=heads[1])
    if layers := more.pop("layers", 0):
        args = with_layers(args, layers)
    if more.pop("foreign", False):
        norm = ForeignNorm(name="norm", stored="", width=64, eps=1e-6)
        ends = ForeignEnds(module="", version="", embed="", head="", norm=norm, divides="its heads are its own")
        args = replace(args, foreign=ends)
    if more.pop("latent", False):
        latent = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
        raw = MODEL | latent | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": None}
        raw |= {"partial_rotary_factor": 1.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        mixer = parse_checkpoint_config(raw).layers[0].mixer
        args = replace(args, layers=tuple(structs.replace(one, mixer=mixer) for one in args.layers))
    if more.pop("chosen", False):
        args = parse_checkpoint_config(tiny_config(Tiny(family="glm_moe_dsa")))
    if more.pop("gemma4", False):
        raw = {key: value for key, value in DRAFT.items() if key != "architectures"}
        raw |= {"model_type": "gemma4_text", "num_kv_shared_layers": 2, "num_hidden_layers": 6}
        kinds = ["sliding_attention", "full_attention"] * 3
        raw |= {"layer_types": kinds, "sliding_window": 8, "vocab_size_per_layer_input": DRAFT["vocab_size"]}
        args = parse_checkpoint_config(raw)
    if more.pop("gated", False):
        args = parse_checkpoint_config(tiny_config(Tiny(family="qwen2_moe")))
    if more.pop("recurrent", False):
        args = parse_checkpoint_config(RECURRENT)
    if more.pop("conv", False):
        kinds = ["conv", "full_attention"] * (RECURRENT["num_hidden_layers"] // 2)
        args = parse_checkpoint_config(RECURRENT | {"model_type": "lfm2", "layer_types": kinds})
    if more.pop("recurrent drafts", False):
        draft = parse_checkpoint_config(RECURRENT)
    if head := more.pop("head", {}):
        draft = parse_checkpoint_config(HEAD | head, head="eagle3")
    if length := more.pop("length", 0):
        assert draft is not None, given
        draft = replace(draft, max_position_embeddings=length)
    return replace(inputs, args=args, draft=draft, **more)


def pairs_of(inputs: Inputs) -> set[tuple[str, str]]:
    scopes = (REQUEST,) if inputs.request != AskedFields() else (ENGINE, VERIFY, STEPS)
    return {(row.feature, row.other) for scope in scopes for row in rows_of(inputs, scope)}


@pytest.mark.parametrize(("options", "changes", "pairs"), SAMPLES, ids=lambda one: "")
def test_each_row_applies_once(options: dict[str, Any], changes: dict[str, Any], pairs: set[tuple[str, str]]) -> None:
    inputs = sample(options, changes)
    assert pairs <= pairs_of(inputs)
    for one in [one for scope in (ENGINE, REQUEST, VERIFY, STEPS) for one in met(inputs, scope)]:
        assert one.said.endswith(".") and "{" not in one.feature + one.said.replace('{"', ""), one


@pytest.mark.parametrize("drafts", ["draft model", "EAGLE", "n-grams"])
def test_layers_draft_for_recurrent_ones_on_a_cpu(drafts: str) -> None:
    changes = {"recurrent": True, "recurrent drafts": drafts == "draft model", "device": "cpu"}
    assert not [pair for pair in pairs_of(sample(EXAMPLES[drafts], changes)) if "states" in " ".join(pair)]


def test_no_row_is_without_a_sample_and_no_feature_without_a_row() -> None:
    assert {(row.feature, row.other) for row in ROWS} - set().union(*(pairs for _, _, pairs in SAMPLES)) == set()
    assert len({(row.feature, row.other) for row in ROWS}) == len(ROWS)
    used = {name for row in ROWS for name in (row.feature, row.other)}
    assert used | set(EXAMPLES) == set(FEATURES)


def resolved(options: dict[str, Any], device: str) -> EnginePlan:
    args, draft = arguments(options)
    config = EngineConfig.from_flat(**options)
    return resolve_engine(
        config,
        ModelFacts(folder=Path("nowhere"), args=args, dtype=DTypePlan(dtype="bfloat16", reason=""), draft=draft),
        Machine(device=device, words="", total_memory=1 << 37),
        probe_of((9, 0) if device == "cuda" else None),
        parallel=parallel_sizes(config.parallel),
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("first", EXAMPLES)
def test_every_pair_is_refused_by_its_rows_or_resolves(first: str, device: str) -> None:
    """Features meet two by two. The rows of a pair are looked up by the names of the features that are then on."""
    names = list(EXAMPLES)
    for second in names[names.index(first) :]:
        if (options := together((first, second))) is None:
            continue
        inputs = example(options, device)
        on = {name for name, feature in FEATURES.items() if feature.when(inputs)}
        rows = [row for row in ROWS if {row.feature, row.other} <= on and row.scope == ENGINE]
        if second == first:
            assert all(row.other == "a CPU" for row in rows), first
        try:
            plan = resolved(options, device)
        except ConfigError as error:
            assert any(row.status == REFUSED for row in rows), (first, second, error)
            assert all(said(row, inputs) in str(error) for row in rows if row.status != IDLE), (first, second)
            continue
        assert [one.said for one in plan.meetings] == [said(row, inputs) for row in rows], (first, second)
        assert all(row.status != REFUSED for row in rows), (first, second)
        if plan.missing:
            with pytest.raises(UnsupportedModel):
                check(plan.meetings)
        else:
            check(plan.meetings)


def said(row: Row, inputs: Inputs) -> str:
    """Return the sentence of a row."""
    places = [one for one in rows_of(inputs)]
    return met(inputs)[places.index(row)].said


FOUR = {
    "tensor_parallel_size": 3,
    "enable_expert_parallel": True,
    "kv_offload_dir": "/kv",
    "speculative_config": {"method": "medusa", "model": "x", "num_speculative_tokens": 2},
}


def test_four_conflicts_are_told_together_each_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """Two of them need the model, and another is only not implemented."""
    flags = "-tp 3 -ep --kv-offload-dir /kv -sc".split() + [json.dumps(FOUR["speculative_config"])]
    assert main(["explain", "quire-tiny", "--device", "h200", *flags]) == 3
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "quire: error: This engine cannot run, for 4 reasons:"
    remedies = (
        "use -tp 1, 2 or 4.",
        "has no experts: leave it out.",
        'use "method": "ngram".',
        "set --kv-offload-gb, too, such as 8.",
    )
    assert len(lines) == 4 and all(line.startswith("- ") for line in lines)
    assert [remedy for remedy in remedies if not any(line.endswith(remedy) for line in lines)] == []


def test_a_single_conflict_is_its_sentence() -> None:
    with pytest.raises(ConfigError, match="^kv_share: engines read .* set kv_offload_gb, too, such as 8.$"):
        check(met(inputs_of(EngineConfig.from_flat(kv_share=":5700"))))


def test_missing_rows_alone_are_planned_and_refused_as_not_supported() -> None:
    blends = {"enable_cache_blend": True, "enable_prefix_caching": False}
    options = blends | {"enable_lora": True, "fully_sharded_loras": True, "tensor_parallel_size": 2}
    plan = resolved(options, "cpu")
    assert [one.status for one in plan.missing] == [MISSING] * 2
    with pytest.raises(UnsupportedModel) as refused:
        check(plan.meetings)
    assert str(refused.value).startswith("This engine cannot run, for 2 reasons:\n- --enable-cache-blend: CacheBlend")
    out = io.StringIO()
    described = [one._asdict() for one in plan.missing]
    console = Console(file=out, width=80, highlight=False)
    for line in not_runnable(described):
        console.print(line)
    text = out.getvalue().splitlines()
    assert all(len(line) <= 80 for line in text) and [line[:2] for line in text].count("- ") == 2
    assert " ".join(out.getvalue().split()).count("leave out --enable-cache-blend.") == 1


def test_a_described_plan_has_the_rows_that_applied() -> None:
    """As /debug/plan shows it."""
    asked = {"enable_cache_blend": True, "enable_prefix_caching": False, "gpu_memory_utilization": 0.5}
    told = plan_engine(EngineConfig.from_flat(device="cpu", **asked)).describe()
    assert [one["status"] for one in told["meetings"]] == [MISSING, IDLE]
    assert told["missing"] == told["meetings"][:1] and [*told["missing"][0]] == [*Meeting._fields]
    assert "gpu_memory_utilization changes nothing on a CPU" in told["model"]["notes"]


def test_options_without_effect_are_notes() -> None:
    given = EngineConfig.from_flat(max_cudagraph_capture_size=8, gpu_memory_utilization=0.5, enforce_eager=True)
    assert idle_notes(met(inputs_of(given, device="cpu"))) == (
        "gpu_memory_utilization changes nothing on a CPU.",
        "max_cudagraph_capture_size changes nothing on a CPU.",
    )
    assert met(inputs_of(given, device="cuda")) == met(inputs_of(EngineConfig(), device="cpu")) == ()


def test_fields_of_a_request_that_exclude_each_other() -> None:
    check_fields(AskedFields(chunks="kv_chunks"))
    with pytest.raises(InvalidParameter, match="^kv_chunks counts tokens") as caught:
        check_fields(AskedFields(chunks="kv_chunks", text=True))
    assert caught.value.param == "kv_chunks"
    with pytest.raises(InvalidParameter, match="^This request cannot be served, for 3 reasons:"):
        check_fields(AskedFields(**ALL, stream=True))


@pytest.mark.parametrize(
    ("features", "words"),
    [(["tensor parallelism (-tp 2)"], "tensor parallelism (-tp 2) is"), (["a", "b", "c"], "a, b and c are"), ([], "")],
)
def test_the_sentence_of_what_is_missing(features: list[str], words: str) -> None:
    lines = list(not_runnable([{"feature": one, "reason": "r", "remedy": "m"} for one in features]))
    assert len(lines) == len(features) + bool(features)
    if features:
        first = f"Not runnable yet: {words} not implemented; the plan below is what it would be."
        assert str(lines[0]) == first
