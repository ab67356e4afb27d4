"""Names of JSON objects while the text is generated: a token that would repeat a name of its object is forbidden.

Knows bytes of JSON and of tokens. A grammar cannot do this, since a name is only known once it is generated.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence

QUOTED = re.compile(rb'(?=("(?:[^"\\]|\\.)*"))', re.DOTALL)
ESCAPE, QUOTE = ord("\\"), ord('"')


class TokenIndex:
    """Index of a vocabulary, for finding tokens by their first bytes or by the JSON strings in them.

    coded   ids of tokens with an escape like \\u000a; forbidden in names, so that each name has one spelling
    whole   complete JSON string, with its quotes -> ids of the tokens that contain it
    last    text after a token's last quote -> ids of the tokens
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        order = sorted(range(len(tokens)), key=tokens.__getitem__)
        self._ids, self._texts = order, [tokens[i] for i in order]
        self.tokens, self.coded = tokens, [i for i in order if b"\\u" in tokens[i]]
        self.whole: dict[bytes, list[int]] = {}
        self.last: dict[bytes, list[int]] = {}
        for i in order:
            if b'"' in tokens[i]:
                self.last.setdefault(tokens[i].rpartition(b'"')[2], []).append(i)
            for quoted in {*QUOTED.findall(tokens[i])} if tokens[i].count(b'"') > 1 else ():
                self.whole.setdefault(quoted, []).append(i)

    def being(self, text: bytes) -> list[int]:
        """Return the ids of all tokens equal to a text."""
        return self._ids[bisect_left(self._texts, text) : bisect_left(self._texts, text + b"\0")]

    def beginning(self, text: bytes) -> list[int]:
        """Return the ids of all tokens that begin with a text. Its last byte must be below 255."""
        end = text[:-1] + bytes([text[-1] + 1])
        return self._ids[bisect_left(self._texts, text) : bisect_left(self._texts, end)]


class Names:
    """State of one JSON output after its last token: the property names that its unfinished objects have already.

    _open        unfinished objects and lists, outermost first: the names of an object, None for a list
    _text        the unfinished string as written; None outside a string
    _is_name, _name_next   True: the unfinished string, or the next string, is a property name
    """

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self._open: list[frozenset[bytes] | None] = []
        self._text: bytes | None = None
        self._escaped = self._is_name = self._name_next = False

    def add(self, data: bytes) -> bool:
        """Append the bytes of a token. Return True if they complete a property name that its object has already."""
        repeated = False
        for byte in data:
            if self._text is not None and (self._escaped or byte != QUOTE):
                self._escaped = not self._escaped and byte == ESCAPE
                self._text += bytes([byte])
            elif self._text is not None:
                if self._is_name and (names := self._names()) is not None:
                    repeated |= self._text in names
                    self._open[-1] = names | {self._text}
                self._text = None
            elif byte == QUOTE:
                self._text, self._is_name, self._name_next = b"", self._name_next, False
            elif byte in b"{[":
                self._open.append(frozenset() if byte == ord("{") else None)
                self._name_next = byte == ord("{")
            elif byte in b"}]":
                self._open = self._open[:-1]
                self._name_next = False
            elif byte == ord(","):
                self._name_next = self._names() is not None
        return repeated

    def repeating(self) -> list[int]:
        """Return the ids of the tokens that would repeat a property name in the same object, to forbid them."""
        found: list[int] = []
        if self._text is not None and self._is_name:
            found += self._index.beginning(b"u") if self._escaped else self._index.coded
            for name in self._names() or ():
                if name.startswith(self._text):
                    found += self._index.beginning(name[len(self._text) :] + b'"')
        for name in {name for names in self._open for name in names or ()}:
            found += [i for i in self._index.whole.get(b'"%b"' % name, ()) if self.copy().add(self._index.tokens[i])]
        return found

    def leading(self) -> list[int]:
        """Return the ids of tokens after which the output may end in the first part of a name that its object has.

        Inside a name, these tokens continue it towards such a name. Elsewhere, they end with the start of such a name.
        """
        begun = self._text
        if begun is not None:
            rests = [name[len(begun) :] for name in self._names() or () if self._is_name and name.startswith(begun)]
            texts = {rest[:end] for rest in rests for end in range(1, len(rest) + 1)}
            return [i for text in texts for i in self._index.being(text)]
        parts = {name[:end] for names in self._open for name in names or () for end in range(len(name) + 1)}
        return [i for part in parts for i in self._index.last.get(part, ())]

    def after(self, token: int) -> "Names":
        """Return a copy of this state after one more token."""
        copy = self.copy()
        copy.add(self._index.tokens[token])
        return copy

    def place(self) -> object:
        """Return a key that is equal for states with the same possible continuations."""
        return *self._open, self._text

    def is_again(self) -> bool:
        """Return True if the output ends within a name, and a name that its object has already begins like it."""
        begun = self._text
        return begun is not None and self._is_name and any(name.startswith(begun) for name in self._names() or ())

    def _names(self) -> frozenset[bytes] | None:
        """Return the names of the innermost object; None in a list and outside.
        `_open` may be empty, since `repeating` also tries tokens that cannot come and close too much."""
        return self._open[-1] if self._open else None

    def copy(self) -> "Names":
        """Return a copy, on which tokens can be tried."""
        copy = Names(self._index)
        copy.__dict__.update(self.__dict__, _open=[*self._open])
        return copy
