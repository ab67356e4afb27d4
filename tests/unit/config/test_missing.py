"""Features that are planned and cannot be run: one table tells `quire explain` and refuses in `quire serve`."""

import pytest

from quire.config import peer_flags
from quire.config.missing import check_missing, missing_features, not_runnable
from quire.config.peer_flags import Given, judge
from quire.config.placement import ALONE, Parallel
from quire.contracts.errors import UnsupportedModel


def test_nothing_is_missing_of_an_engine_that_runs() -> None:
    assert missing_features(ALONE) == () and not_runnable([]) == ""


def test_reasons_are_the_refusals_of_serve() -> None:
    found = missing_features(Parallel(tp=2, pp=3, dp=4))
    given = [Given("--data-parallel-size", "-dp", "4")]
    assert [one.reason for one in found] == [f"{words}." for words in judge(given).refusals]
    assert [one.feature for one in found] == ["data parallelism (-dp 4)"]


def test_missing_features_are_refused_in_the_words_of_the_first() -> None:
    found = missing_features(Parallel(dp=2))
    with pytest.raises(UnsupportedModel) as refused:
        check_missing(found)
    assert str(refused.value) == found[0].reason and "data" in found[0].feature
    check_missing(())


def test_a_feature_leaves_with_its_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_flags, "PEER_FLAGS", tuple(
        flag for flag in peer_flags.PEER_FLAGS if "-dp" not in flag.names))  # fmt: skip
    assert missing_features(Parallel(dp=2)) == ()


@pytest.mark.parametrize(("features", "words"), [
    (["tensor parallelism (-tp 2)"], "tensor parallelism (-tp 2) is"),
    (["a", "b", "c"], "a, b and c are"),
])  # fmt: skip
def test_the_sentence(features: list[str], words: str) -> None:
    assert not_runnable(features) == (
        f"Not runnable yet: {words} not implemented; the plan below is what it would be.")
