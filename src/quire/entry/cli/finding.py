"""One thing that `quire doctor` found out."""

from typing import NamedTuple

OK, WARN, BAD = "ok", "warn", "bad"


class Finding(NamedTuple):
    """What was looked at, how bad it is ("ok", "warn", "bad"), what was found, and what to do about it."""

    name: str
    level: str
    text: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return self._asdict()
