"""The flags of vLLM, which our users' launch lines hold: what each means here, and what the given ones come to.

Knows argparse and the table in `peer_flags.txt`; the values of our own options are `flags.py`'s and `sources.py`'s.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quire.contracts.errors import ConfigError
from quire.contracts.text_table import read_rows

MEANINGS = ("works", "alias", "no-op", "refused")  # what a flag of theirs does here; the table says more
NARGS = {"switch": 0, "value": None, "list": "+"}  # what follows a flag; a switch has --no-flag, too
ON, OFF = "on", "off"
PEER = "peer."  # of their names in the namespace
NOTHING = ("", "none", "null")  # values that never ask for anything


@dataclass(frozen=True, kw_only=True)
class PeerFlag:
    """One flag of theirs: one of MEANINGS, and what it takes, of NARGS.

    neutral   values with which the flag asks for nothing (ON and OFF for a switch)
    idle      further values of a refused flag that change nothing here
    option    of ours, that an alias sets; `values` maps theirs to ours (empty: the same texts)
    """

    names: tuple[str, ...]
    meaning: str
    takes: str = "value"
    why: str = ""
    neutral: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    option: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The main spelling."""
        return self.names[0]


def _read(path: Path) -> Iterator[PeerFlag]:
    for kind, flags, *rest in read_rows(path):
        meaning, _, takes = kind.partition(" ")
        why, last, idle = [*rest, "", "", ""][:3]
        settings: dict[str, Any] = {"meaning": meaning, "takes": takes or "value", "why": why}
        if meaning == "alias":
            option, _, values = last.partition(" ")
            settings |= {"option": option, "values": json.loads(values or "{}")}
        else:
            default = (OFF,) if kind == "refused switch" else ()
            settings["neutral"] = tuple(last.split(", ")) if last else default
            settings["idle"] = tuple(idle.split(", ")) if idle else ()
        for names in flags.split():
            yield PeerFlag(names=tuple(names.split("/")), **settings)


PEER_FLAGS = tuple(_read(Path(__file__).with_suffix(".txt")))


class Given(NamedTuple):
    """One of their flags as it was given: its name in the table, how it was spelt, its value."""

    flag: str
    spelling: str
    text: str


@dataclass(kw_only=True)
class PeerOutcome:
    """What the given ones come to.

    values    our options that aliases set, by name: the value (a text, or what the table maps it to), where from
    notes     a line for each that changes nothing;  refusals  a line for each that cannot be met
    """

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def add_peer_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of the table that the parser lacks, without a line in its help."""
    known = parser._option_string_actions
    for flag in PEER_FLAGS:
        names = [name for name in flag.names if name not in known]
        if flag.meaning == "works" or not names:
            continue
        if flag.takes == "switch":
            names += [f"--no-{name[2:]}" for name in names if name.startswith("--") and f"--no-{name[2:]}" not in known]
        parser.add_argument(*names, action=_Note, nargs=NARGS[flag.takes], dest=PEER + flag.name,
                            default=argparse.SUPPRESS, help=argparse.SUPPRESS)


class _Note(argparse.Action):
    """Keeps (spelling, value) of every time the flag is given; a switch's value is ON or OFF."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, option: str | None = None) -> None:
        if self.nargs == 0:
            value = OFF if (option or "").startswith("--no-") else ON
        text = " ".join(value) if isinstance(value, list) else value
        setattr(namespace, self.dest, [*vars(namespace).get(self.dest, []), (option, text)])


def given_peer_flags(namespace: Mapping[str, Any]) -> list[Given]:
    """Every one in the namespace; the last, of those given several times."""
    return [Given(place.removeprefix(PEER), *given[-1]) for place, given in namespace.items() if place.startswith(PEER)]


def file_peer_flag(key: str, value: object) -> Given | None:
    """A key of a file as one of their flags; None when it is none, or one that we have."""
    for flag in PEER_FLAGS:
        off = flag.takes == "switch" and key == f"no-{flag.name[2:]}"
        if flag.meaning == "works" or (f"--{key}" not in flag.names and not off):
            continue
        if flag.takes == "switch":
            if not isinstance(value, bool):
                raise ConfigError(f"{key}: must be true or false, not {value!r}.")
            return Given(flag.name, key, ON if value is not off else OFF)
        if isinstance(value, list):
            return Given(flag.name, key, " ".join(map(str, value)))
        return Given(flag.name, key, json.dumps(value) if isinstance(value, dict) else str(value))
    return None


def judge(given: Iterable[Given], *, besides: Iterable[Given] = ()) -> PeerOutcome:
    """What flags of theirs come to here, but for those that are also among `besides`, which win."""
    table = {flag.name: flag for flag in PEER_FLAGS}
    stronger = {other.flag for other in besides}
    outcome = PeerOutcome()
    for name, spelling, text in given:
        flag = table[name]
        if name in stronger:
            continue
        if flag.meaning == "alias":
            outcome.values[flag.option] = (flag.values.get(text, text), spelling)
        elif asks_nothing(flag, text):
            continue
        elif flag.meaning == "no-op":
            outcome.notes.append(f"{spelling} changes nothing: {flag.why}.")
        else:
            shown = spelling if flag.takes == "switch" else f"{spelling} {text}"
            if _is_among(text, (*flag.neutral, *flag.idle)):
                outcome.notes.append(f"{shown} changes nothing: {flag.why}.")
            else:
                outcome.refusals.append(_refusal(flag, spelling, text))
    return outcome


def refusal(spelling: str, text: str) -> str:
    """The words with which one flag is refused or ignored for its value (ON or OFF of a switch); "" where it works."""
    flag = next((flag for flag in PEER_FLAGS if spelling in flag.names and flag.meaning in ("refused", "no-op")), None)
    if flag is None or asks_nothing(flag, text) or _is_among(text, (*flag.neutral, *flag.idle)):
        return ""
    return _refusal(flag, spelling, text)


def _refusal(flag: PeerFlag, spelling: str, text: str) -> str:
    return f"{spelling}{'' if flag.takes == 'switch' else f' {text}'}: {flag.why}"


def abbreviated(name: str) -> str:
    """The flag whose short form a name begins with: tp-size is tensor-parallel-size, because of -tp; "" for none."""
    short = f"-{name.partition('-')[0]}"
    return next((flag.name[2:] for flag in PEER_FLAGS if len(short) > 2 and short in flag.names), "")


def refuse(refusals: Sequence[str]) -> None:
    """Raise the `ConfigError` that names every flag which cannot be met; nothing when there is none."""
    if refusals:
        raise ConfigError("; ".join(refusals) + ".")


def asks_nothing(flag: PeerFlag, text: str) -> bool:
    """True for a value of a flag that asks for nothing (1 device, "auto", {})."""
    if flag.takes == "switch":
        return text in flag.neutral
    return text.lower() in NOTHING or _is_among(text, flag.neutral)


def _is_among(text: str, values: Sequence[str]) -> bool:
    """True for one of some values; for an object whose every key is in one, with its value or with "*"."""
    value, known = _plain(text), [_plain(one) for one in values]
    if not isinstance(value, dict):
        return text.lower() in values or value in known
    objects = [one for one in known if isinstance(one, dict)]
    return bool(objects) and all(any(one.get(key, ...) in (item, "*") for one in objects)
                                 for key, item in value.items())


def _plain(text: str) -> Any:
    """The value of a JSON text, so that 1 and 1.0, {} and { } are the same; other texts as they are."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
