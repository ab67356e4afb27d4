"""A tokenizer of 256 bytes and a few special tokens, without files: for the mock engine, demos and tests."""

import re
from collections.abc import Sequence

from quire.contracts.errors import InvalidParameter
from quire.text.pieces import DecoderRule, PieceTable, byte_alphabet
from quire.text.tokenizer import bad_word_sequences, invalid_text

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8, ids 256.. are `SPECIALS`, matched in text as any tokenizer does.

    `add_bos` makes `encode` begin with <|bos|>, as a post-processor would.
    """

    def __init__(self, *, add_bos: bool = False) -> None:
        self._add_bos = add_bos
        self._ids = {token: 256 + i for i, token in enumerate(SPECIALS)}
        self._split = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")
        self._names = [char for char, _ in sorted(byte_alphabet().items(), key=lambda item: item[1])] + list(SPECIALS)
        self._pieces = PieceTable(DecoderRule(byte_level=True), self._name)

    @property
    def vocab_size(self) -> int:
        """256 bytes and the special tokens."""
        return 256 + len(SPECIALS)

    @property
    def bos_token_id(self) -> int | None:
        """Id of <|bos|>."""
        return self._ids["<|bos|>"]

    @property
    def eos_token_id(self) -> int | None:
        """Id of <|eos|>."""
        return self._ids["<|eos|>"]

    @property
    def pad_token_id(self) -> int | None:
        """Id of <|pad|>."""
        return self._ids["<|pad|>"]

    @property
    def all_special_ids(self) -> frozenset[int]:
        """The ids from 256 on."""
        return frozenset(self._ids.values())

    @property
    def pieces(self) -> PieceTable | None:
        """Token id -> bytes."""
        return self._pieces

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Bytes of the text, special tokens by their ids. `InvalidParameter` for half of a surrogate pair."""
        ids = [self._ids["<|bos|>"]] if self._add_bos and add_special_tokens else []
        try:
            for part in self._split.split(text):
                ids.extend([self._ids[part]] if part in self._ids else part.encode())
        except (TypeError, UnicodeEncodeError) as error:
            raise invalid_text(text) from error
        return ids

    def fewest_tokens(self, text: str, /) -> int:
        """The longest token, a special one, has 12 characters."""
        return -(-len(text) // max(map(len, SPECIALS)))

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text."""
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of the ids; nothing is ever put between special tokens, so the last argument changes nothing."""
        if any(token_id < 0 for token_id in ids):
            raise InvalidParameter("token ids must be integers in [0, 2^32).", param="token_ids")
        kept = (i for i in ids if not (skip_special_tokens and i >= 256))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """The character of an ASCII byte, U+FFFD for other bytes, the name of a special token."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, or the name of a special token; b"" for other ids."""
        return self._pieces.bytes_of(token_id)

    def token_id(self, token: str) -> int | None:
        """Id of a special token's name, or of a byte written in GPT-2's alphabet; None for others."""
        return self._names.index(token) if token in self._names else None

    def added_token(self, token_id: int) -> str | None:
        """Name of a special token; None for a byte."""
        return self._name(token_id) if token_id >= 256 else None

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The bytes of each word; a space before it changes nothing here."""
        return bad_word_sequences([(word, ids := self.encode(word, False), ids) for word in words])

    def _name(self, token_id: int) -> str | None:
        return self._names[token_id] if 0 <= token_id < self.vocab_size else None
