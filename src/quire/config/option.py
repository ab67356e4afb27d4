"""`option`: the field of a dataclass that is an option of the engine or of the server."""

from dataclasses import field
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    least: float | None = None,
    above: float | None = None,
) -> Any:
    """Make a dataclass field that becomes a command-line flag `--field-name` with the default and the help text.

    help           "": --help and docs/flags.md do not show the flag
    flags          further spellings of the flag
    choices        allowed values; (): every value
    least, above   a number, or each number of a tuple, must be at least `least` and larger than `above`
    """
    return field(
        default=default, metadata={"help": help, "flags": flags, "choices": choices, "least": least, "above": above}
    )
