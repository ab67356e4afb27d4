"""The keys of a JSON object in a file of a checkpoint, read with errors that name the file, the key and its values."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quire.contracts.errors import ModelError, UnsupportedModel

MAX_NUMBER = 1e30  # no setting of a checkpoint is larger, and float32 holds it
MAX_SIZE = 10**12  # no size or count is larger


class Keys(Mapping[str, Any]):
    """A JSON object: a mapping whose readers raise `ModelError` for a value that does not fit.
    `source`: name of the file, or of the place in it, for errors."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values, self.source = values, source

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def wrong(self, words: str) -> ModelError:
        """Return the error for values that cannot be right."""
        return ModelError(f"{self.source}: {words}")

    def unsupported(self, words: str) -> UnsupportedModel:
        """Return the error for values that are not implemented."""
        return UnsupportedModel(f"{self.source}: {words}")

    def checked(self, key: str, fits: Callable[[Any], bool], what: str, default: Any = None) -> Any:
        """Return the value of `key`, or `default`. Raises ModelError "... must be {what}" unless it `fits`."""
        value = self.get(key, default)
        if not fits(value):
            raise self.wrong(f"{key}={value!r} must be {what}.")
        return value

    def object(self, key: str) -> dict[str, Any] | None:
        """Return the value of `key`: an object, or None for null and for a key that is missing."""
        value: dict[str, Any] | None = self.checked(
            key, lambda value: value is None or isinstance(value, dict), "an object or null", None
        )
        return value

    def size(self, key: str, default: int | None = None, *, most: int | None = None) -> int:
        """Return the value of `key`, or `default`: a positive integer of at most `most`."""
        if key not in self and default is None:
            raise self.wrong(f"{key} is missing: add it, a positive integer.")
        fits = lambda value: type(value) is int and 0 < value <= (most or MAX_SIZE)  # noqa: E731
        return int(self.checked(key, fits, f"a positive integer{_bound(' of', most)}", default))

    def count(self, key: str, default: int | None = None, *, most: int | None = None) -> int | None:
        """Return the value of `key`, or `default`: an integer from 0 to `most`; None for null or false."""

        def fits(value: Any) -> bool:
            return value is None or value is False or (type(value) is int and 0 <= value <= (most or MAX_SIZE))

        value: int | None = self.checked(key, fits, f"an integer of at least 0{_bound(' and', most)}, or null", default)
        return None if value is False else value

    def positive(self, key: str, default: float | None = None) -> float:
        """Return the value of `key`, or `default`: a number above zero."""
        fits = lambda value: type(value) in (int, float) and 0 < value <= MAX_NUMBER  # noqa: E731
        return float(self.checked(key, fits, "a positive number", default))

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the value of `key`, or `default`: True or False. Null is False."""
        return bool(self.checked(key, lambda value: value is None or isinstance(value, bool), "true or false", default))

    def names(self, key: str) -> list[str]:
        """Return the value of `key`, a list of strings; an empty one when the key is missing or null."""

        def fits(value: Any) -> bool:
            return not value or (isinstance(value, list) and all(isinstance(name, str) for name in value))

        return list(self.checked(key, fits, "a list of names") or ())


def _bound(word: str, most: int | None) -> str:
    return "" if most is None else f"{word} at most {most}"
