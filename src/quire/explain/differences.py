"""`quire explain --diff`: where two plans differ, as lines "path: one -> other". No torch.

Layers that differ alike are one line. Lists are compared place by place, lists of named parts by their names. Floors of
steps are left out: their number of requests follows from the memory, and `--cost` has them for any.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

NAMES = ("name", "where", "kind", "number")  # values that name a part of a list
ABSENT = "nothing"
Change = tuple[str, str, str]  # path, value of one plan, of the other


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[Change]:
    """Return the values that two described plans (`PlanReport.describe`) have not in common, in order of the plan."""
    return list(_folded(_changes("", _short(one), _short(other))))


def _short(plan: dict[str, Any]) -> dict[str, Any]:
    """Return a plan whose layers have their calls as a line, and weights without stored tensors."""
    return {key: value for key, value in plan.items() if key != "floors"} | {
        "layers": {
            layer["layer"]: layer
            | {
                "calls": ", ".join(call["function"].removeprefix("quire.kernels.") for call in layer["calls"]),
                "weights": {
                    weight["name"].removeprefix(f"layers.{layer['layer']}."): {
                        key: value for key, value in weight.items() if key not in ("name", "stored")
                    }
                    for weight in layer["weights"]
                },
            }
            for layer in plan["layers"]
        },
        "kernels": {" ".join((one["op"], *one["weights"])): one for one in plan["kernels"]},
    }


def _changes(path: str, one: Any, other: Any) -> Iterator[Change]:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        one, other = _keyed(one), _keyed(other)
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys((*one, *other)):
            yield from _changes(f"{path}.{key}" if path else str(key), one.get(key, ABSENT), other.get(key, ABSENT))
    elif one != other:
        yield path, _words(one), _words(other)


def _keyed(parts: Any) -> dict[str, Any]:
    """Return the parts of a list by name, or else by number."""
    name = next((key for key in NAMES if parts and all(isinstance(one, dict) and key in one for one in parts)), "")
    keys = [str(one[name]) for one in parts] if name else []
    if len(set(keys)) != len(parts):
        keys = [str(i) for i in range(len(parts))]
    return dict(zip(keys, parts, strict=True))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        named = next((str(value[key]) for key in (*NAMES, "function", "reason") if key in value), "")
        return named or ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if type(value) is int else str(value) or '""'


def _folded(changes: Iterator[Change]) -> Iterator[Change]:
    """Yield changes; those of neighbours in number ("layers.3.bytes") that are alike once, as "layers.0-47.bytes"."""

    def alike(change: Change) -> Change:
        return re.sub(r"\b\d+\b", "*", change[0], count=1), *change[1:]

    order: dict[Change, list[int]] = {}
    for change in changes:
        number = re.search(r"\b\d+\b", change[0])
        order.setdefault(alike(change), []).append(int(number[0]) if number else -1)
    for (path, one, other), numbers in order.items():
        yield path.replace("*", _ranges(numbers), 1), one, other


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers in words: "0-3,7"."""
    runs = [[n for _, n in group] for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
