"""Takes vLLM's flags from a command line or a file, and says what each given one comes to.

Knows argparse and the table of `peer_flags.py`; the values of our own options are `flags.py`'s and `sources.py`'s.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.config.peer_flags import OFF, ON, PEER_FLAGS, Meaning, PeerFlag, Takes
from quire.contracts.errors import ConfigError

PEER = "peer."  # of their names in the namespace
NOTHING = ("", "none", "null")  # values that never ask for anything


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
        if flag.meaning is Meaning.WORKS or not names:
            continue
        nargs = {Takes.SWITCH: 0, Takes.VALUE: None, Takes.LIST: "+"}[flag.takes]
        if flag.takes is Takes.SWITCH:
            names += [f"--no-{name[2:]}" for name in names if name.startswith("--") and f"--no-{name[2:]}" not in known]
        parser.add_argument(*names, action=_Note, nargs=nargs, dest=PEER + flag.name, default=argparse.SUPPRESS,
                            help=argparse.SUPPRESS)


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
        off = flag.takes is Takes.SWITCH and key == f"no-{flag.name[2:]}"
        if flag.meaning is Meaning.WORKS or (f"--{key}" not in flag.names and not off):
            continue
        if flag.takes is Takes.SWITCH:
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
        if flag.meaning is Meaning.ALIAS:
            outcome.values[flag.option] = (flag.values.get(text, text), spelling)
        elif flag.meaning is Meaning.NO_OP:
            outcome.notes.append(f"{spelling} changes nothing: {flag.why}.")
        elif not asks_nothing(flag, text):
            shown = "" if flag.takes is Takes.SWITCH else f" {text}"
            outcome.refusals.append(f"{spelling}{shown}: {flag.why}")
    return outcome


def refuse(refusals: Sequence[str]) -> None:
    """Raise the `ConfigError` that names every flag which cannot be met; nothing when there is none."""
    if refusals:
        raise ConfigError("; ".join(refusals) + ".")


def asks_nothing(flag: PeerFlag, text: str) -> bool:
    """Whether a refused flag's value is the one that changes nothing (1 device, "auto", {})."""
    if flag.takes is Takes.SWITCH:
        return text in flag.neutral
    return text.lower() in (*NOTHING, *flag.neutral) or _plain(text) in [_plain(value) for value in flag.neutral]


def _plain(text: str) -> Any:
    """The value of a JSON text, so that 1 and 1.0, {} and { } are the same; other texts as they are."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
