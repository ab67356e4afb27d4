"""Covers of a product: few rows in which every pair of values occurs."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows in which every possible pair of values of two factors occurs; greedy, and the same every time.

    possible   False for a row, or for a part of one, that cannot be
    """
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i, x in enumerate(factors[a])
        for j, y in enumerate(factors[b])
        if possible({a: x, b: y})
    }
    rows = []
    while missing:
        picked: dict[str, int] = dict(min(missing))
        for name in [n for n in names if n not in picked]:
            options = [{**picked, name: index} for index in range(len(factors[name]))]
            allowed = [option for option in options if possible(values(factors, option))]
            picked = max(allowed, key=lambda option: len(missing & pairs(names, option)))  # noqa: B023
        missing -= pairs(names, picked)
        rows.append(values(factors, picked))
    return rows


def pairs(names: Sequence[str], picked: Mapping[str, int]) -> set[Any]:
    return set(itertools.combinations([(n, picked[n]) for n in names if n in picked], 2))


def values(factors: Mapping[str, Sequence[Any]], picked: Mapping[str, int]) -> Row:
    return {name: factors[name][picked[name]] for name in factors if name in picked}


def label(row: Row) -> str:
    return "-".join(str(v).replace(" ", "") for v in row.values())
