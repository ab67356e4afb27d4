"""Command-line flags, derived from the dataclasses of `engine.py` and `serve.py`.

Every option is `--its-name` (underscores work, too). `sources.py` knows the other sources of values. Knows argparse;
never imports torch.
"""

import argparse
import difflib
import json
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn

from quire.config.engine import EngineConfig, flat_names
from quire.config.env import environment_warnings
from quire.config.option_parsers import COUNTS, LIST, METAVARS, option_parser, parse_counts, parse_item
from quire.config.peer_flags import abbreviated
from quire.config.serve import ServerConfig, server_names, server_parts
from quire.config.sources import FLAG, ORIGIN, Settings, from_keywords, gather, nearest
from quire.contracts.errors import ConfigError
from quire.contracts.text_table import read_rows

LOG = logging.getLogger("quire")
Options = Iterator[tuple[str, Field[Any]]]
IDLE_OFFLINE = ("disable_log_stats", "served_model_name")  # options of a server that have no effect in `LLM`
SERVED = ("restart",)  # options of an engine that only a server has, and that the plan of an engine knows
ARGUMENTS: dict[str, dict[str, Any]] = {  # kind of value in a table of flags -> settings for argparse
    "switch": {"action": "store_true"},
    "text": {},
    "int": {"type": int},
    "float": {"type": float},
    "json": {"type": json.loads},
    "file": {"type": Path},
    "again": {"action": "append"},
    "several": {"nargs": "+", "action": "extend"},
}

ALIKE = 0.7  # likeness of flags, without their dashes, from which on one is taken for the other


class FlagParser(argparse.ArgumentParser):
    """Parser that accepts underscores in flags, takes no abbreviations, and suggests the nearest flag for an error.

    configure   adds the arguments; called before the first parsing, or by `complete`
    elsewhere   flags that this command lacks -> the way to the same end, for the error; "": arguments without a flag
    `--help=TEXT` shows only the flags that mention the text. Flags like `--name.key value` become one JSON object.
    """

    def __init__(
        self, *, configure: Callable[["FlagParser"], None] | None = None, add_help: bool = True, **settings: Any
    ) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False, **settings
        )
        self._configure = configure
        self.elsewhere: Mapping[str, str] = {}
        if add_help:
            self.add_argument(
                "-h",
                "--help",
                action=_Help,
                nargs="?",
                metavar="TEXT",
                default=argparse.SUPPRESS,
                help="show this, or with --help=TEXT the flags that mention the text",
            )

    def complete(self) -> "FlagParser":
        """Add all arguments and return the parser itself."""
        configure, self._configure = self._configure, None
        if configure is not None:
            configure(self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self.complete()
        texts = with_dashes(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args(with_objects(texts), namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with code 2."""
        message = message.replace("ignored explicit argument", "it takes no value, but here is")
        self.exit(2, f"quire: error: {message} (`{self.prog} --help` lists the flags)\n")

    def actions(self) -> list[argparse.Action]:
        """Return every argument that `complete` has added."""
        return list(self.complete()._actions)

    def _unknown(self, unknown: list[str]) -> str:
        flag = next((u.partition("=")[0] for u in unknown if u.startswith("-")), None)
        if flag is None:
            return f"unexpected argument {unknown[0]!r}" + (f": {self.elsewhere['']}." if "" in self.elsewhere else ".")
        if flag in self.elsewhere:
            return f"unknown flag {flag}: {self.elsewhere[flag]}."
        bare = flag.lstrip("-")
        known, whole = self._option_string_actions, abbreviated(bare)
        words = {one.lstrip("-"): one for one in known}
        longer = [one for one in words if one.startswith(f"{bare}-")]
        close = [words[one] for one in longer[:1] or difflib.get_close_matches(bare, words, 1, ALIKE)]
        near = [f"--{whole}"] if f"--{whole}" in known else [] if whole else close
        return f"unknown flag {flag}." + (f" Did you mean {near[0]}?" if near else "")


class _Help(argparse.Action):
    """Prints the whole help, or only the flags that mention a text."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, text: Any, option: str | None = None) -> None:
        if text is not None:
            _keep_mentions(parser, str(text).lower())
        parser.print_help()
        parser.exit()


def _keep_mentions(parser: argparse.ArgumentParser, text: str) -> None:
    for group in parser._action_groups:
        whole = text in (group.title or "").lower()
        for action in group._group_actions:
            said = f"{' '.join(action.option_strings)} {action.help}".lower().replace("_", "-")
            if not whole and text.replace("_", "-") not in said and action.help is not None:
                action.help = argparse.SUPPRESS
    parser.usage = argparse.SUPPRESS


def with_dashes(args: Sequence[str]) -> list[str]:
    """Return the command line with dashes for underscores in the names of flags."""
    changed: list[str] = []
    for i, arg in enumerate(args):
        if arg == "--":
            return changed + list(args[i:])
        name = re.split(r"[=.]", arg, maxsplit=1)[0] if arg.startswith("--") else ""
        changed.append(name.replace("_", "-") + arg[len(name) :])
    return changed


def with_objects(args: Sequence[str]) -> list[str]:
    """Return the command line with `--name.a.b 1 --name.c x` written as `--name {"a": {"b": 1}, "c": "x"}`."""
    changed: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    places: dict[str, int] = {}
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        flag, _, path = name.partition(".")
        if arg == "--":
            changed += ["--", *rest]
        elif not path or not flag.startswith("-") or flag[1:2].isdigit():
            changed.append(arg)
        else:
            if flag not in places:
                places[flag] = len(changed)
                changed.append(flag)
            *outer, last = path.split(".")
            inner = objects.setdefault(flag, {})
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = _json_or_text(value if equals else next(rest, ""))
    for flag, place in places.items():
        changed[place] = f"{flag}={json.dumps(objects[flag])}"
    return changed


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def options_of(*components: type) -> Options:
    """Yield (title of the group in --help, field) for every option of these dataclasses, in order."""
    for component in components:
        title = (component.__doc__ or component.__name__).splitlines()[0].rstrip(".")
        for option in fields(component):
            yield title, option


def engine_options() -> Options:
    """Yield (title of the group in --help, field) for every option of the engine, in order."""
    return options_of(*(type(part.default) for part in fields(EngineConfig)))


def server_options() -> Options:
    """Yield (title of the group in --help, field) for every option of a server, the engine's first."""
    yield from engine_options()
    yield from options_of(*server_parts().values())


def flag_names(option: Field[Any]) -> tuple[str, ...]:
    """Return the spellings of an option's flag, the main one first."""
    return (f"--{option.name.replace('_', '-')}", *option.metadata["flags"])


def add_engine_flags(
    parser: argparse.ArgumentParser, *, only: Collection[str] = (), skip: Collection[str] = ()
) -> None:
    """Add a flag per option (`only` some, or all but `skip`). Flags that are not given stay out of the namespace."""
    add_flags(parser, ((t, o) for t, o in engine_options() if o.name not in skip and (not only or o.name in only)))


def add_flags(parser: argparse.ArgumentParser, options: Options) -> None:
    """Add a flag per option, grouped by title. A spelling that the parser has already keeps its old meaning."""
    groups: dict[str, Any] = {}
    for title, option in options:
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        names = (name for name in flag_names(option) if name not in parser._option_string_actions)
        group.add_argument(*names, **flag_settings(option), help=_help(option))


def add_flag_table(
    parser: argparse.ArgumentParser, path: Path, prefix: str = "", *, skip: Collection[str] = ()
) -> None:
    """Add the flags listed in the text file `path`, which are not engine options. Rows of the file:

        --flag --other-spelling | key of ARGUMENTS and metavar, or the choices | default in JSON, - for none | help
        title of the group that begins here

    prefix   begins the flags' names in the namespace; with a prefix, flags that are not given stay out of the namespace
    skip     flags of the table that the command lacks, or has with another meaning
    """
    group: Any = parser
    for flags, *cells in read_rows(path):
        if not cells:
            group = parser.add_argument_group(flags)
            continue
        if flags.split()[0] in skip:
            continue
        (kind, *names), default, text = cells[0].split(), cells[1], cells[2]
        settings = dict(ARGUMENTS.get(kind, {"choices": [kind, *names]}))
        if kind in ARGUMENTS and names:
            settings["metavar"] = names[0]
        if prefix:
            settings |= {"dest": prefix + flags.split()[0][2:].replace("-", "_"), "default": argparse.SUPPRESS}
        elif default != "-":
            settings["default"] = Path(json.loads(default)) if kind == "file" else json.loads(default)
        group.add_argument(*flags.split(), **settings, help=text)


def flag_settings(option: Field[Any]) -> dict[str, Any]:
    """Return the keyword arguments of argparse's `add_argument` for an option, without its help."""
    settings: dict[str, Any] = {"dest": FLAG + option.name, "default": argparse.SUPPRESS}
    if option.type is bool:
        return settings | {"action": _Switch, "nargs": 0}
    if option.type in (LIST, COUNTS):
        parse = reporting(parse_item if option.type == LIST else parse_counts)
        return settings | {"action": _Extend, "type": parse, "nargs": "+", "metavar": METAVARS[option.type]}
    if option.metadata["choices"]:
        return settings | {
            "action": _Keep,
            "type": reporting(option_parser(option)),
            "choices": option.metadata["choices"],
        }
    settings |= {"action": _Keep, "type": reporting(option_parser(option)), "metavar": METAVARS[option.type]}
    return settings | {"action": _KeepToken, "nargs": "?"} if option.name == "hf_token" else settings


class _Keep(argparse.Action):
    """Stores the value and the spelling of the flag that set it."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, value)
        setattr(namespace, ORIGIN + self.dest.removeprefix(FLAG), option)


class _KeepToken(_Keep):
    """Stores the token. Without a value the flag has no effect: the environment's or the hub's stored token is used."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, option: str | None = None) -> None:
        if value is not None:
            super().__call__(parser, namespace, value, option)


class _Switch(_Keep):
    """Stores True for `--name`, False for `--no-name`."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        negated = [f"--no-{name[2:]}" for name in option_strings if name.startswith("--")]
        super().__init__([*option_strings, *negated], dest, **settings)

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, option: str | None = None) -> None:
        super().__call__(parser, namespace, not (option or "").startswith("--no-"), option)


class _Extend(_Keep):
    """Collects several values after a flag, or the flag given several times. A value is an item or a JSON list."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, option: str | None = None) -> None:
        items = tuple(item for some in value for item in some)
        super().__call__(parser, namespace, (vars(namespace).get(self.dest) or ()) + items, option)


def add_model_argument(parser: argparse.ArgumentParser, default: str = "the bundled quire-tiny") -> None:
    """Add the model as a positional argument. The engine flag `--model` means the same.

    default   words for the model that is used when none is named
    """
    parser.add_argument(
        "model_argument", metavar="MODEL", nargs="?", default=None, help=f"model folder or hub id (default: {default})"
    )


def settings_of(namespace: argparse.Namespace, *, server: bool = False, planned: bool = False) -> Settings:
    """Return the settings of the command line, the environment and the --config file. Raises `ConfigError`.

    server   True: environment variables of server options count; False: only those of engine options
    planned  see `gather`
    """
    options = list(server_options())
    own = {option.name for _, option in (server_options() if server else engine_options())}
    return gather(vars(namespace), [option for _, option in options], own, planned)


def given_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return option name -> value of each given option. Flags win over the environment, which wins over --config.

    Raises `ConfigError` when a value in the environment does not parse, or two different models are named.
    """
    return settings_of(namespace).values


def engine_config(namespace: argparse.Namespace) -> EngineConfig:
    """Return the configuration from the command line, the environment and the --config file. Raises `ConfigError`."""
    return EngineConfig.from_flat(**given_options(namespace))


def keyword_config(model: str, given: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration for the arguments of `LLM` or `AsyncLLM`. Raises `ConfigError` for a wrong argument."""
    settings = from_keywords(given, [option for _, option in engine_options()])
    of_server = [option for _, option in server_options() if option.name in SERVED or option.name not in flat_names()]
    for option in [option for option in of_server if option.name in settings.values]:
        value = settings.values.pop(option.name)
        if value in (None, option.default):
            continue
        if option.name in IDLE_OFFLINE:
            settings.notes.append(f"{option.name} changes nothing here: only a server uses it.")
        else:
            raise ConfigError(
                f"Quire has no option {option.name!r} here: it belongs to the server. Use `quire serve`, "
                "or leave it out."
            )
    for name in settings.values.keys() - server_names().keys():
        near = nearest(name.replace("_", "-"), (key.replace("_", "-") for key in server_names())).replace("-", "_")
        raise ConfigError(
            f"Quire has no option {name!r}. "
            + (f"Did you mean {near!r}?" if near else "`quire serve --help` lists what there is.")
        )
    for note in settings.notes:
        LOG.warning("%s", note)
    return EngineConfig.from_flat(model=model, **settings.values)


def server_config(settings: Settings) -> ServerConfig:
    """Return the checked configuration of a server with these settings. Raises `ConfigError`."""
    return ServerConfig.from_flat(**settings.values)


def error_text(error: BaseException) -> str:
    """Return the message of an error in one line, or in a line for each of several reasons ("- ...").

    In a `ConfigError`, option names are written as flags.
    """
    text = "\n- ".join(" ".join(part.split()) for part in str(error).split("\n- "))
    if not isinstance(error, ConfigError):
        return text
    names = sorted(server_names())
    words = "|".join(name for name in names if "_" in name)  # names without "_" mean an option only before "="
    option = rf"(?<![\w./'\"?&(-])(?:(?:{'|'.join(names)})(?==)|(?:{words})(?!\w|[./-]\w))"
    return re.sub(option, lambda found: "--" + found[0].replace("_", "-"), text)


def option_warnings() -> list[str]:
    """Return warnings about environment variables that look meant for Quire and are not read."""
    return environment_warnings(server_names())


def _help(option: Field[Any]) -> str:
    text: str = option.metadata["help"].replace("%", "%%")
    if option.default in (None, "", ()) or "(default" in text:
        return text
    default: Any = option.default
    return f"{text} (default: {('off', 'on')[default] if option.type is bool else default})"


def reporting(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap `parse` so that argparse shows the text of its ValueError to the user."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
