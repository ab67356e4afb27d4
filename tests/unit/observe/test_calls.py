"""Recorded calls: a function that cannot be described runs as ever, and a folded tree says what it leaves out."""

from collections.abc import Iterator

from quire.observe.calls import CallRecorder, Span, fold


class Owner:
    def double(self, value: object) -> list[object]:
        return [value, value]


class Odd:
    """An array-like that raises when it is described."""

    def traced(self) -> str:
        raise KeyError("no words")


def test_a_call_does_not_fail_because_it_cannot_be_described() -> None:
    owner = Owner()
    with CallRecorder([(owner, "double", "double")]) as recorder:
        odd = Odd()
        assert owner.double(odd) == [odd, odd]
    (call,) = recorder.root.inside
    assert call.takes == call.gives == "KeyError: 'no words'" and not vars(owner)


def test_a_folded_tree_joins_calls_that_are_alike_and_shows_each_once() -> None:
    def layer(number: int, rows: int) -> Span:
        return Span(
            f"layers.{number}", "", takes=f"f32[{rows}]", begin=number, end=number + 1, inside=[Span("norm", "")]
        )

    def told(spans: list[Span]) -> Iterator[tuple[str, bool, int, int]]:
        for span in spans:
            yield span.name, span.again, span.joined, span.end - span.begin
            yield from told(span.inside)

    shown: set[tuple[str, object]] = set()
    first = fold(Span("step", "", inside=[layer(i, 5) for i in range(4)]), shown)
    joined = ("layers.1 to layers.3: the same stops, 3 in all", False, 3, 3)
    assert list(told(first.inside)) == [("layers.0", False, 0, 1), ("norm", False, 0, 0), joined]
    second = fold(Span("step", "", inside=[layer(7, 5), layer(8, 1)]), shown)
    assert list(told(second.inside)) == [("layers.7", True, 0, 1), ("layers.8", False, 0, 1), ("norm", False, 0, 0)]
