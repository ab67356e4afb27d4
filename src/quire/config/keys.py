"""Readers of a key in config.json. A value that does not fit raises a `ModelError` with the key and the allowed values.
"""

from collections.abc import Callable, Mapping
from typing import Any

from quire.contracts.errors import ModelError

MAX_NUMBER = 1e30  # no setting of a checkpoint is larger, and float32 holds it
MAX_SIZE = 10**12  # no size or count is larger


def checked(keys: Mapping[str, Any], key: str, source: str, fits: Callable[[Any], bool], what: str,
            default: Any = None) -> Any:
    """Return keys[key] or `default`. Raises ModelError "{source}: ... must be {what}" unless fits(value)."""
    value = keys.get(key, default)
    if not fits(value):
        raise ModelError(f"{source}: {key}={value!r} must be {what}.")
    return value


def size(keys: Mapping[str, Any], key: str, source: str, default: int | None = None, *, most: int | None = None) -> int:
    """Return keys[key] or `default`, a positive integer of at most `most`. `source` names the file in errors."""
    if key not in keys and default is None:
        raise ModelError(f"{source}: {key} is missing: add it, a positive integer.")
    fits = lambda value: type(value) is int and 0 < value <= (most or MAX_SIZE)  # noqa: E731
    return int(checked(keys, key, source, fits, f"a positive integer{_bound(' of', most)}", default))


def count(keys: Mapping[str, Any], key: str, default: int | None, source: str, *,
          most: int | None = None) -> int | None:
    """Return keys[key] or `default`, an integer of at least 0 and at most `most`; None for null or false."""
    value: int | None = checked(
        keys,
        key,
        source,
        lambda value: value is None or value is False or (type(value) is int and 0 <= value <= (most or MAX_SIZE)),
        f"an integer of at least 0{_bound(' and', most)}, or null",
        default,
    )
    return None if value is False else value


def positive(keys: Mapping[str, Any], key: str, default: float | None, source: str) -> float:
    """Return keys[key] or `default`, a number above zero."""
    return float(checked(keys, key, source, lambda value: type(value) in (int, float) and 0 < value <= MAX_NUMBER,
                         "a positive number", default))


def flag(keys: Mapping[str, Any], key: str, source: str, default: bool = False) -> bool:
    """Return keys[key] or `default`, True or False; null is False."""
    return bool(checked(keys, key, source, lambda value: value is None or isinstance(value, bool), "true or false",
                        default))


def _bound(word: str, most: int | None) -> str:
    return "" if most is None else f"{word} at most {most}"


def names(keys: Mapping[str, Any], key: str, source: str) -> list[str]:
    """Return keys[key], a list of strings; empty when the key is missing or null."""
    def fits(value: Any) -> bool:
        return not value or (isinstance(value, list) and all(isinstance(name, str) for name in value))

    return list(checked(keys, key, source, fits, "a list of names") or ())
