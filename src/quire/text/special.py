"""The small JSON files beside a tokenizer, with its named tokens (bos, eos, pad, ...) and its special tokens.

Knows the file formats only, not how text is encoded. Precedence follows transformers 5: `tokenizer_config.json` counts;
`special_tokens_map.json` is read only for older folders, whose config has no `added_tokens_decoder`.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from quire.contracts.errors import ModelNotFound, UnsupportedModel

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class AddedTokenSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `added_tokens_decoder` in tokenizer_config.json; transformers' `AddedToken`."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class SpecialTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Special tokens of a checkpoint folder.

    named    name such as "bos_token" -> token text; chat templates see them as variables
    extra    further special tokens, in file order
    added    id -> entry of `added_tokens_decoder`
    """

    named: dict[str, str] = {}
    extra: tuple[str, ...] = ()
    added: dict[int, AddedTokenSpec] = {}

    @staticmethod
    def read(folder: Path) -> "SpecialTokens":
        """Read the folder's files, which may be absent. Raises `UnsupportedModel` for a damaged file."""
        config = read_json(folder / "tokenizer_config.json")
        older = {} if "added_tokens_decoder" in config else read_json(folder / "special_tokens_map.json")
        both = {**config, **older}
        extra = "extra_special_tokens" if both.get("extra_special_tokens") else "additional_special_tokens"
        try:
            return SpecialTokens(
                named={name: _content(name, both[name]) for name in NAMED if both.get(name) is not None},
                extra=_contents(extra, both.get(extra) or []),
                added=_added_tokens(config.get("added_tokens_decoder") or {}),
            )
        except _Damaged as error:
            file = "special_tokens_map.json" if error.name in older else "tokenizer_config.json"
            raise UnsupportedModel(f"{folder / file}: {error.name} must be {error}: fetch the file again.") from None


class _Damaged(Exception):
    """The entry `name` of a file is wrong. The message says what it must be."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(what)
        self.name = name


def _content(name: str, value: Any) -> str:
    """Return the text of a token that is given as a string or as a mapping with "content"."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise _Damaged(name, 'a token: a string, or an object with "content"')
    return content


def _contents(name: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, (dict, list)):
        raise _Damaged(name, "a list of tokens")
    return tuple(_content(name, value) for value in (values.values() if isinstance(values, dict) else values))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; {} if the file is absent. Raises `UnsupportedModel` for other content."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except NotADirectoryError as error:
        raise ModelNotFound(f"{path.parent} is not a folder: give the folder that holds {path.name}.") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not valid JSON ({error}): fetch the file again.") from error
    if not isinstance(data, dict):
        raise UnsupportedModel(f"{path} holds a JSON {type(data).__name__}, not an object: fetch the file again.")
    return data


def _added_tokens(entries: Any) -> dict[int, AddedTokenSpec]:
    try:
        defaults = {"special": False, "normalized": True}
        return {
            i: msgspec.convert(defaults | spec, AddedTokenSpec)
            for i, spec in msgspec.convert(entries, dict[TokenId, dict[str, Any]], strict=False).items()
        }
    except msgspec.ValidationError:
        raise _Damaged("added_tokens_decoder", "an object {token id: token}") from None
