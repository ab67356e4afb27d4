"""Log-probabilities in OpenAI's two formats: columns with text offsets (completions), and one object per token (chat).

A token has the same number wherever it appears, so that clients may compare numbers for equality.
"""

import codecs
from collections.abc import Sequence

import msgspec

from quire.contracts.output import Logprob, LogprobsByToken
from quire.entry.http.openai.schema import ChatLogprob, ChatLogprobs, LegacyLogprobs, TokenLogprob
from quire.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity; forbidden tokens have a log-probability of minus infinity


class TokenNames:
    """Texts that stand for tokens in answers: the token's text, or "token_id:17"."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        """Make the names. With `as_ids`, or without a tokenizer, every token is written as "token_id:17"."""
        self.tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None
        self._keys: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Return the token's text. Bytes of an incomplete character become U+FFFD."""
        return f"token_id:{token}" if self._as_ids else self._bytes(token).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> list[int] | None:
        """Return the token's bytes; None without a tokenizer."""
        return None if self.tokenizer is None else list(self._bytes(token))

    def key(self, token: int) -> str:
        """Return the token's text if its bytes are whole characters, else "bytes:\\xe2\\x82".

        So tokens with different bytes have different keys.
        """
        key = self._keys.get(token)
        if key is None:
            key = self._keys[token] = self._key(token)
        return key

    def _key(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        data = self._bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token)


def number(entry: Logprob) -> float:
    """Return the log-probability, but at least `LOWEST`: JSON has no minus infinity."""
    return max(entry.logprob, LOWEST)


class _Characters:
    """Incremental UTF-8 decoder of tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, data: bytes) -> tuple[int, str]:
        """Decode the bytes of the next token. Return (number, text): `text` has the characters that it completes.
        If earlier tokens left an incomplete character that this token does not continue, `text` begins with a U+FFFD
        for it, and `number` is 1; else `number` is 0."""
        held = self._decoder.getstate()[0]
        return int(bool(held) and not _goes_on(held + data[:1])), self._decoder.decode(data)


def _goes_on(data: bytes) -> bool:
    """Return True if the bytes are valid UTF-8, with an incomplete character at the end at most."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


class LegacyColumns:
    """Builder of the logprobs columns of /v1/completions, for one choice, as its tokens come."""

    def __init__(self, names: TokenNames, *, skip_special: bool, offset: int = 0) -> None:
        """Begin the columns. `offset`: characters of the text before the first token."""
        self._names = names
        self._tokenizer = names.tokenizer
        self._skipped = names.tokenizer.all_special_ids if skip_special and names.tokenizer is not None else frozenset()
        self._offset = offset
        self._characters = _Characters()

    def rows(self, tokens: Sequence[int], entries: Sequence[LogprobsByToken | None]) -> LegacyLogprobs:
        """Return the columns of the next tokens. The entry of an echoed first token is None: it has no logprobs."""
        columns = LegacyLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token, entry in zip(tokens, entries, strict=True):
            before, text = self._take(token)
            columns.text_offset.append(self._offset + before)
            self._offset += len(text)
            self.add(columns, token, entry)
        return columns

    def add(self, columns: LegacyLogprobs, token: int, entry: LogprobsByToken | None) -> None:
        """Add one token to the columns, without its text offset."""
        columns.tokens.append(self._names.key(token))
        if entry is None:
            columns.token_logprobs.append(None)
            columns.top_logprobs.append(None)
            return
        own = number(entry[token])
        top = {self._names.key(token): own}
        for other, alternative in entry.items():
            if other != token:
                key = self._names.key(other)
                top[key if key not in top else f"token_id:{other}"] = number(alternative)
        columns.token_logprobs.append(own)
        columns.top_logprobs.append(top)

    def _take(self, token: int) -> tuple[int, str]:
        if self._tokenizer is None or token in self._skipped:
            return 0, ""
        return self._characters.take(self._tokenizer.token_bytes(token))


def prompt_columns(
    names: TokenNames, text: str, tokens: Sequence[int], entries: Sequence[LogprobsByToken | None]
) -> LegacyLogprobs:
    """Return the columns of an echoed prompt, with offsets in the given text.
    Special tokens that the text does not contain (a BOS that the tokenizer added) take no characters. Neither does a
    space that the tokenizer put before the text."""
    writer = LegacyColumns(names, skip_special=False)
    columns = LegacyLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    tokenizer = names.tokenizer
    special = frozenset[int]() if tokenizer is None else tokenizer.all_special_ids
    characters, at = _Characters(), 0
    for token, entry in zip(tokens, entries, strict=True):
        before, piece = (0, "") if tokenizer is None else characters.take(tokenizer.token_bytes(token))
        columns.text_offset.append(min(at + before, len(text)))
        writer.add(columns, token, entry)
        if token in special and not text.startswith(piece, at):
            continue
        if at == 0 and piece.startswith(" ") and not text.startswith(" "):
            piece = piece[1:]
        at += len(piece)
    return columns


def joined(first: LegacyLogprobs, second: LegacyLogprobs) -> LegacyLogprobs:
    """Join the columns of two successive texts."""
    parts = msgspec.structs.asdict(second)
    return LegacyLogprobs(**{name: column + parts[name] for name, column in msgspec.structs.asdict(first).items()})


def chat_logprobs(
    names: TokenNames, tokens: Sequence[int], entries: Sequence[LogprobsByToken], num_top: int | None
) -> ChatLogprobs:
    """Return the logprobs of each token, with alternatives.
    `num_top`: number of likely alternatives; -1 = the whole vocabulary; None = all entries (the requested ids)."""
    content = []
    for token, entry in zip(tokens, entries, strict=True):
        others = list(entry.items())
        if num_top is not None:
            others = sorted(others, key=_rank)[: num_top if num_top >= 0 else None]
        own, *top = (
            TokenLogprob(token=names.text(i), logprob=number(e), bytes=names.bytes_of(i))
            for i, e in [(token, entry[token]), *others]
        )
        content.append(ChatLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
    return ChatLogprobs(content=content)


def _rank(item: tuple[int, Logprob]) -> int:
    rank = item[1].rank
    return 2**31 if rank is None else rank
