"""The result of a check of `quire doctor`."""

from typing import NamedTuple

OK, WARN, BAD = "ok", "warn", "bad"


class Finding(NamedTuple):
    """Result of a check: its name, its level ("ok", "warn", "bad"), the text and the fix."""

    name: str
    level: str
    text: str
    fix: str = ""
