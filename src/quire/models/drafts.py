"""Draft layers and draft models: the arguments and plans of an engine that drafts with them, or why it cannot."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from quire.config.checkpoint import SKIPPED, ModelArgs
from quire.config.engine import EngineConfig
from quire.contracts.blocks import KVGeometry
from quire.contracts.errors import ConfigError
from quire.contracts.speculation import read_speculative_config
from quire.models.plan import EnginePlan

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
        has = f"has {args.extra_layers} of them ({key}), and only 1 is implemented" if args.extra_layers else (
            f"has none (no {key} in the config.json of a {args.model_type} model)")
        raise ConfigError(f"speculative_config: method mtp drafts with the multi-token-prediction (MTP) layer of the "
                          f"checkpoint, which {has}: {REMEDY}.")
    return replace(args, draft_layers=1, notes=tuple(note for note in args.notes if not note.startswith(SKIPPED)))


def draft_config(config: EngineConfig) -> EngineConfig | None:
    """Return the options with which the draft model of an engine is planned; None without a draft model."""
    speculation = read_speculative_config(config.scheduler.speculative_config)
    if speculation is None or not speculation.model:
        return None
    return replace(config, model=replace(config.model, model=speculation.model, tokenizer=None, revision=None,
                                         max_model_len=None),
                   scheduler=replace(config.scheduler, speculative_config=None),
                   cache=replace(config.cache, enable_cache_blend=False),  # it computes all tokens
                   load=replace(config.load, quantization=None))  # fmt: skip


def with_draft_model(plan: EnginePlan, draft: EnginePlan) -> EnginePlan:
    """Return the plan of an engine with a draft model, whose layers follow those of the model in each page.

    Raises ConfigError for a draft model that cannot draft for the model.
    """
    name, length = draft.config.model.model, plan.config.model.max_model_len or plan.args.max_position_embeddings
    if plan.mesh.parallel.size > 1:
        raise ConfigError("speculative_config: method draft_model runs on one device, and the engine has "
                          f"{plan.mesh.parallel.size} ranks: {REMEDY}.")
    if draft.args.vocab_size != plan.args.vocab_size:
        raise ConfigError(f"speculative_config: the draft model {name} has {draft.args.vocab_size} token ids and the "
                          f"model has {plan.args.vocab_size}: use a draft model with the model's vocabulary.")
    if draft.args.max_position_embeddings < length:
        raise ConfigError(f"speculative_config: the draft model {name} has a context of "
                          f"{draft.args.max_position_embeddings} tokens and the engine of {length}: lower "
                          f"max_model_len to {draft.args.max_position_embeddings}, or use another draft model.")
    drafting = msgspec.structs.replace(plan.drafting, model=draft)
    return msgspec.structs.replace(plan, drafting=drafting, geometry=joined(plan.geometry, draft.geometry))


def joined(geometry: KVGeometry, draft: KVGeometry) -> KVGeometry:
    """Return the page of a model and its draft model."""
    ((own,), (other,)) = geometry.groups, draft.groups
    assert geometry.block_size == draft.block_size, "both are of one device"
    group = msgspec.structs.replace(own, layers=tuple(range(len(own.layers) + len(other.layers))),
                                    drafts=other.components, num_drafts=len(other.layers))  # fmt: skip
    return msgspec.structs.replace(geometry, groups=(group,))
