"""Messages on standard error as a terminal shows them."""

import shutil
import sys
import textwrap


def wrapped(text: str, other: int | None = None) -> str:
    """Return a message with its lines broken between words, further parts of a line indented.

    other   characters of a line where standard error is no terminal; None: there the message stays as it is
    """
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else other
    if width is None:
        return text
    lines = (textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False) for line in text.splitlines())
    return "\n".join(part for line in lines for part in line)
