"""Log-probabilities in OpenAI's two forms: columns with text offsets (completions), and one object per token (chat).

A token's number is taken once and shown wherever the token shows, so that clients may compare for equality.
"""

import codecs
from collections.abc import Sequence

import msgspec

from quire.contracts.output import Logprob, LogprobsByToken
from quire.entry.http.openai.schema import ChatLogprob, ChatLogprobs, LegacyLogprobs, TokenLogprob
from quire.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity; forbidden tokens have a log-probability of minus infinity


class TokenNames:
    """How tokens are written in answers."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        """`as_ids`, or no tokenizer: every token as "token_id:17"."""
        self.tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None
        self._keys: dict[int, str] = {}

    def text(self, token: int) -> str:
        """The token's text; bytes that are no whole character show as U+FFFD."""
        return f"token_id:{token}" if self._as_ids else self._bytes(token).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> list[int] | None:
        """The token's bytes, None when there is no tokenizer."""
        return None if self.tokenizer is None else list(self._bytes(token))

    def key(self, token: int) -> str:
        """The token's text if its bytes are whole characters, else "bytes:\\xe2\\x82": different bytes never meet."""
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
    """The log-probability as JSON can hold it."""
    return max(entry.logprob, LOWEST)


class _Characters:
    """The characters that tokens become, one token after the other."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, data: bytes) -> tuple[int, str]:
        """(characters before this token that only it makes certain, the text that it completes, those included): bytes
        that it does not continue become one U+FFFD, which is not its own."""
        held = self._decoder.getstate()[0]
        return int(bool(held) and not _goes_on(held + data[:1])), self._decoder.decode(data)


def _goes_on(data: bytes) -> bool:
    """Whether the bytes begin a text."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


class LegacyColumns:
    """The logprobs columns of one choice, written as its tokens come."""

    def __init__(self, names: TokenNames, *, skip_special: bool, offset: int = 0) -> None:
        """`offset`: characters of the text before the first token."""
        self._names = names
        self._tokenizer = names.tokenizer
        self._skipped = names.tokenizer.all_special_ids if skip_special and names.tokenizer is not None else frozenset()
        self._offset = offset
        self._characters = _Characters()

    def rows(self, tokens: Sequence[int], entries: Sequence[LogprobsByToken | None]) -> LegacyLogprobs:
        """The next tokens and what was likely there; None where nothing precedes the token."""
        columns = LegacyLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token, entry in zip(tokens, entries, strict=True):
            before, text = self._take(token)
            columns.text_offset.append(self._offset + before)
            self._offset += len(text)
            self.add(columns, token, entry)
        return columns

    def add(self, columns: LegacyLogprobs, token: int, entry: LogprobsByToken | None) -> None:
        """One token without its offset."""
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
    """The columns of an echoed prompt, aligned with the text that was given: special tokens that are not written in it
    (a BOS that the tokenizer added) and leading-space marks that it does not show take no characters."""
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
    """The columns of a text and of what follows it."""
    parts = msgspec.structs.asdict(second)
    return LegacyLogprobs(**{name: column + parts[name] for name, column in msgspec.structs.asdict(first).items()})


def chat_logprobs(names: TokenNames, tokens: Sequence[int], entries: Sequence[LogprobsByToken],
                  num_top: int | None) -> ChatLogprobs:
    """One object per token with the `num_top` likeliest ones, -1: the whole vocabulary; None: all that there are (ids
    that were asked for)."""
    content = []
    for token, entry in zip(tokens, entries, strict=True):
        others = list(entry.items())
        if num_top is not None:
            others = sorted(others, key=_rank)[: num_top if num_top >= 0 else None]
        own, *top = (TokenLogprob(token=names.text(i), logprob=number(e), bytes=names.bytes_of(i))
                     for i, e in [(token, entry[token]), *others])
        content.append(ChatLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
    return ChatLogprobs(content=content)


def _rank(item: tuple[int, Logprob]) -> int:
    rank = item[1].rank
    return 2**31 if rank is None else rank
