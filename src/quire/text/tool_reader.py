"""Reads a text that comes in pieces, each character once, as if it were all there.

Reading methods are generators that yield where it takes more text to decide; so what is read does not depend on where
the text was cut. Between two pieces only the beginning of something short (a tag, an escape) is unread.
"""

import functools
import json
import re
from collections.abc import Callable, Generator

Reads = Generator[None, None, str]
Read = Generator[None, None, None]
Sink = Callable[[str], object]  # gets the pieces of what is read

MAX_DEPTH = 200  # of arguments: what reads them next may recurse
BLANK, JSON_BLANK, JSON_BARE = re.compile(r"\s*"), re.compile(r"[ \t\n\r]*"), re.compile(r"[-+.0-9A-Za-z]*")
JSON_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
JSON_PLAIN, JSON_ESCAPE = re.compile(r'[^"\\\x00-\x1f]*'), re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
CLOSING, MARKS, VALUE = {"{": "}", "[": "]"}, frozenset('"{}[],:'), '"{[0'  # 0: a number or a name


class Malformed(Exception):
    """What comes next is not what was begun."""


class Reader:
    """held: texts read since it was last cleared, which are given back if they turn out to be nothing; read: characters
    read in all."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.read = 0
        self._text, self._at, self._over = "", 0, False

    @property
    def at_end(self) -> bool:
        """Whether everything is read and nothing will come."""
        return self._over and self._at == len(self._text)

    def push(self, text: str, *, over: bool = False) -> None:
        """More text;  over: the last."""
        self._text, self._at, self._over = self._text[self._at :] + text, 0, over

    def take(self, count: int = 1) -> str:
        """The next characters, which are there."""
        self.held.append(self._text[self._at : self._at + count])
        self._at += count
        self.read += len(self.held[-1])
        return self.held[-1]

    def peek(self, count: int) -> Reads:
        """The next characters, unread; fewer only at the end."""
        while len(self._text) - self._at < count and not self._over:
            yield
        return self._text[self._at : self._at + count]

    def span(self, chars: re.Pattern[str], out: Sink = len) -> Reads:
        """Reads all that `chars`, a class of characters, matches here; the character after it is returned, unread."""
        while True:
            found = chars.match(self._text, self._at)
            if found and found[0]:
                out(self.take(len(found[0])))
            if self._at < len(self._text) or self._over:
                return self._text[self._at : self._at + 1]
            yield

    def need(self, *tags: str) -> Reads:
        """The longest of `tags` that comes after white space; both are read. Errors: `Malformed` if none comes."""
        yield from self.span(BLANK)
        longest = max(map(len, tags))
        while True:
            text = self._text[self._at : self._at + longest]
            if self._over or not any(len(text) < len(tag) and tag.startswith(text) for tag in tags):
                break
            yield
        if found := [len(tag) for tag in tags if text.startswith(tag)]:
            return self.take(max(found))
        self.take(len(text) if any(tag.startswith(text) for tag in tags) else 0)  # the text ends within a tag
        raise Malformed

    def until(self, tags: tuple[str, ...], out: Sink) -> Reads:
        """The first of `tags` in the text, read; "" at the end. `out` gets what is before, once it can be no tag."""
        begun, whole = _finders(tags)
        while True:
            found = (whole if self._over else begun).search(self._text, self._at)
            before = (found.start() if found else len(self._text)) - self._at
            if before:
                out(self.take(before))
            if found and found.lastindex is None:
                return self.take(len(found[0]))
            if self._over:
                return ""
            yield

    def string(self, out: Sink) -> Read:
        """A JSON string. What models forget to escape is: control characters, and a backslash that escapes nothing."""
        if (yield from self.span(JSON_BLANK, out)) != '"':
            raise Malformed
        out(self.take())
        while (char := (yield from self.span(JSON_PLAIN, out))) != '"':
            if char == "\\":
                escape = yield from self.peek(2)
                escape = (yield from self.peek(6)) if escape[1:] == "u" else escape
                out(self.take(len(escape)) if JSON_ESCAPE.fullmatch(escape) else "\\" + self.take())
            elif char:
                out(json.dumps(self.take())[1:-1])
            else:
                raise Malformed
        out(self.take())

    def json(self, out: Sink, opened: str = "") -> Read:
        """A JSON value, or the rest of one whose first brace, `opened`, is read. Errors: `Malformed`."""
        stack, legal = list(opened), '"}' if opened else VALUE  # legal: what may come
        while legal:
            char = yield from self.span(JSON_BLANK, out)
            kind, is_key = char if char in MARKS else "0", "{" not in legal
            if not char or kind not in legal or len(stack) > MAX_DEPTH:
                raise Malformed
            if kind == '"':
                yield from self.string(out)
            elif kind == "0":
                pieces: list[str] = []
                yield from self.span(JSON_BARE, pieces.append)
                if not self.at_end and not JSON_WORD.fullmatch("".join(pieces)):
                    raise Malformed
                out("".join(pieces))
            else:
                out(self.take())
            if kind in CLOSING:
                stack.append(kind)
                legal = '"}' if kind == "{" else VALUE + "]"
            elif kind in ",:":
                legal = '"' if kind == "," and stack[-1] == "{" else VALUE
            else:
                if kind in "]}":
                    stack.pop()
                legal = "" if not stack else ":" if kind == '"' and is_key else "," + CLOSING[stack[-1]]


@functools.cache
def _finders(tags: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns for the first of `tags`; the first finds also, as its group, the beginning of one at the text's end."""
    whole = "|".join(re.escape(tag) for tag in sorted(tags, key=len, reverse=True)) or "(?!)"
    begun = "|".join(re.escape(tag[:size]) for tag in tags for size in range(1, len(tag))) or "(?!)"
    return re.compile(rf"((?:{begun})\Z)|{whole}"), re.compile(whole)
