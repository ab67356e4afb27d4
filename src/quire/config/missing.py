"""Features that `quire explain` can plan and the engine cannot run yet, with the error messages of `quire serve`.

The table of flags decides; a feature leaves this list when the table accepts it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.config.peer_flags import refusal
from quire.config.placement import Parallel
from quire.contracts.errors import UnsupportedModel


class Missing(NamedTuple):
    """A feature that is not implemented, and the error message of `quire serve` about its flag."""

    feature: str
    reason: str


def missing_features(parallel: Parallel) -> tuple[Missing, ...]:
    """Return the features that this kind of parallelism needs and that Quire does not have yet."""
    asked = (("data parallelism", "-dp", str(parallel.dp)),)
    found = [(f"{feature} ({flag} {text})", refusal(flag, text)) for feature, flag, text in asked]
    return tuple(Missing(feature, f"{reason.removesuffix('.')}.") for feature, reason in found if reason)


def check_missing(missing: Sequence[Missing]) -> None:
    """Raise UnsupportedModel with the reason of the first missing feature; do nothing when there is none."""
    if missing:
        raise UnsupportedModel(missing[0].reason)


def not_runnable(missing: Iterable[str]) -> str:
    """Return the sentence "Not runnable yet: ..." that names these missing features; "" when there is none."""
    *most, last = missing or [""]
    words = f"{', '.join(most)} and {last} are" if most else f"{last} is"
    return last and f"Not runnable yet: {words} not implemented; the plan below is what it would be."
