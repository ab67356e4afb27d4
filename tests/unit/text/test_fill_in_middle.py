"""Prompts around a gap: which tokens stand where, by what a tokenizer has."""

import pytest

from quire.contracts.errors import InvalidParameter
from quire.text.fill_in_middle import GAPS, Gap, around_gap
from quire.text.tokenizer import Tokenizer

from .conftest import byte_fallback_backend, byte_level_backend


@pytest.mark.parametrize("gap", GAPS, ids=lambda gap: gap.before)
def test_special_tokens_are_ids_and_texts_are_texts(gap: Gap) -> None:
    backend = byte_level_backend()
    assert backend.add_special_tokens([name for name in gap if name]) == len([*filter(None, gap)])
    tokenizer = Tokenizer(backend)
    before, after, fill = (tokenizer.token_id(name) for name in gap)
    head, rest = tokenizer.encode("he\n", False), tokenizer.encode(" a", False)
    wanted = [before, *head, after, *rest, fill] if gap.fill else [after, *rest, before, *head]
    assert around_gap(tokenizer, "he\n", " a", True) == wanted


def test_no_space_comes_into_the_middle() -> None:
    backend = byte_fallback_backend()
    backend.add_special_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>"])
    tokenizer = Tokenizer(backend)
    ids = around_gap(tokenizer, "he", "he", False)
    cut, shown = ids.index(tokenizer.token_id("▁<SUF>") or 0), [tokenizer.token_bytes(token) for token in ids]
    assert b"".join(shown[1:cut]) == b" he" and b"".join(shown[cut + 1 : -1]) == b"he"  # as models have been trained


def test_without_tokens_there_is_a_reason() -> None:
    with pytest.raises(InvalidParameter, match="its tokenizer has no tokens for filling in") as caught:
        around_gap(Tokenizer(byte_level_backend()), "a", "b", True)
    assert caught.value.param == "suffix"
