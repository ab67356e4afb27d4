"""Reader of a text that comes in pieces, with methods as if the whole text were there. It reads each character once.

Its methods are generators, which yield when they need more text to decide. So the result does not depend on how the
text is cut. Between two pieces, only the beginning of a tag or an escape stays unread.
"""

import functools
import json
import re
from collections.abc import Callable, Generator

Reads = Generator[None, None, str]
Read = Generator[None, None, None]
Sink = Callable[[str], object]  # gets pieces of the text that is read

MAX_DEPTH = 200  # nesting of arguments, since later readers may recurse
BLANK, JSON_BLANK, JSON_BARE = re.compile(r"\s*"), re.compile(r"[ \t\n\r]*"), re.compile(r"[-+.0-9A-Za-z]*")
JSON_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
JSON_PLAIN, JSON_ESCAPE = re.compile(r'[^"\\\x00-\x1f]*'), re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
CLOSING, MARKS, VALUE = {"{": "}", "[": "]"}, frozenset('"{}[],:'), '"{[0'  # 0 stands for a number, true, false or null


class Malformed(Exception):
    """The text of a tool call is not in the expected format."""


class Reader:
    """Reader of a model's answer that comes in pieces. Its generators yield until enough text is pushed.

    held   texts read since `held` was last cleared; they become content if they turn out not to be a call
    read   number of characters read
    """

    def __init__(self) -> None:
        self.held: list[str] = []
        self.read = 0
        self._text, self._at, self._over = "", 0, False

    @property
    def at_end(self) -> bool:
        """True when the whole text is read and no more will come."""
        return self._over and self._at == len(self._text)

    def push(self, text: str, *, over: bool = False) -> None:
        """Add text. `over`: no more text follows."""
        self._text, self._at, self._over = self._text[self._at :] + text, 0, over

    def take(self, count: int = 1) -> str:
        """Read and return the next characters, which must be there."""
        self.held.append(self._text[self._at : self._at + count])
        self._at += count
        self.read += len(self.held[-1])
        return self.held[-1]

    def peek(self, count: int) -> Reads:
        """Return the next characters without reading them; fewer only at the end of the text."""
        while len(self._text) - self._at < count and not self._over:
            yield
        return self._text[self._at : self._at + count]

    def span(self, chars: re.Pattern[str], out: Sink = len) -> Reads:
        """Read the characters that `chars` matches; call `out` with them. Return the next character, still unread."""
        while True:
            found = chars.match(self._text, self._at)
            if found and found[0]:
                out(self.take(len(found[0])))
            if self._at < len(self._text) or self._over:
                return self._text[self._at : self._at + 1]
            yield

    def need(self, *tags: str) -> Reads:
        """Read white space, then the longest of `tags` that follows. Return the tag. Raises `Malformed` without one."""
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
        """Read up to the end of the first of `tags`. Return the tag, or "" at the end of the text.
        `out`: called with the text before the tag, in pieces, as soon as a piece cannot be the beginning of a tag."""
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
        """Read a JSON string; call `out` with its pieces. Escape control characters and stray backslashes in it."""
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
        """Read a JSON value; call `out` with its pieces. `opened`: "{" if it was read before. Raises `Malformed`."""
        stack, legal = list(opened), '"}' if opened else VALUE  # legal: characters that may come next
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
    """Return two patterns that find the first of `tags`. The first pattern also finds, as its group, a beginning of a
    tag at the end of the text."""
    whole = "|".join(re.escape(tag) for tag in sorted(tags, key=len, reverse=True)) or "(?!)"
    begun = "|".join(re.escape(tag[:size]) for tag in tags for size in range(1, len(tag))) or "(?!)"
    return re.compile(rf"((?:{begun})\Z)|{whole}"), re.compile(whole)
