"""Which model a benchmark runs, and with which engine options."""

from pathlib import Path
from typing import Any

from quire.bench.workload import model_folder, model_names

DEFAULT_MODEL = "qwen3-0.6b"
DUMMY = {"load_format": "dummy", "skip_tokenizer_init": True}
SECRET = ("hf_token",)


def resolve_target(options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name, engine options) of the model to measure.

    A name of `bench/models` means that configuration with random weights and without a tokenizer; a folder or hub id is
    loaded as it is. What the caller gave explicitly wins.
    """
    model = options.get("model") or DEFAULT_MODEL
    if model in model_names() and not Path(model).is_dir():
        return model, DUMMY | options | {"model": str(model_folder(model))}
    return Path(model).name, options | {"model": model}


def printable(options: dict[str, Any]) -> dict[str, Any]:
    """Options for a result file: no secrets, no path of the model."""
    return {name: value for name, value in options.items() if name not in (*SECRET, "model")}
