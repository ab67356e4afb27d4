"""Text of a sequence: tokens, stop strings, minimum lengths and the end, together."""

from hypothesis import given
from hypothesis import strategies as st

from quire.contracts.sampling import SamplingParams
from quire.text.sequence import SequenceText
from quire.text.tokenizer import Tokenizer

from ...support.byte_tokenizer import ByteTokenizer

EOS = ByteTokenizer().eos_token_id or 0
TEXT = st.text(st.sampled_from("ab😀é"), max_size=20)


def run(ids: list[int], params: SamplingParams, sizes: list[int], **end: bool) -> SequenceText:
    """Pushes `ids` in groups and checks that the deltas are the text."""
    sequence, at, deltas = SequenceText(ByteTokenizer(), [], params), 0, ""
    for size in [*sizes, len(ids)]:
        last = at + size >= len(ids)
        delta, stop = sequence.push(ids[at : at + size], last, ended_by_token=last and end.get("ended_by_token", False))
        deltas, at = deltas + delta, at + size
        if stop is not None or last:
            break
    assert deltas == sequence.text
    return sequence


@given(text=TEXT, stop=st.sampled_from(["ab", "😀", "é😀", "aab"]), sizes=st.lists(st.integers(1, 4), max_size=20))
def test_tokens_end_with_the_one_that_completes_the_stop(text: str, stop: str, sizes: list[int]) -> None:
    ids = ByteTokenizer().encode(text)
    for include in (False, True):
        sequence = run(ids, SamplingParams(stop=stop, include_stop_str_in_output=include), sizes)
        at = text.find(stop)
        if at < 0:
            assert (sequence.text, sequence.stop, sequence.num_tokens) == (text, None, len(ids))
        else:
            end = at + len(stop)
            assert (sequence.text, sequence.stop) == (text[: end if include else at], stop)
            assert sequence.num_tokens == len(text[:end].encode())


def test_a_token_with_text_after_the_stop(tiny: Tokenizer) -> None:
    ids = tiny.encode("the end of the story")
    sequence = SequenceText(tiny, [], SamplingParams(stop="nd"))
    assert sequence.push(ids, True) == ("the e", "nd")
    assert tiny.decode(ids[: sequence.num_tokens]) == "the end"
    assert sequence.push(ids, True) == ("", "nd") and sequence.text == "the e"


def test_min_tokens_counts_the_completing_token() -> None:
    ids = ByteTokenizer().encode("ababab")
    for min_tokens, cut in ((0, 2), (1, 2), (2, 4), (3, 4), (5, 6), (6, 6)):
        sequence = run(ids, SamplingParams(stop="ab", min_tokens=min_tokens), [1] * 6)
        assert sequence.num_tokens == cut, min_tokens
        assert sequence.stop == ("ab" if min_tokens < 6 else None)


def test_special_tokens_that_are_to_be_shown_are_among_those_that_are_skipped() -> None:
    other = min(ByteTokenizer().all_special_ids - {EOS})
    ids, text = [*b"hi", EOS, other, *b"yo", EOS], ByteTokenizer().token_text(other)
    for sizes in ([], [1] * len(ids), [3, 2]):
        assert run(ids, SamplingParams(shown_special_ids=[other], ignore_eos=True), sizes).text == f"hi{text}yo"
        assert run(ids, SamplingParams(ignore_eos=True), sizes).text == "hiyo"
    stopped = run(ids, SamplingParams(shown_special_ids=[other], stop="y"), [1] * len(ids))
    assert (stopped.text, stopped.num_tokens) == (f"hi{text}", 5)


def test_the_token_that_ended_it_counts_but_is_not_shown() -> None:
    ids = [*b"hi", EOS]
    for stop in (None, "zz"):
        hidden = run(ids, SamplingParams(skip_special_tokens=False, stop=stop), [], ended_by_token=True)
        assert (hidden.text, hidden.num_tokens) == ("hi", 3)
        params = SamplingParams(skip_special_tokens=False, stop=stop, include_stop_str_in_output=True)
        assert run(ids, params, [], ended_by_token=True).text == "hi<|eos|>"
        assert run(ids, SamplingParams(skip_special_tokens=False, stop=stop), []).text == "hi<|eos|>"


def test_the_end_shows_what_was_held() -> None:
    params = SamplingParams(stop="zebra")
    assert run([*b"a ze", *"é".encode()[:1]], params, [1] * 9).text == "a ze\ufffd"
    assert run([*b"a ze"], params, [4]).text == "a ze"


def test_a_leading_space_after_a_prompt_is_kept(families: dict[str, Tokenizer]) -> None:
    fallback = families["byte_fallback"]
    word = [fallback.token_id("▁the") or 0]
    assert SequenceText(fallback, fallback.encode("a"), SamplingParams()).push(word, True) == (" the", None)
    assert SequenceText(fallback, [], SamplingParams()).push(word, True) == ("the", None)
