"""Draft layers of a model: the arguments of an engine that drafts with them, or the reason why it cannot."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.checkpoint import SKIPPED, ModelArgs
from quire.contracts.errors import ConfigError
from quire.contracts.speculation import read_speculative_config

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
