"""Pooling: turns the hidden states of a text into one vector.

The method comes from `pooler_config`, else from the sentence-transformers files in the model's folder, else it is the
last token. Knows no tensors; the worker computes the sums.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.args.checkpoint import read_raw_config
from quire.contracts.errors import ConfigError, InvalidParameter, ModelError, UnsupportedModel, shown
from quire.contracts.step import F32

MODULES = "modules.json"
# Names of a method in vLLM's pooler_config and in 1_Pooling/config.json (old and new) -> our name.
METHODS = {"mean": "mean", "mean_tokens": "mean", "last": "last", "lasttoken": "last", "cls": "cls", "cls_token": "cls"}
SETTINGS = ("pooling_type", "seq_pooling_type", "normalize", "use_activation")  # of pooler_config: two names each
WORDS = {
    "mean": "the mean of all hidden states",
    "last": "the last token's hidden state",
    "cls": "the first token's hidden state",
}


@dataclass(frozen=True, kw_only=True)
class PoolingPlan:
    """Settings that make an embedding from hidden states.

    method      "mean", "last" or "cls", of the hidden states after the final norm
    normalize   True: embeddings are scaled to length 1
    source      file or option that gives these settings; "": the default
    width       numbers in an embedding
    """

    width: int
    method: str = "last"
    normalize: bool = True
    source: str = ""

    def __str__(self) -> str:
        length = ", normalized" if self.normalize else ""
        return f"{WORDS[self.method]}{length} ({self.source or 'the default: the model has no ' + MODULES})"

    def check(self, dimensions: int | None) -> None:
        """Raise `InvalidParameter` when `dimensions` is neither None nor an integer in [1, width]."""
        given: Any = dimensions  # the caller may have given any type
        if given is not None and not (type(given) is int and 1 <= given <= self.width):
            raise InvalidParameter(
                f"dimensions={shown(given)}: must be an integer in [1, {self.width}], the size of "
                "this model's embeddings.",
                param="dimensions",
            )

    def check_scores(self) -> None:
        """Refuse to compare texts: raise `InvalidParameter` if model and pooler_config define no pooling."""
        if not self.source:
            raise InvalidParameter(
                f"this model was not made to compare texts: it has no {MODULES} of sentence-transformers. Serve an "
                "embedding model, or set pooler_config for this one.",
                param="model",
            )

    def finish(self, pooled: F32, dimensions: int | None) -> F32:
        """Return the first `dimensions` numbers (None: all) of `pooled` [width], scaled to length 1 if `normalize`."""
        vector = pooled[:dimensions]
        return vector / max(float(np.linalg.norm(vector)), 1e-12) if self.normalize else vector


def read_pooling(
    folder: Path, override: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None
) -> PoolingPlan:
    """Return the pooling that the files in a model's folder define; settings in `override` (pooler_config) win.

    overrides   values over those of config.json (hf_overrides)

    Raises `UnsupportedModel` for a step or method that is not implemented, `ModelError` for a damaged file, and
    `ConfigError` for an invalid override.
    """
    plan = PoolingPlan(width=int(read_raw_config(folder, overrides).get("hidden_size") or 0))
    if (path := folder / MODULES).is_file():
        plan = _of_modules(plan, path)
    values = {name: value for name, value in (override or {}).items() if value is not None}
    for name, value in values.items():
        if name not in SETTINGS:
            raise ConfigError(f"pooler_config: {name!r} is not implemented: use {', '.join(SETTINGS)}.")
        if name.endswith("pooling_type"):
            method = METHODS.get(value.lower()) if isinstance(value, str) else None
            if method is None:
                raise ConfigError(f"pooler_config: {name}={value!r} must be MEAN, LAST or CLS.")
            plan = replace(plan, method=method)
        elif not isinstance(value, bool):
            raise ConfigError(f"pooler_config: {name}={value!r} must be true or false.")
        else:
            plan = replace(plan, normalize=value)
    return replace(plan, source=" and ".join(filter(None, (plan.source, "pooler_config")))) if values else plan


def _of_modules(plan: PoolingPlan, path: Path) -> PoolingPlan:
    try:
        modules = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({type(error).__name__}: {error}): download it again.") from None
    method = ""
    for kind, place in modules:
        if kind == "Pooling":
            method = _method(path.parent / place)
        elif kind not in ("Transformer", "Normalize"):
            raise UnsupportedModel(
                f"{path}: embeddings of this model go through {place or kind} ({kind}), which is "
                f"not implemented: use another model, or remove {MODULES} and generate text."
            )
    normalize = any(kind == "Normalize" for kind, _ in modules)
    return replace(plan, method=method, normalize=normalize, source=MODULES) if method else plan


def _method(folder: Path) -> str:
    config = read_raw_config(folder)
    named = config.get("pooling_mode")
    names = [key.removeprefix("pooling_mode_") for key, on in config.items() if key[:13] == "pooling_mode_" and on]
    names = names if named is None else [str(named)]
    if len(names) != 1 or names[0] not in METHODS:
        raise UnsupportedModel(
            f"{folder / 'config.json'}: pooling by {' and '.join(names) or 'nothing'} is not "
            f"implemented (only mean, last token and cls): use another model, or remove {MODULES}."
        )
    return METHODS[names[0]]
