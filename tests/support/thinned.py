"""Parts of products of test rows: `thinned(KINDS, CALLS)` is a third of all pairs, and all of them with --full."""

import itertools
from collections.abc import Iterable
from typing import Any

from .full import FULL


def thinned(*axes: Iterable[Any], every: int = 3) -> list[tuple[Any, ...]]:
    """Return rows of a product, whose places in their axes add up to a multiple of `every`. No value is left out.

    A row of an axis of tuples holds their parts: `thinned(KINDS, [(1, 256), (9, 200)])` has rows of three values.
    """
    values = [list(axis) for axis in axes]
    every = 1 if FULL else every
    kept = [places for places in itertools.product(*(range(len(some)) for some in values)) if sum(places) % every == 0]
    for axis, some in enumerate(values):
        assert {places[axis] for places in kept} == set(range(len(some))), "a value of an axis would be left out"
    return [
        tuple(itertools.chain(*(_parts(some[place]) for some, place in zip(values, row, strict=True)))) for row in kept
    ]


def _parts(value: Any) -> tuple[Any, ...]:
    """Return the parts of a plain tuple, and anything else as the only part."""
    return value if type(value) is tuple else (value,)
