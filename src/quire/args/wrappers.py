"""Reader of config.json of a model that has a language model inside, such as one that reads images too. No torch.

Only the language model runs. Its keys lie in `text_config`, a few beside it; its tensors have names of their own.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from quire.args.keys import Keys


class WrapperArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a language model in the checkpoint of the model around it.

    model_type   of the model around it
    root, head   begin of the names of the language model's tensors, and name of the head's weight
    """

    model_type: str
    root: str
    head: str


class Wrapper(NamedTuple):
    """A model around a language model.

    text       model_type of the language model when text_config lacks it
    defaults   keys that text_config may lack, with their values
    """

    architecture: str
    text: str
    defaults: Mapping[str, Any] = {}


# Places of a language model in checkpoints, newer ones first: begin of its tensors' names, and its head.
PLACES = (("model.language_model.", "lm_head.weight"), ("language_model.model.", "language_model.lm_head.weight"))
_GEMMA3: Mapping[str, Any] = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "head_dim": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072, "rope_theta": 1e6,
}  # fmt: skip
_GEMMA4: Mapping[str, Any] = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "head_dim": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
}  # fmt: skip
_LLAMA4: Mapping[str, Any] = {
    "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}  # fmt: skip
WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", "gemma3_text", _GEMMA3),
    "gemma4": Wrapper("Gemma4ForConditionalGeneration", "gemma4_text", _GEMMA4),
    "llama4": Wrapper("Llama4ForConditionalGeneration", "llama4_text", _LLAMA4),
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", "mistral"),
    "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": Wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    "qwen3_vl": Wrapper("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    "qwen3_vl_moe": Wrapper("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
}
QUANTIZED = ("quantization_config", "compression_config")
AROUND = (*QUANTIZED, "tie_word_embeddings", "dtype", "torch_dtype")  # keys beside
KEPT = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")  # names of unquantized modules


def unwrapped(raw: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], WrapperArgs | None]:
    """Return the keys of the language model of a config.json, and its place; of another file its own keys and None.

    The names of modules that stay unquantized tell the place. `plan/as_stored.py` corrects it by the stored tensors.
    Raises ModelError for a `text_config` that is no object.
    """
    wrapper = WRAPPERS.get(str(raw.get("model_type")))
    if wrapper is None or raw.get("text_config") is None:
        return raw, None
    keys = Keys(raw, source)
    named, known = keys.names("architectures"), wrapper.architecture
    if named and known not in named and known.replace("ForConditionalGeneration", "Model") not in named:
        raise keys.unsupported(
            f"architecture {named[0]!r} of model_type {raw['model_type']!r} is not implemented: use a {known}."
        )
    beside = {key: raw[key] for key in AROUND if raw.get(key) is not None}
    inner = keys.object("text_config") or {}
    found = dict(wrapper.defaults) | {"model_type": wrapper.text} | inner | beside
    found.pop("architectures", None)  # of the model around it, if any
    root, head = place_of(_kept(beside))
    return found, WrapperArgs(model_type=str(raw["model_type"]), root=root, head=head)


def place_of(names: Iterable[str], default: tuple[str, str] = PLACES[0]) -> tuple[str, str]:
    """Return the one of PLACES to which names of tensors or modules belong; `default` if none tells."""
    known = [name.replace("\\", "") for name in names]  # patterns are names with escaped dots
    return next((place for place in PLACES if any(place[0] in name for name in known)), default)


def _kept(beside: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of modules that a quantization_config leaves unquantized. Its errors are not raised here."""
    for key in QUANTIZED:
        config = beside.get(key)
        for names in (config.get(kept) for kept in KEPT) if isinstance(config, Mapping) else ():
            yield from (name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def placed(names: Mapping[tuple[str, str], str], wrapper: WrapperArgs | None) -> Mapping[tuple[str, str], str]:
    """Return names of stored tensors as they are inside a wrapper; None: there is none."""
    if wrapper is None:
        return names
    renamed = {"lm_head.weight": wrapper.head}
    return {key: renamed.get(one, one.replace("model.", wrapper.root, 1)) for key, one in names.items()}
