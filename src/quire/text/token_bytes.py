"""The bytes that each token contributes to a text, derived from a tokenizer's decoder.

Two families of decoders give a token the same bytes wherever it stands: byte-level BPE (GPT-2 alphabet) and
SentencePiece with byte fallback. Most language models use one of them. Others (WordPiece, CTC, ...) have no table; the
`tokenizers` library decodes them. Sources: the GPT-2 byte alphabet, and the behaviour of `tokenizers` 0.23, which the
tests compare with on random ids.
"""

import json
import re
from collections.abc import Callable

import msgspec
from tokenizers import Tokenizer as Backend

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecoderRule(msgspec.Struct, frozen=True, kw_only=True):
    """Rules by which a tokenizer's decoder turns tokens into text.

    byte_level      characters of a token stand for bytes (GPT-2 alphabet)
    space           the character that stands for a space in SentencePiece vocabularies, "" for none
    byte_fallback   tokens such as <0xE2> are single bytes; a byte that is not part of a character becomes U+FFFD
    strip_text      drop one leading space of the whole text
    strip_token     drop all space characters of the first token
    """

    byte_level: bool = False
    space: str = ""
    byte_fallback: bool = False
    strip_text: bool = False
    strip_token: bool = False


class _Known(dict[int, bytes]):
    """Bytes by token id, computed at the first use. A later look-up, one per token, runs no Python code."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._compute(token_id)
        return piece


class TokenBytes:
    """Table token id -> bytes, filled on demand.
    `bytes_of`: returns the bytes that a token adds to a text, unless it is the first token; b"" for an unknown id."""

    def __init__(self, rule: DecoderRule, token: Callable[[int], str | None]) -> None:
        self.rule = rule
        self._token = token
        self._alphabet = byte_alphabet() if rule.byte_level else {}
        self.bytes_of: Callable[[int], bytes] = _Known(self._compute).__getitem__

    def first_bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds as the first token of a text; some decoders drop its space characters."""
        if not self.rule.strip_token:
            return self.bytes_of(token_id)
        return (self._token(token_id) or "").replace(self.rule.space, "").encode()

    def _compute(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if self.rule.byte_level:
            mapped = [self._alphabet.get(char) for char in token]
            return token.encode() if None in mapped else bytes(b for b in mapped if b is not None)
        if self.rule.byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace(self.rule.space, " ") if self.rule.space else token).encode()


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map character -> byte. Printable Latin-1 is its own byte; U+0100 and up are the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(others)}}


def decoder_rule(backend: Backend) -> DecoderRule | None:
    """Return the rules of the decoder of `backend`; None for a decoder whose tokens have no fixed bytes (WordPiece)."""
    if backend.decoder is None:
        return None
    spec = json.loads(backend.decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderRule(byte_level=True)
    if kinds == ["Metaspace"]:
        return DecoderRule(space=steps[0]["replacement"], strip_token=steps[0]["prepend_scheme"] != "never")
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0]["content"] == " ":
        strip = steps[3:]
        if not strip or strip == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
            space = steps[0]["pattern"].get("String", "")
            return DecoderRule(space=space, byte_fallback=True, strip_text=bool(strip)) if space else None
    return None
