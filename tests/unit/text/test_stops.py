"""Stop strings: the same result wherever the text is cut, and nothing held back without need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.stops import StopMatcher

SMALL = st.text(st.sampled_from("abc"), max_size=24)
STOPS = st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=6), max_size=4)


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop=include)
    shown = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def expected(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """Character by character: the first that ends a stop decides, the longest stop if several end there."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(text=SMALL, stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 24), max_size=6))
def test_any_cut_gives_the_same(text: str, stops: list[str], include: bool, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert run(stops, pieces, include=include) == expected(stops, text, include)
    assert run(stops, list(text), include=include) == expected(stops, text, include)


@pytest.mark.parametrize("cut", range(len("before<|stop|>after") + 1))
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_cut_at_every_position(cut: int, include: bool) -> None:
    text = "before<|stop|>after"
    assert run(["<|stop|>", "zzz"], [text[:cut], text[cut:]], include=include) == (
        "before<|stop|>" if include else "before",
        "<|stop|>",
    )


@given(text=SMALL, stops=STOPS)
def test_only_what_may_become_a_stop_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for char in text:
        seen += char
        new, stop = matcher.push(char)
        shown += new
        if stop is not None:
            return
        held = [n for n in range(1, len(seen) + 1) if any(s.startswith(seen[-n:]) for s in stops)]
        assert seen[len(shown) :] == (seen[-max(held) :] if held else "")


def test_the_stop_completed_first_wins_then_the_longest() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")
    assert run(["c", "abc"], ["xabcd"]) == ("x", "abc")
    assert run(["zz", "c"], ["abczz"]) == ("ab", "c")


@pytest.mark.parametrize("include", [True, False])
def test_before_min_tokens_a_stop_may_begin_but_not_end(include: bool) -> None:
    matcher = StopMatcher(["END"], include_stop=include)
    assert matcher.push("one END two E", active=False) == ("one END two ", None)
    assert matcher.push("ND more") == ("END" if include else "", "END")
    matcher = StopMatcher(["aab", "a"], include_stop=include)
    assert matcher.push("xaa", active=False) == ("x", None)
    assert matcher.push("c") == ("aac", None)
    assert matcher.push("a") == ("a" if include else "", "a")


def test_flush_shows_what_was_held() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("a sto") == ("a ", None)
    assert matcher.flush() == "sto" and matcher.flush() == ""
    assert StopMatcher([]).push("anything") == ("anything", None)
