"""Streamed text equals decoded text, for every decoder family, on random ids and real text."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from quire.text.detokenizer import detokenizer_for
from quire.text.tokenizer import Tokenizer

from ...support.byte_tokenizer import ByteTokenizer

IDS = st.lists(st.integers(0, 2**20), max_size=40)
TEXT = st.text(st.sampled_from("ab hel中文é😀👩‍👧\u0301\ufffd.\n▁ 🏳️‍🌈"), max_size=30)


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, **options: bool) -> list[str]:
    detokenizer = detokenizer_for(tokenizer, prompt or [], **options)
    return [detokenizer.push([i]) for i in ids] + [detokenizer.flush()]


def in_vocabulary(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [i % (tokenizer.vocab_size + 3) for i in ids]  # three ids beyond it: padding rows of a model's head


@settings(max_examples=150)
@given(ids=IDS, skip=st.booleans(), data=st.data())
def test_random_ids(families: dict[str, Tokenizer], ids: list[int], skip: bool, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["byte_level", "metaspace", "word_piece", "bytes"]))
    tokenizer: Tokenizer = ByteTokenizer() if name == "bytes" else families[name]
    ids = in_vocabulary(tokenizer, ids)
    if name == "word_piece":
        ids = [i for i in ids if i < tokenizer.vocab_size]
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=150)
@given(ids=IDS, skip=st.booleans(), strip=st.booleans())
def test_random_ids_with_byte_fallback(families: dict[str, Tokenizer], ids: list[int], skip: bool, strip: bool) -> None:
    tokenizer = families["byte_fallback" if strip else "byte_fallback_no_strip"]
    ids = in_vocabulary(tokenizer, ids)
    kept = [i for i in ids if not (skip and i in tokenizer.all_special_ids)]
    got = "".join(stream(tokenizer, ids, skip_special_tokens=skip))
    want = _one_mark_per_bad_byte(b"".join(map(tokenizer.token_bytes, kept)))
    assert got == (want.removeprefix(" ") if strip else want)
    if "\ufffd" not in got:
        assert got == tokenizer.decode(ids, skip)


def _one_mark_per_bad_byte(data: bytes) -> str:
    return re.sub("[\udc80-\udcff]", "\ufffd", data.decode("utf-8", "surrogateescape"))


@given(text=TEXT, data=st.data())
def test_text_comes_back_and_no_character_is_split(
    families: dict[str, Tokenizer], text: str, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["byte_level", "byte_fallback", "byte_fallback_no_strip"]))
    tokenizer = families[name]
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(text=TEXT, prompt=TEXT, cut=st.integers(0, 40))
def test_output_follows_its_prompt(families: dict[str, Tokenizer], text: str, prompt: str, cut: int) -> None:
    for tokenizer in families.values():
        ids = tokenizer.encode(prompt + text)
        before, after = ids[:cut], ids[cut:]
        whole, head = tokenizer.decode(ids), tokenizer.decode(before)
        if head.endswith("\ufffd"):
            continue  # the prompt ends inside a character; see below
        assert "".join(stream(tokenizer, after, before)) == whole[len(head) :]


@given(text=TEXT, sizes=st.lists(st.integers(1, 5), max_size=30))
def test_grouping_of_pushes_does_not_matter(families: dict[str, Tokenizer], text: str, sizes: list[int]) -> None:
    for tokenizer in families.values():
        ids = tokenizer.encode(text)
        grouped = detokenizer_for(tokenizer)
        at, got = 0, ""
        for size in sizes:
            got += grouped.push(ids[at : at + size])
            at += size
        got += grouped.push(ids[at:]) + grouped.flush()
        assert got == "".join(stream(tokenizer, ids))


@given(text=st.text(st.sampled_from("ab 中é😀👩‍👧\u0301"), max_size=30), prompt=st.sampled_from(["", "a", "é"]))
def test_characters_of_several_tokens_without_a_byte_table(
    build: dict[str, Callable[[], Backend]], text: str, prompt: str
) -> None:
    backend = build["byte_fallback_no_strip"]()
    backend.normalizer = None
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend)
    assert tokenizer.bytes_table is None
    before, ids = tokenizer.encode(prompt, False), tokenizer.encode(text, False)
    pieces = stream(tokenizer, ids, before)
    assert "".join(pieces) == tokenizer.decode(ids) and not any("\ufffd" in piece for piece in pieces)


def test_tiny_model_text(tiny: Tokenizer) -> None:
    text = "Once upon a time… 中文字 😀👩‍👩‍👧 café\n\n<|im_end|>end"
    ids = tiny.encode(text)
    for skip in (True, False):
        pieces = stream(tiny, ids, skip_special_tokens=skip)
        assert "".join(pieces) == tiny.decode(ids, skip)
        assert not any("\ufffd" in piece for piece in pieces)


def test_characters_come_when_their_last_byte_does() -> None:
    assert stream(ByteTokenizer(), list("é😀".encode())) == ["", "é", "", "", "", "😀", ""]


def test_an_unfinished_character_shows_at_the_end(families: dict[str, Tokenizer]) -> None:
    emoji = [families["byte_fallback"].token_id(f"<0x{b:02X}>") for b in "😀😀".encode()]
    ids = [i for i in emoji if i is not None][:6]
    assert stream(families["byte_fallback"], ids) == ["", "", "", "😀", "", "", "\ufffd\ufffd"]
    assert stream(ByteTokenizer(), list("😀😀".encode())[:6])[-1] == "\ufffd"


def test_wrong_bytes_do_not_hold_the_stream_back() -> None:
    assert stream(ByteTokenizer(), [0xFF, 0xFF, 0x80, 97]) == ["\ufffd", "\ufffd", "\ufffd", "a", ""]


def test_a_token_that_means_the_replacement_character_is_shown(families: dict[str, Tokenizer]) -> None:
    sign = list("\ufffd".encode())
    assert "".join(stream(ByteTokenizer(), sign * 30)) == "\ufffd" * 30
    pieces = stream(families["word_piece"], [11] * 30)
    assert "".join(pieces) == families["word_piece"].decode([11] * 30)
    assert sum(map(bool, pieces[:-1])) > 5  # a decoder without a byte table waits a little, not to the end


def test_a_prompt_that_ends_inside_a_character() -> None:
    data = list("😀".encode())
    assert stream(ByteTokenizer(), [*data[2:], 97], [65, *data[:2]]) == ["", "😀", "a", ""]


@pytest.mark.parametrize("skip", [True, False])
def test_first_space_after_special_tokens(families: dict[str, Tokenizer], skip: bool) -> None:
    fallback = families["byte_fallback"]
    the = fallback.token_id("▁the") or 0
    first = detokenizer_for(fallback, [1], skip_special_tokens=skip).push([the])
    assert first == ("the" if skip else " the")
    assert detokenizer_for(fallback, [1, the, 2], skip_special_tokens=skip).push([2, the]).endswith(" the")
    assert "".join(stream(fallback, [the, 2, 2, the], skip_special_tokens=skip)) == fallback.decode(
        [the, 2, 2, the], skip
    )


def test_spaces_between_special_tokens(families: dict[str, Tokenizer]) -> None:
    ids = [1, 2, 2, 3, 4, 1, 2]
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    got = "".join(stream(families["word_piece"], ids, **options))
    assert got == "[CLS][SEP][SEP] hello [CLS][SEP]"
