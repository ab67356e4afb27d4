"""Tiny models of three layers with sliding windows."""

from typing import Any

from .tiny_models import Tiny

# All layers with a window; one with and two without; two with and one without; with experts, every second layer.
MODELS: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "all": ("mistral", ()),
    "last": ("qwen2", (("use_sliding_window", True), ("max_window_layers", 2))),
    "most": ("qwen3", (("use_sliding_window", True), ("max_window_layers", 1))),
    "experts": ("qwen2_moe", (("use_sliding_window", True), ("max_window_layers", 3))),
}


def windowed(name: str, window: int, **options: Any) -> Tiny:
    """Return one of MODELS with a window of so many tokens."""
    family, changes = MODELS[name]
    return Tiny(family=family, changes=(*changes, ("sliding_window", window)), **options)
