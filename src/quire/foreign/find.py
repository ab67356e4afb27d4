"""The model of a folder as a decoder of transformers: inspected once in a process, as arguments of a model."""

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from quire.args.checkpoint import DTYPES, NEUTRAL, ModelArgs, read_raw_config
from quire.args.layers import ForeignArgs
from quire.foreign.arguments import model_args
from quire.foreign.inspect import Inspected, inspect
from quire.foreign.names import stored_names
from quire.foreign.skeleton import read_skeleton, refused

RUNS = "{} has no file in Quire: its layers run by transformers' code ({})"
ASKED = "its layers run by transformers' code, as --model-impl transformers asks"


def foreign_args(folder: Path, stored: Collection[str], *, lacks: str = "") -> ModelArgs:
    """Return the arguments of the model in a folder, whose layers transformers' code runs.

    stored   names of the tensors in the checkpoint; (): not known
    lacks    the reason why Quire does not run it by itself; "": it was not asked
    Raises `UnsupportedModel` with what was found.
    """
    raw = dict(read_raw_config(folder))
    found = inspected(folder)
    _refuse_unread(raw, found)
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    note = RUNS.format(repr(raw.get("model_type")), type(found.skeleton.model).__name__) if lacks else ASKED
    names = stored_names(found.skeleton, stored)
    args = model_args(raw, found, names, dtype if dtype in DTYPES else "float32")
    return replace(args, notes=(f"{note}; {_cost(args)}",))


def _cost(args: ModelArgs) -> str:
    """Return words for the operations that layers run beside our kernels: a native layer has none."""
    own = [one.mixer.operations for one in args.layers if isinstance(one.mixer, ForeignArgs)]
    most = max(map(len, own))
    if not most:
        return "no operation outside of our kernels is left in a layer, as in a native one"
    names = ", ".join(dict.fromkeys(name for operations in own for name in operations))
    return (
        f"up to {most} operation{'s' * (most > 1)} outside of our kernels in a layer ({names}), native ones have none"
    )


@lru_cache(maxsize=4)
def inspected(folder: Path) -> Inspected:
    """Return the inspected model of a folder. A process inspects a folder once."""
    raw = dict(read_raw_config(folder))
    return inspect(raw, read_skeleton(folder, raw, "float32"))


def _refuse_unread(raw: dict[str, Any], found: Inspected) -> None:
    """Refuse keys of config.json that change the math of models, and that the class of this one does not read."""
    known = set(type(found.skeleton.model.config)().to_dict())
    for key, neutral in NEUTRAL.items():
        if neutral is not None and key in raw and raw[key] not in neutral and key not in known:
            raise refused(raw, f"{key}={raw[key]!r} changes the math, and transformers' class does not read it")
