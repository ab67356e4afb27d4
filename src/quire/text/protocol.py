"""What the rest of Quire asks of a tokenizer: the protocol that `Tokenizer` and `ByteTokenizer` meet."""

from collections.abc import Sequence
from typing import Protocol

from quire.text.pieces import PieceTable


class TextTokenizer(Protocol):
    """Text to token ids and back. Safe to use from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included (a model's logits may be wider: padding ids mean nothing)."""

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token, if there is one."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, if there is one."""

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token, if there is one."""

    @property
    def all_special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of a text."""

    @property
    def pieces(self) -> PieceTable | None:
        """Token id -> bytes; None when the decoder cannot be described so and texts go through `decode`."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. `InvalidParameter` if the text is not valid Unicode."""

    def fewest_tokens(self, text: str, /) -> int:
        """Tokens that an encoding of the text has at least, found without encoding; 0 when nothing is known."""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts, in order."""

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of token ids; ids that name no token give no text."""

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a sentence; bytes that are no whole character show as U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text; b"" for an id that names no token."""

    def token_id(self, token: str) -> int | None:
        """Id of a token given by its exact vocabulary entry, such as "<|im_end|>"; None if there is none."""

    def added_token(self, token_id: int) -> str | None:
        """Content of an added token (special or not); None for an ordinary one."""

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences to forbid so that none of the words appears, at the start of a text or inside it."""
