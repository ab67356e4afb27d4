"""A model of transformers without weights: parameters on the meta device, buffers with their numbers."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quire.contracts.errors import UnsupportedModel

NAME = "quire"  # of our attention among transformers' implementations
OLDEST = (5, 23)  # version of transformers, as of the extra
INSTALL = "pip install 'quire[transformers]'"
OWN_CODE = "its code lies inside the repository (auto_map), and code of a checkpoint is never run (trust_remote_code)"
KINDS_OF_LAYERS = {"full_attention", "sliding_attention", "attention", "dense", "sparse", "moe", "chunked_attention"}


@dataclass(frozen=True)
class Skeleton:
    """A causal decoder of transformers.

    model, base   the whole model, and the part of it that ends before the head
    layers        the layers, and `at`, the name of the list that has them ("model.layers")
    names         module -> its name in the model
    """

    model: Any
    base: Any
    layers: nn.ModuleList
    at: str
    names: dict[nn.Module, str]

    @property
    def config(self) -> Any:
        """The configuration, an object of transformers."""
        return self.base.config

    def stays_float(self, name: str) -> bool:
        """True for a parameter of the model that transformers keeps in float32, whatever the model's dtype is."""
        words = getattr(self.model, "_keep_in_fp32_modules_strict", None) or ()
        return any(re.search(word.replace("*", ".*"), name) for word in words)


def missing_library() -> str:
    """Return the reason why transformers cannot be used, with the command that installs it; "" if it can."""
    if importlib.util.find_spec("transformers") is None:
        return f"transformers is not installed: {INSTALL}"
    found = importlib.metadata.version("transformers")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST:
        return f"transformers {found} is older than {OLDEST[0]}.{OLDEST[1]}: {INSTALL}"
    return ""


def read_skeleton(folder: Path, raw: dict[str, Any], dtype: str) -> Skeleton:
    """Build the model of a folder's config.json without weights. Raises `UnsupportedModel` with what was found.

    raw     the decoded config.json
    dtype   of parameters and activations, such as "float32"
    """
    if why := missing_library():
        raise refused(raw, f"Quire has no file for it, and {why}")
    config = _config(folder, raw)
    _refuse_by_config(raw, config)
    kind = _class(raw, config)
    config.use_cache = False
    made = _parts(raw, _without_weights(kind, config, getattr(torch, dtype)))
    for one in (config, made.config):
        one._attn_implementation = implementation(kind)
        one._experts_implementation = NAME
    return made


def refused(raw: dict[str, Any], why: str) -> UnsupportedModel:
    """Return the error for a model that transformers' code cannot run here."""
    return UnsupportedModel(f"model_type {raw.get('model_type')!r} cannot run by transformers' code: {why}.")


def implementation(kind: Any) -> str:
    """Return the name of the attention implementation under which a class calls ours."""
    own = getattr(kind, "_supports_attention_backend", False) or getattr(kind, "_supports_flex_attn", False)
    return NAME if own else "sdpa"


def _config(folder: Path, raw: dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = raw.get("model_type")
    if name not in CONFIG_MAPPING:
        import transformers

        code = f"; {OWN_CODE}" if raw.get("auto_map") else ""
        raise refused(raw, f"transformers {transformers.__version__} does not know it either{code}")
    try:
        return CONFIG_MAPPING[name].from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise refused(raw, f"its config.json is not one of transformers ({_line(error)})") from None


def _refuse_by_config(raw: dict[str, Any], config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise refused(raw, "it is an encoder and a decoder, which attends to another text (cross-attention)")
    if getattr(config, "add_cross_attention", False):
        raise refused(raw, "its layers attend to another text (cross-attention)")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None) is True:
        raise refused(raw, "its tokens attend to those behind them, so it is no causal decoder")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}
    if found := kinds & {"dynamic", "longrope"}:
        raise refused(raw, f"rope type {found.pop()!r} rotates by the length of the longest text of a step")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - KINDS_OF_LAYERS)
    if others:
        raise refused(raw, f"it has layers of the kind {' and '.join(others)}{_near(others)}")


def _near(kinds: list[str]) -> str:
    """Return the place where Quire has layers like these."""
    near = {
        "linear_attention": "recurrent layers run in families of Quire alone, such as qwen3_next and nemotron_h",
        "conv": "layers that keep a state run in families of Quire alone, such as lfm2",
        "indexed_attention": "sparse attention runs in deepseek_v32 and glm_moe_dsa of Quire",
    }
    return "".join(f"; {near[kind]}" for kind in kinds if kind in near)


def _class(raw: dict[str, Any], config: Any) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(raw["model_type"])
    if found is None:
        raise refused(raw, "transformers has no causal decoder of this type")
    known = (found,) if isinstance(found, str) else tuple(found)
    named = [name for name in raw.get("architectures") or () if isinstance(name, str)]
    if named and not set(named) & set(known):
        raise refused(raw, f"architecture {named[0]} is no causal decoder with a head, as {known[0]} is")
    name = next((name for name in named if name in known), known[0])
    try:
        return getattr(transformers, name)
    except Exception as error:
        raise refused(raw, f"transformers cannot import {name} ({_line(error)})") from None


@contextmanager
def _on_meta() -> Iterator[None]:
    """Move each parameter to the meta device as it is made, so that one at a time takes (untouched) memory."""
    own = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        own(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = own  # type: ignore[method-assign]


def _without_weights(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _on_meta(), torch.no_grad():
            model = kind(config)
    except Exception as error:
        words = {"model_type": config.model_type}
        raise refused(words, f"transformers cannot build it ({_line(error)})") from None
    finally:
        torch.set_default_dtype(before)
    empty = [name for name, one in model.named_buffers() if one.is_meta]
    if empty:
        words = {"model_type": config.model_type}
        raise refused(words, f"its constructor computes {empty[0]} from weights, which are not there yet")
    return model.eval().requires_grad_(False)


def _parts(raw: dict[str, Any], model: Any) -> Skeleton:
    names = {module: name for name, module in model.named_modules()}
    base = model.base_model
    if base is model:  # its prefix names no module of it
        base = next((child for child in model.children() if hasattr(child, "get_input_embeddings")), model)
    count = getattr(base.config, "num_hidden_layers", 0)
    lists = [
        module
        for module in base.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and next(module[0].children(), None) is not None
    ]
    if base is model or not lists:
        raise refused(raw, f"no list of its {count} layers was found in {type(model).__name__}")
    at = names[lists[0]]
    around = model.get_submodule(at.rpartition(".")[0])  # a model inside the base model, which some heads read
    base = around if hasattr(around, "get_input_embeddings") else base
    return Skeleton(model=model, base=base, layers=lists[0], at=at, names=names)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
