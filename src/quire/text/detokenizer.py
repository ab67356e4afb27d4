"""Token ids to text while they arrive, one detokenizer per sequence.

The text of a sequence is defined here, once, for streamed and unstreamed output alike: all pieces of `push`, then
`flush`. It is what decoding prompt and output together would show after the prompt (so a leading space of the first
output token is kept when a prompt stands before it), never with part of a character: bytes of an unfinished character
are held until it is whole, or shown as U+FFFD once it cannot become whole. One difference from `decode` is deliberate:
SentencePiece decoders turn a whole run of byte tokens to U+FFFD if any byte in it is wrong, also characters that a
stream showed long ago; here whole characters stay, and only the wrong bytes show as U+FFFD.

Why not the `tokenizers` library's DecodeStream: it waits without bound while the text ends in U+FFFD (a token may mean
exactly that), fails when a character before is taken back, and drops a leading space after skipped special tokens.
"""

import codecs
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Protocol

from quire.text.pieces import PieceTable
from quire.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_CHAR_BYTES = 4  # UTF-8
PROMPT_CONTEXT = 8  # prompt tokens that a decoder without a byte table sees before the output
MAX_HELD = 16  # tokens such a decoder may hold back without having produced text


class Detokenizer(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""

    def flush(self) -> str:
        """The rest; an unfinished character shows as U+FFFD. Nothing may be pushed afterwards."""


def hidden_ids(tokenizer: Tokenizer, skip_special_tokens: bool, shown: Collection[int] | None) -> frozenset[int]:
    """The special tokens that are left out of a text: none, or all but those `shown`."""
    special = tokenizer.all_special_ids if skip_special_tokens else frozenset[int]()
    return special.difference(shown) if shown else special


def detokenizer_for(tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True,
                    shown: Collection[int] | None = None, spaces_between_special_tokens: bool = True) -> Detokenizer:
    """A detokenizer for the output that follows `prompt_ids`; only the end of the prompt is looked at. `shown`: see
    `hidden_ids`."""
    skipped = hidden_ids(tokenizer, skip_special_tokens, shown)
    before = (i for i in map(int, reversed(prompt_ids)) if i not in skipped)
    if tokenizer.pieces is not None:
        return _ByteDetokenizer(tokenizer.pieces, before, skipped)
    joined = not (spaces_between_special_tokens or (skip_special_tokens and not shown))
    context = list(islice(before, PROMPT_CONTEXT))
    return _WindowDetokenizer(tokenizer, context[::-1], skipped, joined)


class _ByteDetokenizer:
    """For tokens that are bytes: a table look-up and a UTF-8 decoder."""

    def __init__(self, pieces: PieceTable, before: Iterable[int], skipped: frozenset[int]) -> None:
        self._bytes_of = pieces.bytes_of
        self._first_bytes_of = pieces.first_bytes_of
        self._skipped = skipped
        self._utf8: _Utf8 = (
            _FallbackUtf8() if pieces.rule.byte_fallback else codecs.getincrementaldecoder("utf-8")("replace"))
        tail = _last_pieces(pieces, before)
        self._first_token = not tail and pieces.rule.strip_token
        self._first_char = not tail and pieces.rule.strip_text
        for piece in tail:
            self._utf8.decode(piece)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        if self._first_token:
            data = self._first_data([i for i in token_ids if i not in self._skipped])
        else:
            data = b"".join([self._bytes_of(i) for i in token_ids if i not in self._skipped])
        text = self._utf8.decode(data)
        return self._without_first_space(text) if self._first_char else text

    def flush(self) -> str:
        """The rest, an unfinished character as U+FFFD."""
        text = self._utf8.decode(b"", True)
        return self._without_first_space(text) if self._first_char else text

    def _first_data(self, ids: list[int]) -> bytes:
        at = next((at for at, token_id in enumerate(ids) if self._bytes_of(token_id)), None)
        if at is None:
            return b""
        self._first_token = False
        return self._first_bytes_of(ids[at]) + b"".join([self._bytes_of(i) for i in ids[at + 1 :]])

    def _without_first_space(self, text: str) -> str:
        self._first_char = not text
        return text.removeprefix(" ")


class _Utf8(Protocol):
    def decode(self, data: bytes, final: bool = False, /) -> str: ...


class _FallbackUtf8:
    """UTF-8 as SentencePiece decoders show it: one U+FFFD for every byte that is part of no character."""

    def __init__(self) -> None:
        self._held = b""

    def decode(self, data: bytes, final: bool = False, /) -> str:
        if not self._held and not final:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text: list[str] = []
        data = self._held + data
        self._held = b""
        while data:
            try:
                text.append(data.decode())
                break
            except UnicodeDecodeError as error:
                text.append(data[: error.start].decode())
                if error.reason == "unexpected end of data" and not final:
                    self._held = data[error.start :]
                    break
                text.append(REPLACEMENT * (error.end - error.start))
                data = data[error.end :]
        return "".join(text)


class _WindowDetokenizer:
    """For other decoders: decode a short window twice, before and after, and emit the difference.

    window = tokens already emitted, as context [0, read) | tokens not yet emitted [read, end)
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int], skipped: frozenset[int], joined: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._joined = joined
        self._after_added = False
        self._window = context
        self._read = len(context)
        self._shown = self._decode(context)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return "".join([self._step(i) for i in token_ids if i not in self._skipped])

    def flush(self) -> str:
        """The rest."""
        return self._decode(self._window)[len(self._shown) :]

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        held = len(self._window) - self._read
        unfinished = text.endswith(REPLACEMENT) and held < MAX_CHAR_BYTES
        if unfinished or (len(text) <= len(self._shown) and held < MAX_HELD):
            return ""
        new = text[len(self._shown) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._shown = self._decode(self._window)
        return self._unspaced(token_id, new) if self._joined else new

    def _unspaced(self, token_id: int, new: str) -> str:
        added = self._tokenizer.added_token(token_id)
        follows, self._after_added = self._after_added, added is not None
        return added if added is not None and follows and new == " " + added else new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _last_pieces(pieces: PieceTable, before: Iterable[int]) -> list[bytes]:
    """The last pieces of the prompt, from `before` (its ids, last first): enough bytes to hold an unfinished one."""
    found: list[bytes] = []
    num_bytes = 0
    for token_id in before:
        if piece := pieces.bytes_of(token_id):
            found.append(piece)
            num_bytes += len(piece)
        if num_bytes >= MAX_CHAR_BYTES:
            break
    return found[::-1]
