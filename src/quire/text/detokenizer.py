"""Incremental detokenization: token ids to text as they arrive, one detokenizer per sequence.

This defines the text of a sequence, streamed or not: all pieces of `push`, then `flush`. It equals the text after the
prompt when prompt and output are decoded together. So a leading space of the first output token is kept after a prompt.
A piece never has a part of a character: bytes of an unfinished character are held until it is complete, or become
U+FFFD when it cannot be completed. One difference from `decode` is deliberate: SentencePiece decoders turn a whole run
of byte tokens to U+FFFD if a byte in it is wrong, also characters that a stream has shown already. Here complete
characters stay, and only the wrong bytes become U+FFFD.

The `tokenizers` library's DecodeStream is not used for three reasons. It waits without limit while the text ends in
U+FFFD, which may be a token's true text. It fails when an earlier character is taken back. It drops a leading space
after skipped special tokens.
"""

import codecs
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Protocol

from quire.text.token_bytes import TokenBytes
from quire.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_CHAR_BYTES = 4  # UTF-8
PROMPT_CONTEXT = 8  # prompt tokens before the output, for a decoder without a byte table
MAX_HELD = 16  # tokens without text that such a decoder may hold back


class Detokenizer(Protocol):
    """Incremental decoder of one sequence."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens. Return the text that they complete."""

    def flush(self) -> str:
        """Return the text that was held back; an unfinished character becomes U+FFFD. Call this last."""


def hidden_ids(tokenizer: Tokenizer, skip_special_tokens: bool, shown: Collection[int] | None) -> frozenset[int]:
    """Return the token ids to leave out of the text: with `skip_special_tokens` all special ids except `shown`."""
    special = tokenizer.all_special_ids if skip_special_tokens else frozenset[int]()
    return special.difference(shown) if shown else special


def detokenizer_for(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    shown: Collection[int] | None = None,
    spaces_between_special_tokens: bool = True,
) -> Detokenizer:
    """Make a detokenizer for the output after `prompt_ids`. `shown`: special ids that the text has all the same."""
    skipped = hidden_ids(tokenizer, skip_special_tokens, shown)
    before = (i for i in map(int, reversed(prompt_ids)) if i not in skipped)
    if tokenizer.bytes_table is not None:
        return _ByteDetokenizer(tokenizer.bytes_table, before, skipped)
    joined = not (spaces_between_special_tokens or (skip_special_tokens and not shown))
    context = list(islice(before, PROMPT_CONTEXT))
    return _WindowDetokenizer(tokenizer, context[::-1], skipped, joined)


class _ByteDetokenizer:
    """A detokenizer for tokens that stand for bytes: a table and a UTF-8 decoder."""

    def __init__(self, table: TokenBytes, before: Iterable[int], skipped: frozenset[int]) -> None:
        self._bytes_of = table.bytes_of
        self._first_bytes_of = table.first_bytes_of
        self._skipped = skipped
        self._utf8: _Utf8 = (
            _FallbackUtf8() if table.rule.byte_fallback else codecs.getincrementaldecoder("utf-8")("replace")
        )
        tail = _last_bytes(table, before)
        self._first_token = not tail and table.rule.strip_token
        self._first_char = not tail and table.rule.strip_text
        for piece in tail:
            self._utf8.decode(piece)

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens. Return the text that they complete."""
        if self._first_token:
            data = self._first_data([i for i in token_ids if i not in self._skipped])
        else:
            data = b"".join([self._bytes_of(i) for i in token_ids if i not in self._skipped])
        text = self._utf8.decode(data)
        return self._without_first_space(text) if self._first_char else text

    def flush(self) -> str:
        """Return the text that was held back; an unfinished character becomes U+FFFD."""
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
    """A UTF-8 decoder that acts as SentencePiece's: each byte that is not part of a character becomes one U+FFFD."""

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
    """A detokenizer for other decoders: it decodes a short window before and after a token, and emits the difference.
    window = emitted tokens, as context [0, read) | tokens not yet emitted [read, end)"""

    def __init__(self, tokenizer: Tokenizer, context: list[int], skipped: frozenset[int], joined: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._joined = joined
        self._after_added = False
        self._window = context
        self._read = len(context)
        self._shown = self._decode(context)

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens. Return the text that they complete."""
        return "".join([self._step(i) for i in token_ids if i not in self._skipped])

    def flush(self) -> str:
        """Return the text that was held back."""
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


def _last_bytes(table: TokenBytes, before: Iterable[int]) -> list[bytes]:
    """Return the bytes of the prompt's last tokens, at least as many as a character has.
    `before`: ids of the prompt, last first."""
    found: list[bytes] = []
    num_bytes = 0
    for token_id in before:
        if piece := table.bytes_of(token_id):
            found.append(piece)
            num_bytes += len(piece)
        if num_bytes >= MAX_CHAR_BYTES:
            break
    return found[::-1]
