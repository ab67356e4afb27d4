"""The small JSON files beside a tokenizer: which tokens have a name (bos, eos, pad, ...) and which are special.

Knows the file formats only, not how text is encoded. Precedence follows transformers 5: `tokenizer_config.json` rules;
`special_tokens_map.json` is consulted only for older folders, whose config has no `added_tokens_decoder`.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from quire.contracts.errors import ModelNotFound, UnsupportedModel

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class AddedTokenSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `added_tokens_decoder`: a token matched in text before the model of the tokenizer runs."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class SpecialTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder says of its special tokens.

    named    attribute -> token text, only those that are set; also the variables a chat template sees
    extra    further special tokens, in file order
    added    id -> entry of `added_tokens_decoder`
    """

    named: dict[str, str] = {}
    extra: tuple[str, ...] = ()
    added: dict[int, AddedTokenSpec] = {}

    @staticmethod
    def read(folder: Path) -> "SpecialTokens":
        """Read the folder's files; absent files mean no special tokens. `UnsupportedModel` if one is damaged."""
        config = read_json(folder / "tokenizer_config.json")
        added = {int(i): _added(spec) for i, spec in (config.get("added_tokens_decoder") or {}).items()}
        if "added_tokens_decoder" not in config:
            config = {**config, **read_json(folder / "special_tokens_map.json")}
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        values = extra.values() if isinstance(extra, dict) else extra
        named = {name: token_content(config[name]) for name in NAMED if config.get(name) is not None}
        return SpecialTokens(named=named, extra=tuple(token_content(v) for v in values), added=added)


def token_content(value: Any) -> str:
    """The text of a token given as a string or as a mapping with "content"."""
    return str(value["content"]) if isinstance(value, dict) else str(value)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} when the file is absent; `UnsupportedModel` when it is not a JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except NotADirectoryError as error:
        raise ModelNotFound(f"{path.parent} is not a folder: give the folder that holds {path.name}.") from error
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not valid JSON ({error}): fetch the file again.") from error
    if not isinstance(data, dict):
        raise UnsupportedModel(f"{path} holds a JSON {type(data).__name__}, not an object: fetch the file again.")
    return data


def _added(spec: Any) -> AddedTokenSpec:
    flags = {key: spec[key] for key in AddedTokenSpec.__struct_fields__ if key in spec}
    return AddedTokenSpec(**{"special": False, "normalized": True, **flags})
