"""Draft layers, draft models and EAGLE heads: arguments and plans of an engine with them, or why it cannot."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from quire.args.checkpoint import SKIPPED, ModelArgs, read_raw_config
from quire.config.engine import EngineConfig
from quire.contracts.blocks import KVGeometry
from quire.contracts.errors import ConfigError
from quire.contracts.speculation import read_speculative_config
from quire.plan.engine import EnginePlan

REMEDY = 'use "method": "ngram", or leave out --speculative-config'


def with_draft_layers(args: ModelArgs, given: Mapping[str, Any] | None) -> ModelArgs:
    """Return the arguments of a model with the layers that the option `speculative_config` makes it draft with.

    Raises ConfigError for a model without such a layer, or with several, of which each drafts another token.
    """
    speculation = read_speculative_config(given)
    if speculation is None or speculation.method != "mtp":
        return args
    if args.extra_layers != 1:
        key = "num_nextn_predict_layers"
        has = (
            f"has {args.extra_layers} of them ({key}), and only 1 is implemented"
            if args.extra_layers
            else (f"has none (no {key} in the config.json of a {args.model_type} model)")
        )
        raise ConfigError(
            f"speculative_config: method mtp drafts with the multi-token-prediction (MTP) layer of the "
            f"checkpoint, which {has}: {REMEDY}."
        )
    return replace(args, draft_layers=1, notes=tuple(note for note in args.notes if not note.startswith(SKIPPED)))


def draft_config(config: EngineConfig, dtype: str) -> EngineConfig | None:
    """Return the options with which the draft model of an engine is planned, or its EAGLE head; None without one.

    dtype   of the computation of the model, and of a head, which reads its states
    """
    speculation = read_speculative_config(config.scheduler.speculative_config)
    if speculation is None or not speculation.model:
        return None
    return replace(
        config,
        model=replace(
            config.model,
            model=speculation.model,
            tokenizer=None,
            revision=speculation.revision,
            max_model_len=None,
            dtype=dtype if speculation.head else config.model.dtype,
        ),
        scheduler=replace(config.scheduler, speculative_config=None),
        cache=replace(config.cache, enable_cache_blend=False),  # it computes all tokens
        load=replace(config.load, quantization=speculation.quantization),
    )


def head_method(config: EngineConfig) -> str:
    """Return the method of the EAGLE head that an engine drafts with; "" without one."""
    speculation = read_speculative_config(config.scheduler.speculative_config)
    return speculation.head if speculation else ""


def with_spelling(args: ModelArgs, stored: Collection[str]) -> ModelArgs:
    """Return the arguments of an EAGLE head with the names that its checkpoint gives to layer and projection."""
    assert args.eagle is not None
    layers = ("midlayer", "layers.0", "transformer")
    at = next((at for at in layers if f"{at}.mlp.down_proj.weight" in stored), args.eagle.at)
    fc = "fusion_fc" if "fusion_fc.weight" in stored else "fc"
    bias = f"{fc}.bias" in stored if stored else args.eagle.bias
    return replace(args, eagle=replace(args.eagle, at=at, fc=fc, bias=bias))


def resolve_speculators(config: EngineConfig, folder: Path) -> EngineConfig:
    """Return the options of an engine. Those for a repository of the speculators library become the options for the
    model that its head drafts for, with the head. A model that drafts with its own layers need not be named.

    folder   folder of the model that the options name
    """
    if asked := config.scheduler.speculative_config:
        named = asked.get("model")
        itself = isinstance(named, str) and (named == config.model.model or Path(named).resolve() == folder.resolve())
        if not (itself and str(asked.get("method")).endswith("mtp")):
            return config
        kept = {name: value for name, value in asked.items() if name != "model"}
        return replace(config, scheduler=replace(config.scheduler, speculative_config=kept))
    raw = read_raw_config(folder)
    library = raw.get("speculators_config")
    if not isinstance(library, dict):
        return config
    try:
        name, (first, *_) = library["verifier"]["name_or_path"], library["proposal_methods"]
        given = {
            "method": raw["speculators_model_type"],
            "model": config.model.model,
            "num_speculative_tokens": first["speculative_tokens"],
        }
        if not (name and isinstance(name, str)):  # None would be the bundled model
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{folder / 'config.json'}: speculators_config names no verifier or no speculative_tokens: "
            "serve the model of the head, with --speculative-config."
        ) from None
    if config.model.revision:
        raise ConfigError(
            f"revision={config.model.revision} of a speculators repository is not implemented: download "
            "it and give its folder."
        )
    return replace(
        config, model=replace(config.model, model=name), scheduler=replace(config.scheduler, speculative_config=given)
    )


def with_draft_model(plan: EnginePlan, draft: EnginePlan) -> EnginePlan:
    """Return the plan of an engine with a draft model or EAGLE head, whose layers follow those of the model in each
    page.

    Raises ConfigError for a draft model that cannot draft for the model.
    """
    name, length = draft.config.model.model, plan.config.model.max_model_len or plan.args.max_position_embeddings
    head, vocab = draft.args.eagle, draft.args.vocab_size
    if head is not None:
        _check_head(plan, draft.args, f"speculative_config: the EAGLE head {name}")
        vocab = head.vocab_size
    elif plan.mesh.parallel.size > 1:
        raise ConfigError(
            "speculative_config: method draft_model runs on one device, and the engine has "
            f"{plan.mesh.parallel.size} ranks: {REMEDY}."
        )
    if vocab != plan.args.vocab_size:
        raise ConfigError(
            f"speculative_config: the draft model {name} has {vocab} token ids and the "
            f"model has {plan.args.vocab_size}: use a draft model with the model's vocabulary."
        )
    if draft.args.max_position_embeddings < length:
        raise ConfigError(
            f"speculative_config: the draft model {name} has a context of "
            f"{draft.args.max_position_embeddings} tokens and the engine of {length}: lower "
            f"max_model_len to {draft.args.max_position_embeddings}, or use another draft model."
        )
    asked = plan.speculation.max_model_len if plan.speculation else 0
    if asked and asked < length:
        raise ConfigError(
            f'speculative_config: "max_model_len": {asked} is below the {length} tokens of the engine, whose requests '
            "have drafts in all of their context: raise it, or leave it out."
        )
    drafting = msgspec.structs.replace(plan.drafting, model=draft)
    return msgspec.structs.replace(plan, drafting=drafting, geometry=joined(plan.geometry, draft.geometry))


def _check_head(plan: EnginePlan, args: ModelArgs, which: str) -> None:
    """Raise ConfigError for an EAGLE head that cannot draft for the model. which: the head, in words."""
    assert args.eagle is not None
    layers, remedy = plan.args.num_layers, "use the head that was made for this model"
    if args.hidden_size != plan.args.hidden_size:
        raise ConfigError(
            f"{which} reads states of {args.hidden_size} numbers and the model's have "
            f"{plan.args.hidden_size}: {remedy}."
        )
    if odd := [one for one in args.eagle.reads(layers) if not 0 <= one < layers]:
        raise ConfigError(
            f"{which} reads the states before layer {odd[0]}, and the model has the layers 0 to {layers - 1}: {remedy}."
        )
    if args.rope.kind == "dynamic":
        raise ConfigError(f"{which} has rope type dynamic, which is not implemented for heads: use another head.")
    if plan.config.cache.enable_cache_blend:
        raise ConfigError(
            f"{which} needs the states of all tokens, which enable_cache_blend does not compute: leave it out."
        )
    if plan.config.hosts.nnodes > 1:
        raise ConfigError(f"{which} drafts on one host, and the engine has {plan.config.hosts.nnodes}: {REMEDY}.")


def draft_notes(plan: EnginePlan) -> tuple[str, ...]:
    """Return lines about the drafter that the user should see."""
    head = plan.draft.args.eagle if plan.draft is not None else None
    length = plan.config.model.max_model_len or plan.args.max_position_embeddings
    ranks, asked = plan.mesh.parallel.tp, plan.speculation.draft_tensor_parallel_size if plan.speculation else 0
    spread = (
        (
            f"speculative_config: draft_tensor_parallel_size={asked} changes nothing: drafts are made by all ranks "
            f"of the model (tensor_parallel_size={ranks}).",
        )
        if asked not in (0, ranks)
        else ()
    )
    long = (
        (
            f"the EAGLE head was trained for {head.context} positions, and the engine has {length}: behind those, "
            "fewer drafts may be right.",
        )
        if head is not None and head.context < length
        else ()
    )
    return (*(plan.speculation.notes if plan.speculation else ()), *spread, *long)


def joined(geometry: KVGeometry, draft: KVGeometry) -> KVGeometry:
    """Return the page of a model and its draft model."""
    ((own,), (other,)) = geometry.groups, draft.groups
    assert geometry.block_size == draft.block_size, "both are of one device"
    group = msgspec.structs.replace(
        own,
        layers=tuple(range(len(own.layers) + len(other.layers))),
        drafts=other.components,
        num_drafts=len(other.layers),
    )
    return msgspec.structs.replace(geometry, groups=(group,))
