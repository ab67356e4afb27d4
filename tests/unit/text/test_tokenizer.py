"""Tokenizers against transformers, and what transformers does not say: errors, bad words, bytes of tokens."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.config.bundled import bundled_model
from quire.contracts.errors import InvalidParameter, ModelNotFound, RequestFailed, UnsupportedModel
from quire.text.tokenizer import Tokenizer

from ...support.byte_tokenizer import SPECIALS, ByteTokenizer

TEXTS = [
    "",
    "hello",
    " hello  world\n",
    "naïve café 中文字 😀👩‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|>",
    "a\u0000b\ufffdc",
    "he lo.",
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def theirs(tiny_folder: Path) -> Any:
    """The tokenizer of transformers for the small trained model."""
    return reference(tiny_folder)


@pytest.mark.parametrize("text", TEXTS)
def test_tiny_equals_transformers(tiny: Tokenizer, theirs: Any, text: str) -> None:
    for special in (True, False):
        assert tiny.encode(text, special) == theirs.encode(text, add_special_tokens=special)
    ids = tiny.encode(text)
    for skip in (True, False):
        assert tiny.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_tiny_names_equal_transformers(tiny: Tokenizer, theirs: Any) -> None:
    assert tiny.vocab_size == len(theirs)
    assert (tiny.bos_token_id, tiny.eos_token_id, tiny.pad_token_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.pad_token_id,
    )
    assert set(theirs.all_special_ids) <= tiny.all_special_ids


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("with_processor", [True, False])
def test_the_post_processor_alone_decides_on_bos(
    save: Callable[..., Path], build: dict[str, Any], add_bos: bool | None, with_processor: bool
) -> None:
    backend = build["byte_fallback"]()
    if not with_processor:
        from tokenizers import processors

        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    config = {**TOKENS, "tokenizer_class": "PreTrainedTokenizerFast"}
    if add_bos is not None:
        config["add_bos_token"] = add_bos
    folder = save(backend, tokenizer_config=config)
    ours, theirs = Tokenizer.load(folder), reference(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text), False) == theirs.decode(ours.encode(text))
    assert (ours.encode("a")[0] == ours.bos_token_id) is with_processor


@pytest.mark.parametrize("legacy", [True, False])
def test_tokens_that_only_the_config_names_are_added(
    save: Callable[..., Path], build: dict[str, Any], legacy: bool
) -> None:
    backend = build["byte_level"]()
    config: dict[str, Any] = {
        "eos_token": {"__type": "AddedToken", "content": "<|eos|>"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    special_map: dict[str, Any] = {"pad_token": {"content": "<|pad|>", "lstrip": False}, "eos_token": "<|end|>"}
    if legacy:
        config["additional_special_tokens"] = ["<|extra|>"]
    else:
        config["added_tokens_decoder"] = {"263": {"content": "<|tool|>", "special": False, "normalized": False}}
    folder = save(backend, tokenizer_config=config, special_tokens_map=special_map)
    ours, theirs = Tokenizer.load(folder), reference(folder)
    assert ours.vocab_size == len(theirs)
    assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id)
    text = "he<|pad|>x<|extra|><|tool|><|end|><think><|eos|>"
    assert ours.encode(text) == theirs.encode(text)
    for skip in (True, False):
        assert ours.decode(ours.encode(text), skip) == theirs.decode(ours.encode(text), skip_special_tokens=skip)


def test_missing_and_damaged_files_name_the_fix(tmp_path: Path, save: Callable[..., Path], build: Any) -> None:
    with pytest.raises(ModelNotFound, match="not a folder"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        Tokenizer.load(tmp_path)
    save(build["byte_level"]())
    (tmp_path / "tokenizer_config.json").write_text("{'a'")
    with pytest.raises(UnsupportedModel, match="tokenizer_config.json is not valid JSON"):
        Tokenizer.load(tmp_path)


def test_truncation_and_padding_of_the_file_are_switched_off(save: Callable[..., Path], build: dict[str, Any]) -> None:
    backend = build["byte_level"]()
    backend.enable_truncation(2)
    backend.enable_padding(length=40)
    assert Tokenizer.load(save(backend)).encode("he he") == [*build["byte_level"]().encode("he he").ids]


def test_half_a_surrogate_pair_is_refused(family: Tokenizer) -> None:
    for tokenizer in (family, ByteTokenizer()):
        with pytest.raises(InvalidParameter, match="character 1 is half"):
            tokenizer.encode("a\ud83d")
        with pytest.raises(InvalidParameter, match="half of a surrogate"):
            tokenizer.encode_batch(["fine", "a\ud83d"])


def test_decode_of_ids_without_a_token(family: Tokenizer) -> None:
    for tokenizer in (family, ByteTokenizer()):
        assert tokenizer.decode([10**6]) == "" and tokenizer.token_bytes(10**6) == b""
        with pytest.raises(InvalidParameter, match="token id is negative"):
            tokenizer.decode([-1])


def test_batches_and_threads_agree_with_single_calls(tiny: Tokenizer) -> None:
    texts = [f"text {i} with 中文 and 😀" * (i % 7) for i in range(200)]
    single = [tiny.encode(text) for text in texts]
    assert tiny.encode_batch(texts) == single
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tiny.encode, texts)) == single


@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_encoded_or_decoded(tiny: Tokenizer, direction: str) -> None:
    text = "word " * 200_000
    ids = tiny.encode(text)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(tick)
        began = time.perf_counter()
        tiny.encode(text) if direction == "encode" else tiny.decode(ids * 5)
        ended = time.perf_counter()
        done.set()
    assert sum(began < at < ended for at in ticks) > 5


def test_bytes_of_tokens_join_to_the_text(families: dict[str, Tokenizer], tiny: Tokenizer) -> None:
    text = "he lo 中文 😀 é x."
    for tokenizer in (families["byte_level"], tiny, ByteTokenizer()):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text
    fallback = families["byte_fallback"]
    assert b"".join(map(fallback.token_bytes, fallback.encode(text, False))).decode() == " " + text
    assert fallback.token_text(fallback.token_id("▁the") or 0) == " the"
    assert fallback.token_text(fallback.token_id("<0xF0>") or 0) == "\ufffd"


def test_the_fewest_tokens_are_never_more_than_there_are(
    families: dict[str, Tokenizer], build: dict[str, Callable[[], Backend]], tiny: Tokenizer
) -> None:
    def changed(**changes: Any) -> Tokenizer:
        backend = build["byte_level"]()
        for name, value in changes.items():
            setattr(backend, name, value)
        return Tokenizer(backend)

    removing = pre_tokenizers.Split("he", "removed")
    greedy = build["byte_level"]()
    greedy.add_tokens([AddedToken("<wide>", rstrip=True, normalized=False)])
    tokenizers = [
        *families.values(),
        tiny,
        ByteTokenizer(),
        Tokenizer(greedy),
        changed(normalizer=normalizers.NFC()),
        changed(normalizer=normalizers.Strip()),
        changed(pre_tokenizer=pre_tokenizers.Sequence([removing, pre_tokenizers.ByteLevel(add_prefix_space=False)])),
        changed(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    ]
    texts = [
        "",
        "he he a",
        " " * 1000,
        "<wide>" + " " * 1000,
        "he" * 500,
        "<｜begin▁of｜>" * 50,
        "<think>é x" * 50,
        "\u1100\u1161\u11a8" * 50,
        "\u1fef" * 90,
        "\ufdfa",
        "😀 a" * 50,
        "zz" * 50,
    ]
    for tokenizer in tokenizers:
        for text in texts:
            assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, False))
    assert all(t.fewest_tokens("zz" * 500) > 20 for t in (families["byte_level"], tiny, tokenizers[8], ByteTokenizer()))
    assert all(t.fewest_tokens("zz" * 500) == 0 for t in (families["word_piece"], Tokenizer(greedy), *tokenizers[9:]))


def test_bad_words_cover_start_and_middle_of_a_text(tiny: Tokenizer, families: dict[str, Tokenizer]) -> None:
    for word in ("the", " the", "Zyxw", "two words"):
        found = tiny.bad_word_ids([word])
        assert tuple(tiny.encode(word.strip())) in found
        assert tuple(tiny.encode(" " + word.strip())) in found
    assert len(tiny.bad_word_ids(["the", " the"])) == 2
    assert tiny.bad_word_ids(["the"]) == tiny.bad_word_ids(["the"]) != tiny.bad_word_ids(["a"])
    fallback = families["byte_fallback_no_strip"]
    hello = tuple(fallback.encode("lo", False))
    assert fallback.bad_word_ids(["lo"]) == (hello,)  # " lo" ends with the same token
    assert ByteTokenizer().bad_word_ids(["ab"]) == ((97, 98),)
    assert tiny.bad_word_ids(["\n"])[0] == tuple(tiny.encode("\n"))


def test_a_bad_word_without_tokens_is_refused(families: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidParameter, match="has no tokens") as caught:
        families["word_piece"].bad_word_ids(["he", "\t \n"])
    assert caught.value.param == "bad_words"


def test_spaces_between_special_tokens(families: dict[str, Tokenizer]) -> None:
    assert families["word_piece"].decode([1, 2, 2, 3, 4, 1, 2], False) == "[CLS] [SEP] [SEP] hello [CLS] [SEP]"


def test_byte_tokenizer() -> None:
    plain = ByteTokenizer()
    text = "naïve 😀<|im_start|>x"
    ids = plain.encode(text)
    assert ids[:3] == [110, 97, 0xC3] and ids[-2] == plain.token_id("<|im_start|>")
    assert plain.decode(ids, skip_special_tokens=False) == text
    assert plain.decode(ids) == "naïve 😀x"
    assert ByteTokenizer(add_bos=True).encode("a") == [plain.bos_token_id, 97]
    assert ByteTokenizer(add_bos=True).encode("a", add_special_tokens=False) == [97]
    assert plain.vocab_size == 256 + len(SPECIALS) and len(plain.all_special_ids) == len(SPECIALS)


@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_is_encoded_apart(monkeypatch: pytest.MonkeyPatch, special: bool) -> None:
    """The process gets the text as it is, whole, and the right tokenizer."""
    tokenizer = Tokenizer.load(bundled_model())
    text = "a\r\n\n \x00\ufeff\u00e9\u0301 \U0001f642\u200d <|im_end|>\u3000'll 1234\t" * 3
    right = tokenizer.encode(text, special)
    monkeypatch.setattr("quire.text.tokenizer.APART", len(text))
    monkeypatch.setattr(tokenizer, "_backend", None)  # nothing is encoded here
    tokenizer.apart = bundled_model()
    assert tokenizer.encode(text, special) == right
    assert tokenizer.encode_batch([text], special) == [right]
    with pytest.raises(InvalidParameter, match=f"character {len(text)} is half of a surrogate"):
        tokenizer.encode(text + "\ud800", special)
    tokenizer.apart = bundled_model() / "nothing"
    with pytest.raises(RequestFailed, match="ended with code 1"):
        tokenizer.encode(text, special)
