"""Sources of option values: the command line, else the environment, else a file, else the default.

Knows precedence and origins. `option_parsers.py` knows the spellings of values, `flags.py` the flags.
"""

import difflib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any

from quire.config.env import PEER_OPTIONS, hf_token, option_texts, peer_texts, unknown_variables, variable
from quire.config.option_parsers import COUNTS, LIST, OWN_PARSERS, option_parser, read_value
from quire.config.peer_flags import (
    PEER_FLAGS,
    Given,
    PeerOutcome,
    abbreviated,
    file_peer_flag,
    given_peer_flags,
    judge,
    refuse,
)
from quire.contracts.errors import ConfigError

FLAG, ORIGIN = "option.", "origin."  # prefixes in the namespace: of values, of the flags that set them
CONFIG_FILE = "config_file"
SECRETS = {"api_key": "QUIRE_API_KEY or --api-key", "hf_token": "HF_TOKEN"}  # option -> where else it can be given
MASK = "***"  # stands for a secret that is not shown


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Values of the options that were given, the origin of each value, and notes about flags that have no effect."""

    values: dict[str, Any]
    origins: dict[str, str]
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  # of vLLM's flags, of a command that only plans

    def put(self, name: str, value: Any, origin: str) -> None:
        """Set an option, or replace its value. `origin` says where the value is from, such as "flag --port"."""
        self.values[name], self.origins[name] = value, origin

    def describe(self, options: Iterable[tuple[str, Field[Any]]]) -> str:
        """Return a --config file of `options`, pairs (section, option). Comments show origins; secrets are masked."""
        lines: list[str] = []
        for title, option in options:
            if f"# {title}" not in lines:
                lines += [""] * bool(lines) + [f"# {title}"]
            given = option.name in self.values
            value = self.values[option.name] if given else option.default
            origin = self.origins[option.name] if given else "default"
            line = f"{option.name.replace('_', '-')}: {'.inf' if value == math.inf else json.dumps(value)}"
            if option.name in SECRETS and value:
                line = f"{option.name.replace('_', '-')}: {json.dumps(MASK)}"
            lines.append(f"{line:<44} # {origin}")
        return "\n".join(lines)


def gather(
    namespace: Mapping[str, Any], options: Sequence[Field[Any]], own: Collection[str], planned: bool = False
) -> Settings:
    """Return the options set by a parsed command line, else by the environment, else by the --config file.

    namespace   values of the parsed command line, by name
    own         names of the options of this command; the environment sets no others
    planned     True: keep messages about refused vLLM flags in `Settings.refusals`
    Raises `ConfigError` for a value that does not parse, an unknown name, a refused vLLM flag, or two models.
    """
    by_name = {option.name: option for option in options}
    for name, near in unknown_variables(by_name).items():
        if near is not None:
            raise ConfigError(f"environment variable {name} is not known: did you mean {near}?")
    found = Settings(values={}, origins={})
    if token := hf_token():
        found.put("hf_token", token, "environment variable HF_TOKEN")
    path = namespace.get(CONFIG_FILE)
    in_file = _read_file(Path(path), by_name, found) if path else []
    given = given_peer_flags(namespace)
    below, above = judge(in_file, besides=given), judge(given)
    found.refusals.extend(below.refusals + above.refusals)
    refuse(() if planned else found.refusals)
    _put_aliases(found, below, by_name)
    _put_peer_texts(found, own, by_name)
    for name, text in option_texts(own).items():
        source = f"environment variable {variable(name)}"
        found.put(name, _parsed(by_name[name], text, source), source)
    _put_aliases(found, above, by_name)
    for place, value in namespace.items():
        if place.startswith(FLAG):
            name = place.removeprefix(FLAG)
            found.put(name, value, f"flag {namespace[ORIGIN + name]}")
    _name_model(namespace, found)
    _refuse_masks(found)
    found.notes.extend(below.notes + above.notes)
    return found


def from_keywords(given: Mapping[str, Any], options: Iterable[Field[Any]]) -> Settings:
    """Return the settings of keyword arguments. vLLM's names have the same effect as on a command line.

    Raises `ConfigError` for a refused argument. Unknown names are kept; the caller must check them.
    """
    by_name = {option.name: option for option in options}
    spelt = {spelling.replace("-", "_"): option.name for spelling, option in _spellings(by_name).items()}
    ours, theirs = {spelt.get(name, name): value for name, value in given.items()}, []
    if len(ours) < len(given):
        twice = next(name for name in given if name in spelt and name != spelt[name] and spelt[name] in given)
        raise ConfigError(f"{twice} and {spelt[twice]} are the same option: give one.")
    for name, value in given.items():
        flag = None if name in spelt else file_peer_flag(name.replace("_", "-"), False if value is None else value)
        if flag is not None:
            del ours[name]
            theirs += [] if value is None else [Given(flag.flag, name, flag.text)]
    outcome = judge(theirs)
    refuse(outcome.refusals)
    found = Settings(values={}, origins={}, notes=outcome.notes)
    _put_peer_texts(found, by_name, by_name)
    _put_aliases(found, outcome, by_name)
    for name, value in ours.items():
        listed = name in by_name and by_name[name].type in (LIST, COUNTS)
        if isinstance(value, str) and name in by_name and (listed or name in OWN_PARSERS):
            value = _parsed(by_name[name], value, f"argument {name}")
        several = isinstance(value, list) and listed
        found.put(name, tuple(value) if several else value, f"argument {name}")
    return found


def _put_peer_texts(found: Settings, own: Collection[str], by_name: Mapping[str, Field[Any]]) -> None:
    """Set the options that variables of vLLM name, see `PEER_OPTIONS`."""
    for name, text in peer_texts(own).items():
        source = f"environment variable {PEER_OPTIONS[name]}"
        found.put(name, _parsed(by_name[name], text, source), source)


def _refuse_masks(found: Settings) -> None:
    """Refuse a masked secret: a printed file does not hold the secret itself."""
    for name, elsewhere in SECRETS.items():
        if found.values.get(name) in (MASK, (MASK,)):
            key = name.replace("_", "-")
            raise ConfigError(
                f"{found.origins[name]}: {key}: {MASK} stands for a secret that is not shown: set "
                f"{elsewhere}, or delete the line."
            )


def _put_aliases(found: Settings, outcome: PeerOutcome, options: Mapping[str, Field[Any]]) -> None:
    for name, (value, spelling) in outcome.values.items():
        found.put(name, _parsed(options[name], value, spelling) if isinstance(value, str) else value, spelling)


def _parsed(option: Field[Any], text: str, source: str) -> Any:
    try:
        value = option_parser(option)(text)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}.") from None
    choices = option.metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(f"{source}: {value!r} is not one of {', '.join(choices)}.")
    return value


def _read_file(path: Path, options: Mapping[str, Field[Any]], found: Settings) -> list[Given]:
    """Put the options of a file into `found`; return the vLLM flags of the file."""
    peer: list[Given] = []
    spellings = _spellings(options)
    for key, value in _file_items(path).items():
        off = key.startswith("no-") and isinstance(value, bool) and key[3:] in spellings
        option = spellings.get(key[3:] if off else key)
        if option is not None and value == MASK and option.name in found.values:
            continue  # the file masks a secret that the environment holds
        if option is not None:
            try:
                found.put(option.name, read_value(option, not value if off else value), f"file {path}")
            except ValueError as error:
                raise ConfigError(f"--config {path}: {key}: {error}.") from None
            continue
        if key == "config":
            raise ConfigError(f"--config {path}: a file cannot name another: put all options into one.")
        theirs = file_peer_flag(key, value)
        if theirs is None:
            near = nearest(key, spellings)
            raise ConfigError(
                f"--config {path}: {key} is not known."
                + (f" Did you mean {near}?" if near else " `quire serve --help` lists the options.")
            )
        peer.append(Given(theirs.flag, f"{path}: {theirs.spelling}", theirs.text))
    return peer


def nearest(name: str, spellings: Iterable[str]) -> str:
    """Return the option or vLLM flag that a misspelt or abbreviated name means; "" for none."""
    near = difflib.get_close_matches(name, [*spellings, *(flag.name[2:] for flag in PEER_FLAGS)], n=1)
    return abbreviated(name) or (near[0] if near else "")


def _spellings(options: Mapping[str, Field[Any]]) -> dict[str, Field[Any]]:
    """Return key in a file -> option, for every spelling of the option's flag."""
    spelt = {name.replace("_", "-"): option for name, option in options.items()}
    extra = {flag[2:]: option for option in options.values() for flag in option.metadata["flags"]}
    return spelt | extra


def _name_model(namespace: Mapping[str, Any], found: Settings) -> None:
    """Set the option `model` from the positional argument MODEL."""
    positional = namespace.get("model_argument")
    if positional is not None:
        named = namespace.get(FLAG + "model", positional)
        if named != positional:
            raise ConfigError(f"two models are named, {positional!r} and --model {named!r}: name one.")
        found.put("model", positional, "argument MODEL")
    for name in ("served_model_name", "api_key"):
        taken = namespace.get(FLAG + name, ())
        if "model" not in found.values and len(taken) > 1 and "/" in taken[-1]:
            raise ConfigError(
                f"--{name.replace('_', '-')} takes every text that follows, and no model is named: put "
                f"the model first, or give it with --model."
            )


def _file_items(path: Path) -> dict[str, Any]:
    """Return key -> value of a file, in its order, with dashes for underscores.

    Raises `ConfigError` for a file that cannot be read, is not YAML, holds no mapping, or holds a key twice.
    """
    import yaml  # type: ignore[import-untyped]  # here: most commands read no file

    try:
        text = path.read_text(encoding="utf-8")
        value, tree = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: the file is not UTF-8 text: save it as UTF-8.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: the file is not YAML ({' '.join(str(error).split())}).") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"--config {path}: the file must hold one `option: value` per line.")
    keys = [str(key.value).replace("_", "-") for key, _ in tree.value]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ConfigError(f"--config {path}: {twice} appears twice: keep one line.")
    return {str(key).replace("_", "-"): item for key, item in value.items()}
