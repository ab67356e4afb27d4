"""Shape of a JSON body: how deeply it is nested, and how many parts (fields, lists and objects) it has.

Eight megabytes have room for millions of parts. Each takes up to a microsecond to decode, on the event loop. So parts
are counted before, in C, by the bytes that mark them.
"""

import numpy as np

MAX_DEPTH = 128  # nested lists and objects: templates and grammar compilation recurse for each
MAX_PARTS = 1 << 17  # a conversation of 10,000 messages with a few parts each has some 10^5
NO_BRACKETS = bytes(set(range(256)) - set(b'"[]{}'))
NO_BEGINNINGS = bytes(set(range(256)) - set(b"[{:"))
NO_MARKS = bytes(set(range(256)) - set(b'"[]{}:'))


def depth(body: bytes) -> int:
    """Return the nesting depth of valid JSON, or an upper bound where that is at most MAX_DEPTH."""
    if (most := body.count(b"[") + body.count(b"{")) <= MAX_DEPTH:
        return most
    marks, in_text = _marks(body, NO_BRACKETS)
    steps = (marks & 2).astype(np.int8) - 1  # bit 1 is set in [ and {, not in ] and }
    steps[in_text] = 0
    return int(np.cumsum(steps, dtype=np.int32).max())


def num_parts(body: bytes) -> int:
    """Return the number of parts of valid JSON, or an upper bound where that is at most MAX_PARTS."""
    if (most := len(body.translate(None, NO_BEGINNINGS))) <= MAX_PARTS:
        return most
    marks, in_text = _marks(body, NO_MARKS)
    return int(np.count_nonzero((marks & 2).astype(bool) & ~in_text))  # bit 1 is set in [, { and :


def _marks(body: bytes, dropped: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a body but those that are dropped, and a mask of quotes and of what lies between quotes."""
    marks = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, dropped), np.uint8)
    quotes = marks == ord('"')
    return marks, quotes | (np.cumsum(quotes, dtype=np.uint8) & 1).astype(bool)
