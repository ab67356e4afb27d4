"""`verify`: equal models are found equal, and a planted error is named by stage, step and parameter."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor

import quire.args.grouped as grouped_reader
import quire.assemble.cpu
import quire.assemble.engine
from quire import EngineConfig
from quire.args.checkpoint import ModelArgs, read_checkpoint_config
from quire.args.families import FAMILIES as CONFIGURED
from quire.args.keys import Keys
from quire.args.layers import NONE
from quire.args.rope import UNROTATED
from quire.assemble import obtain
from quire.contracts.errors import ConfigError, ModelError, RequestFailed
from quire.explain.verify import request
from quire.explain.verify.against import against
from quire.explain.verify.parity import verify
from quire.explain.verify.request import NUM_TOKENS
from quire.explain.verify.verdict import Report, Stage, Step
from quire.kernels.heads import cpu, native, ref
from quire.models import qwen2
from quire.plan.as_stored import as_stored
from quire.plan.layout import layout
from quire.weights.files import INDEX, read_checkpoint
from quire.weights.load import load_weights
from quire.weights.units import load_units

from ..support.changed_args import latent_of, with_experts, with_mixer
from ..support.full import FULL, full_rows
from ..support.tiny_models import EXPERTS, FAMILIES, random_model, write_model
from .conftest import spare_known_objects

OPTIONS: dict[str, Any] = {"num_threads": 1, "use_tqdm_on_load": False, "kv_cache_memory_bytes": 1 << 24}
CONFIG = EngineConfig.from_flat(**OPTIONS)
# Rows of models with layers whose steps verify does not know.
UNKNOWN = (
    "falcon_h1",
    "falcon_normed",
)
COMPARED = [family for family in FAMILIES if family not in UNKNOWN]
# Every structure of a layer is in one of the first three; the others are in the long run.
FIRST = ("qwen3", "qwen2_moe", "deepseek_v3")
PLANTED = [*FIRST, *full_rows(family for family in COMPARED if family not in FIRST)]
# Name of a parameter without its layer and kind, with the name of its part -> the step that reads it.
STEPS = {
    "embed": "embed_tokens", "norm": "norm", "head": "lm_head", "attention.qkv q": "q_proj",
    "attention.qkv k": "k_proj", "attention.qkv gate": "q_proj",
    "attention.qkv v": "v_proj", "attention.head_norm.q": "q_norm", "attention.head_norm.k": "k_norm",
    "attention.output": "o_proj", "attention.down q": "q_proj", "attention.down q_down": "q_a_proj",
    "attention.down kv": "kv_a_proj_with_mqa", "attention.q_norm": "q_a_layernorm", "attention.q": "q_b_proj",
    "attention.kv_norm": "kv_a_layernorm", "attention.kv_up": "attention", "mlp.gate_up gate": "gate_proj, up_proj",
    "mlp.gate_up up": "gate_proj, up_proj", "mlp.down": "down_proj", "mlp.router": "router",
    "mlp.experts.gate_up gate": "experts", "mlp.experts.gate_up up": "experts", "mlp.experts.down": "experts",
    "mlp.shared.gate_up gate": "shared gate_proj, up_proj", "mlp.shared.gate_up up": "shared gate_proj, up_proj",
    "mlp.shared.down": "shared down_proj", "mlp.shared_gate": "shared_expert_gate", "attention.sinks": "attention",
    "attention.wide_norm.q": "queries", "attention.wide_norm.k": "keys", "mlp.router.correction": "router",
    "mlp.experts.gate_up_bias gate": "experts", "mlp.experts.gate_up_bias up": "experts",
    "mlp.experts.down_bias": "experts", "mlp.experts.gate_up": "experts", "mlp.experts.gate_up_bias": "experts",
    "mlp.router.scale": "router", "mlp.router.expert_scale": "router", "factor": "sum",
    "input.gate": "per_layer_input_gate", "input.project": "per_layer_projection",
    "inputs.embed": "product with its embedding", "inputs.project": "product with its embedding",
    "inputs.norm": "product with its embedding",
}  # fmt: skip
NORM = r"(attention_|mlp_|mlp\.dense_|mlp\.experts_|input_|)(norm|after)"  # parameters of norms of hidden states
RECURRENT = ("delta.", "mamba.", "conv.")  # parameters of recurrent mixers
OUTSIDE = {
    "embed": "embed",
    "norm": "norm",
    "head": "logits",
    "inputs": "layer 0 feed-forward",  # is the first that reads embeddings for each layer
}  # parameters of no layer -> their stage
FIRST_NORM = {
    "olmo2": "queries",
    "olmo3": "queries",
    "exaone4": "q_norm",
    "lfm2": "operator_norm",
    "lfm2_moe": "operator_norm",
    "nemotron_h": "norm",
    "nemotron_moe": "norm",
}  # others: input_layernorm


def peer_of(folder: Path) -> Path | None:
    """The folder that transformers reads instead of `folder`; see `write_model`."""
    return folder / "peer" if (folder / "peer").is_dir() else None


Rows = Callable[..., Tensor]  # the loaded rows of a tensor by its checkpoint name, or of a parameter and its part
Change = Callable[[Rows], object]


@pytest.fixture(scope="module")
def checkpoint(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random checkpoint of a family, with biases where the family may have them."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            write_model(random_model(tiny(family=family, bias=True), 0), made[family], family)
            spare_known_objects()
        return made[family]

    return make


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """`verify` of a checkpoint with an error on Quire's side: in loaded weights, or in what the config was read to."""

    def run(
        folder: Path, change: Change | None = None, config: Callable[[ModelArgs], ModelArgs] = lambda args: args
    ) -> Report:
        def loaded(model: Any, folder: Path, progress: Any = None, **options: Any) -> Any:
            kept: list[tuple[str, int, dict[str, Tensor]]] = []
            given = {name: getattr(model, name) for name in ("args", "layout", "elsewhere", "dtype", "device")}
            stand_in: Any = SimpleNamespace(
                **given, take=lambda *unit: kept.append(unit), destination=lambda module: None
            )
            report = load_weights(stand_in, folder, progress, **options)

            def rows(*named: str) -> Tensor:
                taken = {(module, place): tensors for module, place, tensors in kept}  # in any order
                for unit in load_units(model.layout):
                    tensors = taken[unit.module, unit.place]
                    for raw in unit.tensors:
                        first, parameter = 0, f"{unit.module}.{raw.name}"
                        for part in raw.parts:
                            if named in ((part.stored,), (parameter, part.name)):
                                return tensors[raw.name][first : first + part.rows]
                            first += part.rows
                raise KeyError(named)

            if change is not None:
                change(rows)
            for unit in kept:
                model.take(*unit)
            return report

        with monkeypatch.context() as patch:
            patch.setattr(request, "NUM_TOKENS", 4)  # an error is in every step
            patch.setattr(quire.assemble.cpu, "load_weights", loaded)
            read = obtain.read_checkpoint_config
            patch.setattr(obtain, "read_checkpoint_config", lambda *given: config(read(*given)))
            return verify(str(folder), CONFIG, reference=peer_of(folder))

    return run


def args_of(folder: Path) -> ModelArgs:
    """Arguments of a checkpoint, with the form in which its experts are stored."""
    tensors = read_checkpoint(folder).tensors
    return as_stored(read_checkpoint_config(folder), tensors, lambda name: tensors[name].shape)


def kinds(args: ModelArgs) -> Iterator[tuple[str, str, str]]:
    """(checkpoint name, parameter, part) of every kind of parameter: of its last layer, and of the expert 3."""
    found: dict[tuple[str, str], tuple[str, str, str]] = {}
    for param in layout(args):
        for part in param.parts:
            if part.name.rpartition(".")[0] in ("", "3"):
                found[re.sub(r"layers\.\d+", "*", param.name), part.name] = part.stored, param.name, part.name
    return iter(found.values())


def kind(parameter: str, part: str) -> tuple[str, str]:
    """Return the kind of a parameter: its name without its layer, and its part without the expert."""
    return re.sub(r"^layers\.\d+\.", "", parameter), part.rpartition(".")[2]


def place(stored: str, parameter: str, part: str) -> tuple[str, str]:
    """The stage and the step that a parameter belongs to, by its name in Quire: families name tensors as they like.

    Norms of hidden states have the names of the checkpoint's modules.
    """
    inside = re.sub(r"^layers\.\d+\.|\.(weight|bias)$", "", parameter)
    own = parameter.startswith("layers.")
    norm = own and re.fullmatch(NORM, inside)
    if inside.startswith(RECURRENT):
        steps = {"rule": "recurrence", "taps": "convolution", "output": "out_proj"}
        step = steps.get(inside.split(".")[1], stored.split(".")[-2])
    else:
        side = re.sub(r"\d+$", "", part.rpartition(".")[2])  # of a head that is cut by itself, too
        step = stored.split(".")[-2] if norm else STEPS[f"{inside} {side}".strip()]
    half = "attention" if inside.startswith(("attention", *RECURRENT)) or inside == "norm" else "feed-forward"
    return f"layer {parameter.split('.')[1]} {half}" if own else OUTSIDE[inside.split(".")[0]], step


@pytest.mark.parametrize("family", ["falcon_h1"])
def test_layers_without_known_steps_are_refused(checkpoint: Any, family: str) -> None:
    name = FAMILIES[family].of or family
    with pytest.raises(ConfigError, match=f"verify does not know the steps of all layers of a {name} model"):
        verify(str(checkpoint(family)), CONFIG)


@pytest.mark.parametrize("family", COMPARED)
def test_a_clean_model_of_every_family_is_equal(checkpoint: Any, family: str) -> None:
    folder = checkpoint(family)
    report = verify(str(folder), CONFIG, reference=peer_of(folder))
    assert report.ok, report.render()
    halves = [
        f"layer {i} {half}"
        for i, layer in enumerate(args_of(folder).layers)
        for half, part in (("attention", layer.mixer), ("feed-forward", layer.feed_forward))
        if part != NONE
    ]
    assert [stage.name for stage in report.stages] == ["embed", *halves, "norm", "logits"]
    assert report.num_prompt == 48 and len(report.ours) == NUM_TOKENS and report.ours == report.theirs
    worst = max(step.difference / step.bound for stage in report.stages for step in stage.steps)
    assert worst < 0.25, report.render()  # rounding is far from the bounds
    assert "all 32 equal\nequal: every step" in report.render()


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_bfloat16_checkpoint_is_equal(tiny: Any, tmp_path: Path, family: str) -> None:
    random_model(tiny(family=family), 0).to(torch.bfloat16).save_pretrained(tmp_path)
    report = verify(str(tmp_path), CONFIG)
    assert report.ok, report.render()


@pytest.mark.parametrize("family", PLANTED)
def test_a_parameter_of_every_kind_is_named(checkpoint: Any, planted: Any, family: str) -> None:
    """1.001 times too large, in memory alone: stage, step and tensor are named, and no stage before.

    A kind that the families of FIRST have in common is planted in the first of them, with --full in each.
    """
    folder, known = checkpoint(family), set[tuple[str, str]]()
    for other in () if FULL else FIRST[: FIRST.index(family)]:
        known |= {kind(*each[1:]) for each in kinds(args_of(checkpoint(other)))}
    planted_here = [each for each in kinds(args_of(folder)) if kind(*each[1:]) not in known]
    assert len(planted_here) >= 7
    for stored, parameter, part in planted_here:
        every = 2 if parameter == "inputs.project.weight" else 1  # a norm would undo a factor of all its rows
        report = planted(folder, lambda rows, own=(parameter, part), every=every: rows(*own)[::every].mul_(1.001))
        assert [changed.name for changed in report.changed] == [stored]
        assert not report.ok and f"    {stored}: " in report.render()
        if report.first_divergent is None and (".experts." in parameter or parameter.endswith("router.correction")):
            continue  # no token is sent to the expert, or all to the same ones as before
        assert report.first_divergent == place(stored, parameter, part), f"{stored}\n{report.render()}"


@pytest.mark.parametrize("family", PLANTED)
def test_an_error_in_what_the_configuration_says_is_named(checkpoint: Any, planted: Any, family: str) -> None:
    folder = checkpoint(family)
    own = args_of(folder)
    rotating = [i for i, one in enumerate(own.layers) if getattr(one.mixer, "rope", UNROTATED) != UNROTATED]
    if rotating:
        rope, first = replace(own.attending[0].rope, theta=10_010.0), f"layer {rotating[0]} attention"
        report = planted(folder, config=lambda args: with_mixer(args, rope=rope))
        stage = next(stage for stage in report.stages if stage.name == first)
        rotated = next(step.name for step in stage.steps if step.name in ("queries", "keys"))
        assert report.first_divergent == (first, rotated) and not report.changed
        every = f"differs in {len(rotating)} of {len(rotating)} layers"
        assert len(rotating) == 1 or every in report.render()
        assert "leaves the rotation (rope_theta" in report.render()
    report = planted(folder, config=lambda args: replace(args, norm=structs.replace(args.norm, eps=1e-3)))
    step = FIRST_NORM.get(family, "input_layernorm")
    assert report.first_divergent == ("layer 0 attention", step)
    assert ("leaves the norm (rms_norm_eps, " in report.render()) == (step != "queries")


@pytest.mark.parametrize("family", [family for family in PLANTED if family in EXPERTS])
def test_routing_and_experts_are_named(checkpoint: Any, planted: Any, family: str) -> None:
    folder = checkpoint(family)

    def scaled(args: ModelArgs) -> ModelArgs:
        routing = args.moe.routing  # type: ignore[union-attr]
        return with_experts(args, routing=replace(routing, scaling=1.001 * routing.scaling))

    first = min(read_checkpoint_config(folder).expert_layers)
    report = planted(folder, config=scaled)
    assert report.first_divergent == (f"layer {first} feed-forward", "router") and not report.changed
    assert "routed_scaling_factor" in report.render()
    param = next(one for one in layout(args_of(folder)) if one.name == "layers.1.mlp.experts.gate_up")
    parts = {part.name.partition(".")[0]: part for part in reversed(param.parts)}  # gate, both, or up without a gate
    one, other = ((param.name, parts[expert].name) for expert in "12")

    def swap(rows: Rows) -> None:
        kept = rows(*one).clone()
        rows(*one).copy_(rows(*other))
        rows(*other).copy_(kept)

    report = planted(folder, swap)
    assert report.first_divergent == ("layer 1 feed-forward", "experts")
    assert {changed.name for changed in report.changed} == {parts[expert].stored for expert in "12"}


def test_the_scale_of_latent_attention_is_named(checkpoint: Any, planted: Any) -> None:
    def scaled(args: ModelArgs) -> ModelArgs:
        return with_mixer(args, scale=1.001 * latent_of(args).scale)

    report = planted(checkpoint("deepseek_v3"), config=scaled)
    assert report.first_divergent == ("layer 0 attention", "attention") and not report.changed
    assert "leaves the scale of the scores" in report.render()


def test_tokens_that_an_indexer_should_not_choose_are_named(checkpoint: Any, planted: Any) -> None:
    """Heads that are weighed otherwise choose other tokens; all that attention computes of these is right."""

    def swap(rows: Rows) -> None:
        heads = rows("model.layers.1.self_attn.indexer.weights_proj.weight")
        heads[:2] = heads[:2].flip(0).clone()

    report = planted(checkpoint("deepseek_v32"), swap)
    assert report.first_divergent == ("layer 1 attention", "indexer")
    assert [one.name for one in report.changed] == ["model.layers.1.self_attn.indexer.weights_proj.weight"]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v2", "glm4_moe"])
def test_small_errors_are_named(checkpoint: Any, planted: Any, family: str) -> None:
    folder = checkpoint(family)
    width = read_checkpoint_config(folder).mixers[0].head_dim
    norm, query = "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.q_proj.weight"

    def nudge(rows: Rows) -> None:
        rows(norm)[5] += 1e-3

    def permute(rows: Rows) -> None:
        rows(query)[: 2 * width] = rows(query)[: 2 * width].roll(width, 0)

    report = planted(folder, nudge)
    assert report.first_divergent == ("layer 1 attention", "input_layernorm")
    assert f"{norm}: 1 of 64 numbers differ" in report.render()
    assert planted(folder, permute).first_divergent == ("layer 1 attention", "q_proj")


def test_a_number_that_no_token_meets_is_found(checkpoint: Any, planted: Any) -> None:
    """An embedding row of a token that is not in the sequence; only the comparison of parameters can see it."""
    folder = checkpoint("qwen3")
    clean = verify(str(folder), CONFIG)
    seen = {(37 * i * i + 11 * i + 5) % 96 for i in range(48)} | set(clean.ours)
    report = planted(folder, lambda rows: rows("model.embed_tokens.weight")[min(set(range(96)) - seen)].mul_(1.001))
    assert report.first_divergent is None and not report.ok
    assert "every step agrees on these tokens, but parameters are not" in report.render()


def test_an_error_of_a_kernel_is_named_and_no_parameter(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are written where they are not read: the parameters are right, and all layers say the same."""
    for kernel in (cpu, native, ref):
        monkeypatch.setattr(kernel, "prepare", _late_keys(kernel.prepare))
    report = verify(str(checkpoint("qwen3")), CONFIG)
    assert report.first_divergent == ("layer 0 attention", "keys") and not report.changed
    assert "differs in 3 of 3 layers" in report.render() and "or the write to the cache" in report.render()


def _late_keys(prepare: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrong(
        qkv: Tensor, norm: Any, eps: float, cos: Tensor, sin: Tensor, kv: Any, slots: Tensor, *more: Any
    ) -> Tensor:
        q = prepare(qkv, norm, eps, cos, sin, kv, slots, *more)
        if (sin != 0).any():
            kv.k[slots // kv.block_size, :, slots % kv.block_size] *= 1.001
        return q

    return wrong


@pytest.mark.parametrize("half", ["attention", "feed-forward"])
def test_a_wrong_sum_is_named_once(checkpoint: Any, planted: Any, monkeypatch: pytest.MonkeyPatch, half: str) -> None:
    """A residual that is scaled in one layer, the last one, is an error of that layer alone."""

    def scaled(module: Any, given: Any, result: Tensor) -> Tensor:
        return result * 1.001

    def assembled(config: EngineConfig) -> Any:
        engine = quire.assemble.engine.assemble(config)
        last = engine.worker.model.layers[-1]
        (last.attention if half == "attention" else last).register_forward_hook(scaled)
        return engine

    monkeypatch.setattr(request, "assemble", assembled)
    for family in ("qwen3", "deepseek_v3"):
        report = verify(str(checkpoint(family)), CONFIG)
        differing = [(stage.name, step.name) for stage in report.stages for step in stage.steps if step.diverged]
        assert differing == [(f"layer 2 {half}", "sum")] and not report.changed, report.render()
        assert "The same step differs" not in report.render()


def test_what_the_reference_does_after_its_head_counts(
    checkpoint: Any, planted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale of the logits changes no greedy token."""
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def scaled(self: Any, *given: Any, **options: Any) -> Any:
        result = forward(self, *given, **options)
        result.logits = result.logits * 1.001
        return result

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    report = planted(checkpoint("llama"))
    assert report.first_divergent == ("logits", "lm_head") and not report.ok, report.render()


def test_a_sum_that_is_wrong_in_every_layer_is_counted_by_layers() -> None:
    steps = (Step("sum", 1e-3, 3e-5),)
    stages = tuple(
        Stage(f"layer {layer} {half}", steps, 0.0) for layer in range(3) for half in ("attention", "feed-forward")
    )
    report = Report(
        model="m",
        reference="m",
        num_prompt=3,
        stages=stages,
        changed=(),
        ours=(5,),
        theirs=(5,),
        margin=0.0,
        scale=12.0,
    )
    assert "differs in 3 of 3 layers" in report.render()


def stored(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], target: Path) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(folder, target)
    (file,) = target.glob("*.safetensors")
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return target


def test_the_files_that_are_loaded_are_those_compared(checkpoint: Any, tmp_path: Path) -> None:
    """Names of a model without a head, and beside them a second copy of other weights."""

    def headless(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}

    folder = stored(checkpoint("qwen3"), headless, tmp_path / "headless")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    save_file({"model.norm.weight": torch.ones(64)}, folder / "zeros.safetensors")
    report = verify(str(folder), CONFIG)
    assert report.ok, report.render()


def test_not_a_number_is_located(checkpoint: Any, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.1.mlp.down_proj.weight"][3] = torch.nan
        return tensors

    folder = stored(checkpoint("qwen3"), spoil, tmp_path / "spoiled")
    with pytest.raises(RequestFailed, match="down_proj of layer 1 feed-forward is the first step with NaN") as failed:
        verify(str(folder), CONFIG)
    assert failed.value.code == "nan_logits"


def test_a_folder_that_transformers_cannot_load_is_told(checkpoint: Any, tmp_path: Path) -> None:
    """Shards without an index: Quire reads them, transformers does not."""
    target = tmp_path / "shards"
    shutil.copytree(checkpoint("qwen3"), target)
    (target / "model.safetensors").rename(target / "model-00001-of-00001.safetensors")
    with pytest.raises(ModelError, match=r"is loaded by Quire and not by transformers \(OSError: .*nothing to compare"):
        verify(str(target), CONFIG)


def test_another_folder_can_be_the_reference(oracle: Any, tmp_path: Path) -> None:
    folder, target = oracle().folder, tmp_path / "perturbed"
    shutil.copytree(folder, target)
    (file,) = target.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.o_proj.weight"] *= 1.1
    save_file(tensors, file, metadata={"format": "pt"})
    report = verify(str(target), CONFIG, reference=folder)
    assert report.first_divergent == ("layer 0 attention", "o_proj")
    assert report.first_token is not None and report.margin > 0
    at = report.first_token
    assert re.search(
        rf"first difference at token {at}: Quire {report.ours[at]}, transformers {report.theirs[at]} "
        r"\(margin [\d.e-]+\)",
        report.render(),
    )


@pytest.mark.parametrize(("margin", "ok"), [(1e-4, True), (0.5, False)])
def test_a_tie_is_no_error(margin: float, ok: bool) -> None:
    report = Report(
        model="m",
        reference="m",
        num_prompt=3,
        stages=(Stage("embed", (Step("embed_tokens", 0.0, 3e-5),), 0.0),),
        changed=(),
        ours=(5, 27),
        theirs=(5, 29),
        margin=margin,
        scale=12.0,
    )
    assert report.ok is ok
    shown = "0.0001; a tie, not an error" if ok else "0.5"
    assert f"greedy tokens: first difference at token 1: Quire 27, transformers 29 (margin {shown})" in report.render()
    assert ("look at sampling" in report.render()) is not ok


@pytest.mark.parametrize(("chunk", "depth", "cache"), [(7, 1, "auto"), (16, 2, "fp8")])
def test_engines_are_verified_as_they_run(oracle: Any, chunk: int, depth: int, cache: str) -> None:
    """Chunks, steps in flight, and a cache of codes, whose rounding is in the keys and values alone."""
    config = EngineConfig.from_flat(
        num_threads=1,
        max_num_batched_tokens=chunk,
        max_num_seqs=2,
        async_depth=depth,
        block_size=8,
        kv_cache_memory_bytes=1 << 22,
        kv_cache_dtype=cache,
    )
    report = verify(str(oracle().folder), config)
    assert report.ok, report.render()
    rounded = {step.name for stage in report.stages for step in stage.steps if step.difference > 1e-3}
    assert rounded == (set() if cache == "auto" else {"keys", "values"})
    assert ("KV cache: float8_e4m3fn" in report.render()) == (cache == "fp8")


TEXT = "The module provides"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def test_the_bundled_model_on_a_text_and_against_the_stored_reference(tmp_path: Path) -> None:
    """With drafts, some of which are accepted; then in bfloat16, beside the values that transformers had."""
    where, drafting = tmp_path / "reference", EngineConfig.from_flat(**OPTIONS, speculative_config=NGRAM)
    report = verify("", drafting, TEXT, dump=where)
    assert report.ok and report.model == "quire-tiny" and len(report.stages) == 19
    assert report.num_prompt < 10
    made, accepted = report.drafts
    assert 0 < accepted < made and f"drafts: {accepted} of {made} accepted" in report.render()
    assert where.stat().st_size < 1 << 21
    beside = against("", EngineConfig.from_flat(**OPTIONS, dtype="bfloat16"), None, where)
    assert beside.ok and len(beside.stages) == 19, beside.render()
    assert max(found for _, found in beside.stages) > 1e-3, "bfloat16 rounds"
    with pytest.raises(ConfigError, match=r"is a reference of another prompt: token \d+ is \d+ here and \d+ there"):
        against("", CONFIG, "The module is", where)


def test_the_trained_model_with_experts(shared: Path) -> None:
    report = verify(str(shared / "models" / "quire-tiny-moe"), CONFIG, "The module provides")
    assert report.ok, report.render()
    assert "router" in [step.name for step in report.stages[4].steps]


def test_a_short_context_cuts_the_prompt_or_is_refused(oracle: Any, tmp_path: Path) -> None:
    folder = str(oracle().folder)
    short = EngineConfig.from_flat(num_threads=1, max_model_len=40, kv_cache_memory_bytes=1 << 22)
    assert verify(folder, short).num_prompt == 8
    with pytest.raises(ConfigError, match="max_model_len"):
        verify(folder, EngineConfig.from_flat(num_threads=1, max_model_len=32, kv_cache_memory_bytes=1 << 22))


def test_without_transformers_the_fix_is_named(monkeypatch: pytest.MonkeyPatch, oracle: Any) -> None:
    folder = oracle().folder
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[verify\]'` in Quire's folder"):
        verify(str(folder), CONFIG)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"


@pytest.fixture
def renamed(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A checkpoint of a family that transformers lacks, with a key and a tensor of its own; and its peer's files."""

    def kv_heads(keys: Any, *given: Any) -> int:
        known = {**keys, "num_key_value_heads": keys.get("num_kv_groups", keys.get("num_key_value_heads"))}
        return read(Keys(known, keys.source), *given)

    row = replace(CONFIGURED["qwen2"], architecture="Qwen2NewForCausalLM", words="num_kv_groups")
    case = replace(
        FAMILIES["qwen2"],
        peer="qwen2",
        keys={"num_key_value_heads": "num_kv_groups"},
        tensors={"self_attn.o_proj": "self_attn.out_proj"},
    )
    names = tuple((stored.replace("o_proj", "out_proj"), *rest) for stored, *rest in qwen2.NAME_MAP)
    read = grouped_reader._kv_heads
    monkeypatch.setattr(grouped_reader, "_kv_heads", kv_heads)
    monkeypatch.setitem(CONFIGURED, "qwen2_new", row)  # type: ignore[arg-type]
    monkeypatch.setitem(FAMILIES, "qwen2_new", case)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "quire.models.qwen2_new", SimpleNamespace(NAME_MAP=names))  # type: ignore[arg-type]
    folder = tmp_path / "model"
    return folder, write_model(random_model(tiny(family="qwen2_new"), 0), folder, "qwen2_new", max_shard_size="40KB")


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_family_that_transformers_does_not_have_is_compared_with_its_nearest(
    renamed: tuple[Path, Path], quantization: str | None
) -> None:
    """Its own names are those of the file, of the index and of the report; the reference has the peer's."""
    folder, peer = renamed
    assert read_checkpoint_config(folder).architecture == "Qwen2NewForCausalLM" and peer != folder
    assert "num_kv_groups" in (folder / "config.json").read_text() and "out_proj" in (folder / INDEX).read_text()
    with pytest.raises(ModelError, match="copy's config.json .* --reference"):
        verify(str(folder), CONFIG)
    config = EngineConfig.from_flat(**OPTIONS, quantization=quantization)
    report = verify(str(folder), config, reference=peer)
    assert report.ok and not report.changed, report.render()


def test_a_changed_parameter_has_the_name_of_the_model(renamed: tuple[Path, Path], planted: Any) -> None:
    own = "model.layers.1.self_attn.out_proj.weight"
    report = planted(renamed[0], lambda rows: rows(own).mul_(1.001))
    assert [changed.name for changed in report.changed] == [own]
    assert report.first_divergent == ("layer 1 attention", "o_proj")


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_tensor_that_the_reference_lacks_is_an_error(
    renamed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    """Quire does not have the reference's family, so that it cannot know its names."""
    folder, peer = renamed
    raw = json.loads((peer / "config.json").read_text())
    (peer / "config.json").write_text(json.dumps(raw | {"model_type": "stablelm", "architectures": []}))
    config = EngineConfig.from_flat(**OPTIONS, quantization=quantization)
    with pytest.raises(ModelError, match=r"peer has no tensor model\.layers\.0\.self_attn\.out_proj\.weight: rename"):
        verify(str(folder), config, reference=peer)
