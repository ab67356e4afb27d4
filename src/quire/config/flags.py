"""Command-line flags, derived from the dataclasses of `engine.py`; values not given come from the environment.

Every option is `--its-name` (underscores work, too) and QUIRE_ITS_NAME. Knows argparse; never imports torch.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import Field, fields
from typing import Any, NoReturn

from quire.config.engine import EngineConfig, flat_names
from quire.config.env import environment_warnings, hf_token, option_texts, variable
from quire.contracts.errors import ConfigError

PREFIX = "engine."  # of our names in the namespace, so that no other flag of a command is taken for an option
SIZE = re.compile(r"(-?\d+(?:\.\d+)?)(?:([kKmMgGtT])(i?)B?)?")
POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
AUTO = ("auto", "-1")  # spellings of "not set" for max_model_len


def parse_size(text: str) -> int:
    """A whole number, with a suffix if you like: 32k = 32,000, 32K = 32Ki = 32,768; also m/M, g/G, t/T.

    Raises ValueError for anything else, a fraction of one included.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no whole number such as 32768, 32k (32,000) or 32K (32,768)")
    number, suffix, binary = match.groups()
    base = 1024 if suffix and (suffix.isupper() or binary) else 1000
    value = float(number) * base ** POWERS[suffix.lower()] if suffix else float(number)
    if value != int(value) or ("." in number and not suffix):
        raise ValueError(f"{text!r} is no whole number")
    return int(value) if suffix else int(number)


def parse_number(text: str) -> float:
    """A number; raises ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None


def parse_bool(text: str) -> bool:
    """1, true, yes, on or 0, false, no, off; raises ValueError."""
    if text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    raise ValueError(f"{text!r} is neither {'/'.join(TRUE)} nor {'/'.join(FALSE)}")


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object; raises ValueError."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is no JSON object such as {{\"temperature\": 0.5}}")
    return value


def parse_length(text: str) -> int | None:
    """A context length: a size, or -1 or auto for the longest that the model and the memory allow (None)."""
    return None if text in AUTO else parse_size(text)


PARSERS: dict[Any, Callable[[str], Any]] = {
    bool: parse_bool, str: str, str | None: str, int: parse_size, int | None: parse_size, float: parse_number,
    dict[str, Any] | None: parse_object}
METAVARS: dict[Any, str] = {str: "TEXT", str | None: "TEXT", int: "N", int | None: "N", float: "X",
                             dict[str, Any] | None: "JSON"}


def option_parser(option: Field[Any]) -> Callable[[str], Any]:
    """From a text to the option's value; raises ValueError."""
    return parse_length if option.name == "max_model_len" else PARSERS[option.type]


class FlagParser(argparse.ArgumentParser):
    """Takes underscores for dashes in flags, no abbreviations, and answers a misspelt flag with the nearest name."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(_with_dashes(sys.argv[1:] if args is None else args), namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        self.exit(2, f"quire: error: {message} (`{self.prog} --help` lists the flags)\n")

    def _unknown(self, unknown: list[str]) -> str:
        flag = next((u.partition("=")[0] for u in unknown if u.startswith("-")), None)
        if flag is None:
            return f"unexpected argument {unknown[0]!r}."
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
        return f"unknown flag {flag}." + (f" Did you mean {near[0]}?" if near else "")


def _with_dashes(args: Sequence[str]) -> list[str]:
    changed: list[str] = []
    for i, arg in enumerate(args):
        if arg == "--":
            return changed + list(args[i:])
        name, equals, value = arg.partition("=")
        changed.append(name.replace("_", "-") + equals + value if name.startswith("--") else arg)
    return changed


def engine_options() -> Iterator[tuple[str, Field[Any]]]:
    """(title of the component, field) of every option, in order."""
    for part in fields(EngineConfig):
        component: Any = type(part.default)
        title = (component.__doc__ or component.__name__).splitlines()[0].rstrip(".")
        for option in fields(component):
            yield title, option


def add_engine_flags(parser: argparse.ArgumentParser, *, only: Collection[str] = (),
                     skip: Collection[str] = ()) -> None:
    """Add a flag per option (`only` some, or all but `skip`). What is not given does not appear in the namespace."""
    groups: dict[str, Any] = {}
    for title, option in engine_options():
        if option.name in skip or (only and option.name not in only):
            continue
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        names = (f"--{option.name.replace('_', '-')}", *option.metadata["flags"])
        settings: dict[str, Any] = {"dest": PREFIX + option.name, "default": argparse.SUPPRESS, "help": _help(option)}
        if option.type is bool:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **settings)
        elif option.metadata["choices"]:
            group.add_argument(*names, choices=option.metadata["choices"], **settings)
        else:
            metavar = METAVARS.get(option.type)
            group.add_argument(*names, type=_reporting(option_parser(option)), metavar=metavar, **settings)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the model as a positional argument; `--model` of the engine flags means the same."""
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", default=None,
                        help="model folder or hub id (default: the bundled quire-tiny)")


def given_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Options as flat names, those that were given as flags or in the environment (flags win).

    Raises `ConfigError` when the environment holds a value that does not parse, or two different models are named.
    """
    options: dict[str, Any] = {}
    by_name = {option.name: option for _, option in engine_options()}
    for name, text in option_texts(by_name).items():
        try:
            options[name] = option_parser(by_name[name])(text)
        except ValueError as error:
            raise ConfigError(f"environment variable {variable(name)}: {error}.") from None
    if token := hf_token():
        options.setdefault("hf_token", token)
    flags = {name.removeprefix(PREFIX): v for name, v in vars(namespace).items() if name.startswith(PREFIX)}
    positional = vars(namespace).get("model_argument")
    if positional is not None and flags.setdefault("model", positional) != positional:
        raise ConfigError(f"two models are named, {positional!r} and --model {flags['model']!r}: name one.")
    return options | flags


def engine_config(namespace: argparse.Namespace) -> EngineConfig:
    """The configuration that a command line and the environment ask for; raises `ConfigError`."""
    return EngineConfig.from_flat(**given_options(namespace))


def option_warnings() -> list[str]:
    """Lines about environment variables that are not read and look as if they should be."""
    return environment_warnings(flat_names())


def describe_engine_flags() -> str:
    """The engine flags as help text, grouped by component."""
    parser = FlagParser(prog="quire", add_help=False, usage=argparse.SUPPRESS)
    add_engine_flags(parser)
    return parser.format_help().strip()


def _help(option: Field[Any]) -> str:
    text: str = option.metadata["help"].replace("%", "%%")
    if option.default in (None, "") or "(default" in text:
        return text
    default: Any = option.default
    return f"{text} (default: {('off', 'on')[default] if option.type is bool else default})"


def _reporting(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
