"""Features that are planned and cannot be run: one table tells `quire explain` and refuses in `quire serve`."""

from typing import Any

import pytest

from quire.config import missing as module
from quire.config import peer_flags
from quire.config.missing import check_missing, missing_features, not_runnable
from quire.config.peer_flags import Given, judge
from quire.config.placement import ALONE, Parallel
from quire.config.quantized import format_words
from quire.contracts.errors import UnsupportedModel


def test_nothing_is_missing_of_an_engine_that_runs() -> None:
    assert missing_features(ALONE, {}) == () and not_runnable([]) == ""


def test_reasons_are_the_refusals_of_serve() -> None:
    found = missing_features(Parallel(tp=2, pp=3, dp=4), {})
    given = [Given("--tensor-parallel-size", "-tp", "2"), Given("--pipeline-parallel-size", "-pp", "3"),
             Given("--data-parallel-size", "-dp", "4")]  # fmt: skip
    assert [one.reason for one in found] == [f"{words}." for words in judge(given).refusals]
    assert [one.feature for one in found] == ["tensor parallelism (-tp 2)", "pipeline parallelism (-pp 3)",
                                              "data parallelism (-dp 4)"]


def test_missing_features_are_refused_in_the_words_of_the_first() -> None:
    found = missing_features(ALONE, {"quant_method": "awq"})
    assert [one.feature for one in found] == ["awq weights"]
    with pytest.raises(UnsupportedModel) as refused:
        check_missing(found)
    assert str(refused.value) == ("config.json: quantization_config asks for 'awq', which is not implemented yet: use "
                                  "the unquantized checkpoint of this model.")  # fmt: skip
    check_missing(())


def test_experts_that_are_spread_are_missing_though_serve_ignores_the_flag() -> None:
    (replicas, experts) = missing_features(Parallel(dp=2, experts=True), {})
    assert replicas.feature == "data parallelism (-dp 2)"
    (note,) = judge([Given("--enable-expert-parallel", "--enable-expert-parallel", "on")]).notes
    assert experts.feature == "expert parallelism (--enable-expert-parallel)"
    assert experts.reason.endswith("it counts only where experts are spread over GPUs, which is not implemented yet.")
    assert experts.reason.partition(": ")[2] in note
    assert missing_features(Parallel(experts=True), {}) == (), "one rank has all experts anyway"


def test_a_feature_leaves_with_its_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_flags, "PEER_FLAGS", tuple(
        flag for flag in peer_flags.PEER_FLAGS if "-tp" not in flag.names))  # fmt: skip
    monkeypatch.setattr(module, "missing_format", lambda quantization: "")
    assert missing_features(Parallel(tp=2), {"quant_method": "fp8"}) == ()


@pytest.mark.parametrize(("features", "words"), [
    (["tensor parallelism (-tp 2)"], "tensor parallelism (-tp 2) is"),
    (["fp8 weights"], "fp8 weights are"),
    (["a", "b", "fp8 weights"], "a, b and fp8 weights are"),
])  # fmt: skip
def test_the_sentence(features: list[str], words: str) -> None:
    assert not_runnable(features) == (
        f"Not runnable yet: {words} not implemented; the plan below is what it would be.")


@pytest.mark.parametrize(("quantization", "words"), [
    ({}, ""),
    ({"quant_method": "fp8", "weight_block_size": [128, 64]}, "fp8 in blocks of 128 x 64"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq (4-bit weights in groups of 128)"),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq (8-bit weights)"),
    ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}, "input_activations": None}}},
     "compressed-tensors (4-bit int weights per group of 64)"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token"}}}},
     "compressed-tensors (8-bit float weights per channel, 8-bit float activations per token)"),
    ({"quant_method": "compressed-tensors", "config_groups": [1]}, "compressed-tensors"),
])  # fmt: skip
def test_formats_with_their_bits(quantization: dict[str, Any], words: str) -> None:
    assert format_words(quantization) == words
