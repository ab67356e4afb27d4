"""Offsets of tokens in a text when they are parts of characters."""

import random
from itertools import accumulate

import pytest

from quire.contracts.output import Logprob
from quire.entry.http.openai.logprobs import LegacyColumns, TokenNames, prompt_columns

from .....support.byte_tokenizer import ByteTokenizer

ENTRY = Logprob(logprob=-1.0, rank=1, decoded_token="")


class Pieces(ByteTokenizer):
    """Token i is the i-th of some byte strings."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__()
        self.given = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.given[token_id]


def offsets(pieces: list[bytes]) -> list[int]:
    tokens, names = list(range(len(pieces))), TokenNames(Pieces(pieces))
    entries = [{token: ENTRY} for token in tokens]
    written = LegacyColumns(names, skip_special=False).rows(tokens, entries).text_offset
    text = b"".join(pieces).decode("utf-8", "replace")
    assert prompt_columns(names, text, tokens, entries).text_offset == written
    return written


@pytest.mark.parametrize(
    "pieces, expected",
    [
        ([b"\xe2", b"a", b"b"], [0, 1, 2]),  # U+FFFD, a, b
        ([b"\xe2", b"\x82", b"\xac", b"b"], [0, 0, 0, 1]),  # the parts of a whole character share its place
        ([b"\xe2", b"\x82a", b"b"], [0, 0, 2]),  # the second token is the end of what became U+FFFD, and more
        ([b"\xe2", b"\xe2", b"\x82\xac", b"b"], [0, 1, 1, 2]),
        ([b"\xef", b"\xbf", b"\xbd", b"b"], [0, 0, 0, 1]),  # U+FFFD itself, written out
        ([b"\xf0\x9f", b"\xff", b"b"], [0, 1, 2]),
    ],
)
def test_a_token_begins_after_what_it_does_not_continue(pieces: list[bytes], expected: list[int]) -> None:
    assert offsets(pieces) == expected


def test_a_token_of_whole_characters_is_found_at_its_place() -> None:
    draw = random.Random(5)
    for _ in range(60):
        pieces = [
            draw.choice([b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\xff", b"abc", "€".encode(), b"x"])
            for _ in range(12)
        ]
        text = b"".join(pieces).decode("utf-8", "replace")
        for at, piece in zip(offsets(pieces), pieces, strict=True):
            if piece in (b"abc", "€".encode(), b"x"):
                assert text.startswith(piece.decode(), at)
        assert list(accumulate(offsets(pieces), max)) == offsets(pieces)
