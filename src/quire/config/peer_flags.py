"""The flags of vLLM, which our users' launch lines hold: what each one means here, as `peer_flags.txt` tells it.

Knows the form of that table; `peer_args.py` takes the flags from a command line or a file.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from quire.config.text_table import read_rows


class Meaning(StrEnum):
    """What a flag of theirs does here."""

    WORKS = "works"
    ALIAS = "alias"
    NO_OP = "no-op"
    REFUSED = "refused"


class Takes(StrEnum):
    """What follows a flag: nothing (and --no-flag exists), one value or several."""

    SWITCH = "switch"
    VALUE = "value"
    LIST = "list"


ON, OFF = "on", "off"


@dataclass(frozen=True, kw_only=True)
class PeerFlag:
    """One flag of theirs.

    neutral   values with which a refused flag asks for nothing (ON and OFF for a switch)
    option    of ours, that an alias sets; `values` maps theirs to ours (empty: the same texts)
    """

    names: tuple[str, ...]
    meaning: Meaning
    takes: Takes = Takes.VALUE
    why: str = ""
    neutral: tuple[str, ...] = ()
    option: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The main spelling."""
        return self.names[0]


def _read(path: Path) -> Iterator[PeerFlag]:
    for kind, flags, *rest in read_rows(path):
        meaning, _, takes = kind.partition(" ")
        why, last = [*rest, "", ""][:2]
        settings: dict[str, Any] = {"takes": Takes(takes or "value"), "why": why}
        if meaning == Meaning.ALIAS:
            option, _, values = last.partition(" ")
            settings |= {"option": option, "values": json.loads(values or "{}")}
        elif meaning == Meaning.REFUSED:
            default = (OFF,) if takes == Takes.SWITCH else ()
            settings["neutral"] = tuple(last.split(", ")) if last else default
        for names in flags.split():
            yield PeerFlag(names=tuple(names.split("/")), meaning=Meaning(meaning), **settings)


PEER_FLAGS = tuple(_read(Path(__file__).with_suffix(".txt")))
