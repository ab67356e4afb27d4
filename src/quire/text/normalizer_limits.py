"""The growth of texts in a tokenizer's normalizer, and the errors of a tokenizer that fails on a text.

A checkpoint's normalizer may make any text of a short one: twenty rules that write "aa" for "a" make a million of it.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer as Backend

from quire.contracts.errors import RequestFailed

MOST = 2.0**40  # no need to tell more growth apart
PANIC = "PanicException"  # of a library in Rust; it derives from BaseException, and its module cannot be imported


def growth_of(backend: Backend) -> float:
    """Return an upper bound of (length of a normalized text) / (length of the text), for replacements and prefixes.

    Unicode normalization counts as 1: it makes a text longer by a factor of at most 18, and hardly ever.
    """
    return 1.0 if backend.normalizer is None else _growth(json.loads(backend.normalizer.__getstate__()))


@contextmanager
def failures_of_one_text() -> Iterator[None]:
    """`with` block that turns a panic of the library into a `RequestFailed`, the error of this request alone."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise RequestFailed(
            "the model's tokenizer failed on this text, which is a fault of its tokenizer.json: send another text.",
            code="internal",
        ) from error


def is_panic(error: BaseException) -> bool:
    """True for a panic of a library in Rust."""
    return type(error).__name__ == PANIC


def _growth(spec: dict[str, Any]) -> float:
    factor = 1.0
    if spec.get("type") == "Sequence":
        for step in spec.get("normalizers", ()):
            factor = min(MOST, factor * _growth(step))
    elif spec.get("type") == "Replace":
        pattern, content = spec.get("pattern", {}), spec.get("content", "")
        if pattern.get("String"):
            return max(1.0, len(content) / len(pattern["String"]))
        return len(content) + 1.0 if _matches_nothing(str(pattern.get("Regex", ""))) else max(1.0, len(content))
    elif spec.get("type") == "Prepend":
        prefix = len(spec.get("prepend", ""))
        return 1.0 + prefix * (prefix > 1)  # one character more is no growth
    return factor


def _matches_nothing(pattern: str) -> bool:
    """True if a regex may match the empty text, and so be found between any two characters."""
    try:
        return re.compile(pattern).match("") is not None
    except (re.error, RecursionError):  # another dialect
        return True
