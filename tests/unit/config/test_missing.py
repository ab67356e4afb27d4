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
    given = [Given("--tensor-parallel-size", "-tp", "2"), Given("--pipeline-parallel-size", "-pp", "3"),
             Given("--data-parallel-size", "-dp", "4")]  # fmt: skip
    assert [one.reason for one in found] == [f"{words}." for words in judge(given).refusals]
    assert [one.feature for one in found] == ["tensor parallelism (-tp 2)", "pipeline parallelism (-pp 3)",
                                              "data parallelism (-dp 4)"]


def test_missing_features_are_refused_in_the_words_of_the_first() -> None:
    found = missing_features(Parallel(pp=2))
    with pytest.raises(UnsupportedModel) as refused:
        check_missing(found)
    assert str(refused.value) == found[0].reason and "pipeline" in found[0].feature
    check_missing(())


def test_experts_that_are_spread_are_missing_though_serve_ignores_the_flag() -> None:
    (replicas, experts) = missing_features(Parallel(dp=2, experts=True))
    assert replicas.feature == "data parallelism (-dp 2)"
    (note,) = judge([Given("--enable-expert-parallel", "--enable-expert-parallel", "on")]).notes
    assert experts.feature == "expert parallelism (--enable-expert-parallel)"
    assert experts.reason.endswith("it counts only where experts are spread over GPUs, which is not implemented yet.")
    assert experts.reason.partition(": ")[2] in note
    assert missing_features(Parallel(experts=True)) == (), "one rank has all experts anyway"


def test_a_feature_leaves_with_its_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_flags, "PEER_FLAGS", tuple(
        flag for flag in peer_flags.PEER_FLAGS if "-tp" not in flag.names))  # fmt: skip
    assert missing_features(Parallel(tp=2)) == ()


@pytest.mark.parametrize(("features", "words"), [
    (["tensor parallelism (-tp 2)"], "tensor parallelism (-tp 2) is"),
    (["a", "b", "c"], "a, b and c are"),
])  # fmt: skip
def test_the_sentence(features: list[str], words: str) -> None:
    assert not_runnable(features) == (
        f"Not runnable yet: {words} not implemented; the plan below is what it would be.")
