"""vLLM's flags: the meaning of each flag in Quire, and the effect of the flags that a user gave.

Knows argparse and the table in `peer_flags.txt`. Values of Quire's own options belong to `flags.py` and `sources.py`.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quire.contracts.errors import ConfigError
from quire.contracts.text_table import read_rows

MEANINGS = ("works", "alias", "no-op", "refused")  # of a vLLM flag in Quire; the table explains them
NARGS = {"switch": 0, "value": None, "list": "+"}  # kind of flag -> argparse's nargs; a switch has --no-flag, too
ON, OFF = "on", "off"
PEER = "peer."  # prefix of the names of vLLM's flags in the namespace
NOTHING = ("", "none", "null")  # values that never have an effect


@dataclass(frozen=True, kw_only=True)
class PeerFlag:
    """A vLLM flag and its meaning in Quire. `meaning` is one of MEANINGS, `takes` is a key of NARGS.

    neutral   values that ask for what Quire does anyway: accepted without a note, even if the flag is refused with
              other values. The values of a switch are ON and OFF
    idle      values of a refused flag that change something in vLLM and nothing in Quire: accepted with a note
    option, values   of an alias: the Quire option that it sets, and {vLLM's value: Quire's} ({}: equal values)
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
        """The main spelling of the flag."""
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
    """A vLLM flag as the user gave it: its main name, the spelling that was used, its value."""

    flag: str
    spelling: str
    text: str


@dataclass(kw_only=True)
class PeerOutcome:
    """Effect of the given vLLM flags.

    values            Quire option that a vLLM flag sets -> (value of the option, spelling of the flag)
    notes, refusals   a line for each flag that changes nothing, and a line for each refused flag
    """

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def add_peer_flags(parser: argparse.ArgumentParser) -> None:
    """Add to `parser` every vLLM flag in `peer_flags.txt` that the parser lacks. --help does not show these flags."""
    known = parser._option_string_actions
    for flag in PEER_FLAGS:
        names = [name for name in flag.names if name not in known]
        if flag.meaning == "works" or not names:
            continue
        if flag.takes == "switch":
            names += [f"--no-{name[2:]}" for name in names if name.startswith("--") and f"--no-{name[2:]}" not in known]
        parser.add_argument(
            *names,
            action=_Note,
            nargs=NARGS[flag.takes],
            dest=PEER + flag.name,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


class _Note(argparse.Action):
    """Stores (spelling, value) each time the flag is given; the value of a switch is ON or OFF."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, option: str | None = None) -> None:
        if self.nargs == 0:
            value = OFF if (option or "").startswith("--no-") else ON
        text = " ".join(value) if isinstance(value, list) else value
        setattr(namespace, self.dest, [*vars(namespace).get(self.dest, []), (option, text)])


def given_peer_flags(namespace: Mapping[str, Any]) -> list[Given]:
    """Return every vLLM flag in the namespace. Of a flag given several times, the last one counts."""
    return [Given(place.removeprefix(PEER), *given[-1]) for place, given in namespace.items() if place.startswith(PEER)]


def file_peer_flag(key: str, value: object) -> Given | None:
    """Return the vLLM flag that a key of a --config file names; None for other keys and flags that work in Quire."""
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
    """Return the effect of the vLLM flags in `given`. Flags that are also in `besides` are skipped: those win."""
    table = {flag.name: flag for flag in PEER_FLAGS}
    stronger = {other.flag for other in besides}
    outcome = PeerOutcome()
    for name, spelling, text in given:
        flag = table[name]
        if name in stronger:
            continue
        if flag.meaning == "alias":
            outcome.values[flag.option] = (flag.values.get(text, text), spelling)
        elif has_no_effect(flag, text):
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


def _refusal(flag: PeerFlag, spelling: str, text: str) -> str:
    return f"{spelling}{'' if flag.takes == 'switch' else f' {text}'}: {flag.why}"


def abbreviated(name: str) -> str:
    """Return the vLLM flag that `name` abbreviates: "tensor-parallel-size" for tp-size, because of -tp; "" for none."""
    short = f"-{name.partition('-')[0]}"
    return next((flag.name[2:] for flag in PEER_FLAGS if len(short) > 2 and short in flag.names), "")


def refuse(refusals: Sequence[str]) -> None:
    """Raise a `ConfigError` that joins these messages about refused flags; do nothing when there is none."""
    if refusals:
        raise ConfigError("; ".join(refusals) + ".")


def has_no_effect(flag: PeerFlag, text: str) -> bool:
    """True when `text`, as value of the flag, asks for what Quire does anyway (1 device, "auto", {})."""
    if flag.takes == "switch":
        return text in flag.neutral
    return text.lower() in NOTHING or _is_among(text, flag.neutral)


def _is_among(text: str, values: Sequence[str]) -> bool:
    """True when `text` is one of the values. Of an object, each key must be in a value, with the same item or "*"."""
    value, known = _plain(text), [_plain(one) for one in values]
    if not isinstance(value, dict):
        return text.lower() in values or value in known
    objects = [one for one in known if isinstance(one, dict)]
    return bool(objects) and all(
        any(one.get(key, ...) in (item, "*") for one in objects) for key, item in value.items()
    )


def _plain(text: str) -> Any:
    """Return the value of a JSON text, so that 1 equals 1.0 and {} equals { }. Other texts are returned unchanged."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
