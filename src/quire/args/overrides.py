"""Values over those of a config.json, of the option `hf_overrides`. No torch."""

import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from quire.contracts.errors import ConfigError
from quire.contracts.text_table import read_rows

# Keys of config.json that are read for every family.
EVERY = frozenset(next(iter(read_rows(Path(__file__).with_name("checkpoint_keys.txt"))))[0].split())
PLAIN = ("quantization_config", "compression_config")  # objects that are replaced as a whole, though named like a part
SPELLINGS = ({"dtype", "torch_dtype"}, {"rope_parameters", "rope_scaling"})  # of one setting, old and new
MOST = 60  # characters of a value in a note


def overridden(raw: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoded config.json with other values: `given` replaces keys, and keys inside of parts (text_config).

    A key replaces the same setting in another spelling, too. `rope_scaling` over rope_parameters keeps their theta.
    """
    gone = {other for names in SPELLINGS for key in names & given.keys() for other in names - given.keys() - {key}}
    found = {key: value for key, value in raw.items() if key not in gone}
    for key, value in given.items():
        before, part = raw.get(key), key.endswith("_config") and key not in PLAIN
        both = part and isinstance(before, Mapping) and isinstance(value, Mapping)
        found[key] = overridden(dict(before or {}), value) if both else value
    inner, scaling = raw.get("rope_parameters"), given.get("rope_scaling")
    if isinstance(inner, Mapping) and "rope_theta" in inner and isinstance(scaling, Mapping):
        found["rope_scaling"] = {"rope_theta": given.get("rope_theta", inner["rope_theta"]), **scaling}
    return found


def check_overrides(given: Mapping[str, Any], reads: Collection[str], idle: Collection[str], inside: str) -> None:
    """Raise ConfigError for a key of `hf_overrides` that changes nothing.

    reads    keys that the family reads, beside those of every family
    idle     keys of config.json that are known and have no effect
    inside   key of the language model in a config.json of a model around it, such as text_config; "": there is none
    """
    own = given.get(inside) if inside else given
    names = {key: f"{inside}.{key}" if inside else key for key in (own if isinstance(own, Mapping) else ())}
    if inside:
        names |= {key: key for key in given if key != inside and key not in names}
    known = {*EVERY, *reads}
    for key, name in names.items():
        if key in known and (not inside or name != key or key in PLAIN or key == "tie_word_embeddings"):
            continue
        if key in known:
            raise ConfigError(f"hf_overrides: {key} of the language model is inside of {inside}: give it there.")
        if key in idle:
            raise ConfigError(f"hf_overrides: {name} changes nothing that inference computes: leave it out.")
        near = difflib.get_close_matches(key, sorted(known), n=2)
        meant = f" Did you mean {' or '.join(near)}?" if near else " See the keys of the model's config.json."
        raise ConfigError(f"hf_overrides: no key {name} is read for this model.{meant}")


def override_note(raw: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return the note of the changed values: "hf_overrides: rope_theta is 1e6, and not 1e4 as in config.json"."""
    return "hf_overrides, over config.json: " + ", ".join(_changes(raw, given, ""))


def _changes(raw: Mapping[str, Any], given: Mapping[str, Any], at: str) -> list[str]:
    found = list[str]()
    for key, value in given.items():
        before = raw.get(key)
        if key.endswith("_config") and key not in PLAIN and isinstance(value, Mapping) and isinstance(before, Mapping):
            found += _changes(before, value, f"{at}{key}.")
        else:
            was = f" in place of {_shown(before)}" if key in raw else ""
            found.append(f"{at}{key} {_shown(value)}{was}")
    return found


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= MOST else f"{text[: MOST - 4]} ..."
