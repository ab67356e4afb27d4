"""End-of-sequence ids and default sampling parameters of a checkpoint.

Knows `config.json`, `generation_config.json` and a tokenizer's eos. Knows nothing of requests.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.contracts.errors import ConfigError, InvalidParameter, UnsupportedModel
from quire.contracts.sampling import SamplingParams
from quire.text.special import read_json
from quire.text.tokenizer import Tokenizer

GENERATION_FILE = "generation_config.json"
MODEL_FILE = "config.json"
# generation_config.json -> SamplingParams
SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
FIELDS = {name: name for name in SAME_NAME} | {"max_new_tokens": "max_tokens"}


def load_eos_ids(folder: Path, tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
    """Return all end-of-sequence ids of the tokenizer, `generation_config.json` and `config.json` in `folder`.
    A checkpoint often lists an id in one place only (an end of turn beside an end of text), so all places count. Raises
    `UnsupportedModel` when one is not a token id."""
    found = [] if tokenizer is None or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for file in (GENERATION_FILE, MODEL_FILE):
        config = read_json(folder / file)
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                found += _as_ids(part.get("eos_token_id"), folder / file)
    return tuple(dict.fromkeys(found))


def load_generation_defaults(
    folder: Path, *, read: bool = True, override: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the `SamplingParams` fields that `generation_config.json` sets; {} without the file.

    read       False: ignore the file
    override   entries that replace those of the file, under the same names (`max_new_tokens`)
    `do_sample: false` means greedy (temperature 0). Without `do_sample` the temperature is as given.
    Raises `InvalidParameter` for an unknown name in `override`, `ConfigError` for a name that is not a string,
    `UnsupportedModel` for a value out of the range of its field.
    """
    for name in override or ():
        if not isinstance(name, str):
            raise ConfigError(f"override_generation_config: {name!r} is not a name: its keys must be strings.")
    unknown = sorted(set(override or ()) - set(FIELDS) - {"do_sample"})
    if unknown:
        known = ", ".join((*FIELDS, "do_sample"))
        raise InvalidParameter(
            f"override_generation_config: {unknown[0]!r} is not known: give one of {known}.", param=unknown[0]
        )
    config = {**(read_json(folder / GENERATION_FILE) if read else {}), **(override or {})}
    values = {field: config[key] for key, field in FIELDS.items() if config.get(key) is not None}
    if config.get("do_sample") is False and "temperature" not in (override or {}):
        values["temperature"] = 0.0
    try:
        SamplingParams(**values)
    except InvalidParameter as error:
        if error.param in {FIELDS.get(name) for name in override or ()}:
            raise
        raise UnsupportedModel(f"{folder / GENERATION_FILE}: {error} Correct the file or remove it.") from error
    return values


def _as_ids(value: Any, path: Path) -> list[int]:
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if any(type(i) is not int or not 0 <= i < 2**32 for i in ids):
        raise UnsupportedModel(
            f"{path}: eos_token_id={value!r} must be a token id or a list of token ids. Correct the file."
        )
    return ids
