"""Routing against the routers of transformers, and where those say nothing: ties, NaN, random draws."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.args.experts import Routing, read_moe
from quire.args.keys import Keys
from quire.kernels.routing import drawing, ref, uniform

from ...support.tiny_models import EXPERTS, Tiny, configured, experts_of, hf_config

RELEASED = {
    "mixtral": (8, 2, {}), "qwen2_moe": (60, 4, {}), "qwen3_moe": (128, 8, {}),
    "deepseek_v2": (160, 6, {"n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}),
    "deepseek_v3": (256, 8, {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}),
    "glm4_moe": (160, 8, {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}),
}  # fmt: skip


def router(family: str, **changes: Any) -> tuple[Any, Routing]:
    """A random router of transformers, and what we read of its config."""
    config = hf_config(Tiny(family=family))
    for key, value in changes.items():
        setattr(config, key, value)
    block = experts_of(config)
    made = block.router if hasattr(block, "router") else block.gate
    with torch.no_grad():
        made.weight.normal_(0, 0.3)
        if getattr(made, "bias", None) is not None:
            made.bias.normal_(0, 0.3)
        if hasattr(block, "e_score_correction_bias"):  # MiniMax-M2 gives it to the router
            made.register_buffer("e_score_correction_bias", block.e_score_correction_bias)
            made.forward = partial(made.forward, e_score_correction_bias=made.e_score_correction_bias)
        if getattr(block, "use_expert_bias", False):
            made.register_buffer("e_score_correction_bias", block.expert_bias)
            made.forward = partial(made.forward, expert_bias=made.e_score_correction_bias)
        if hasattr(made, "e_score_correction_bias"):
            made.e_score_correction_bias.normal_(0, 0.3)
    moe, _ = read_moe(Keys(config.to_dict(), "config.json"), configured(family).experts, 2)
    return made, moe.routing


@torch.inference_mode()
def compare(theirs: Any, routing: Routing) -> None:
    """Ids equal and weights within 1e-6, both in the order of the ids: theirs is not always sorted."""
    x = torch.randn(500, theirs.weight.shape[1])
    logits, weights, ids = theirs(x)
    ours, chosen = ref.route(logits, getattr(theirs, "e_score_correction_bias", None), routing)
    assert ours.dtype == torch.float32 and chosen.dtype == torch.int32 and chosen.shape == (500, routing.top_k)
    order, own = ids.argsort(1), chosen.argsort(1)
    assert torch.equal(chosen.gather(1, own).long(), ids.gather(1, order))
    torch.testing.assert_close(ours.gather(1, own), weights.gather(1, order), rtol=1e-6, atol=1e-6)


# Llama 4's router returns weights of all experts: tests/unit/layers/test_moe.py compares its block.
@pytest.mark.parametrize("family", [one for one in EXPERTS if not configured(one).beside and one != "llama4_text"])
def test_every_family(family: str) -> None:
    torch.manual_seed(0)
    compare(*router(family))


@pytest.mark.parametrize("family", RELEASED)
def test_sizes_of_released_models(family: str) -> None:
    torch.manual_seed(1)
    experts, top_k, changes = RELEASED[family]
    theirs, _ = router(family)
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    config = hf_config(Tiny(family=family))
    changes = changes | {key: experts for key in keys if hasattr(config, key)} | {"num_experts_per_tok": top_k}
    theirs, routing = router(family, **changes)
    assert (theirs.num_experts, routing.num_experts, routing.top_k) == (experts, experts, top_k)
    compare(theirs, routing)


def test_deepseek_v2_without_groups() -> None:
    torch.manual_seed(2)
    theirs, routing = router("deepseek_v2", topk_method="greedy")
    assert routing.num_groups == 1
    compare(theirs, routing)


@pytest.mark.parametrize("normalize", [False, True])
def test_weights_are_normalized_only_when_the_config_says_so(normalize: bool) -> None:
    torch.manual_seed(3)
    theirs, routing = router("qwen3_moe", norm_topk_prob=normalize)
    compare(theirs, routing)
    weights, _ = ref.route(torch.randn(9, routing.num_experts), None, routing)
    assert bool((weights.sum(1) - 1).abs().max() < 1e-6) == normalize


def test_negative_scores_of_kept_groups_beat_masked_ones() -> None:
    """A bias far below zero: an expert of a dropped group would win against it if it counted as 0."""
    torch.manual_seed(4)
    theirs, routing = router("deepseek_v3")
    theirs.e_score_correction_bias -= 4
    compare(theirs, routing)


def test_of_equal_scores_the_lower_number_wins() -> None:
    routing = Routing(num_experts=6, top_k=3, scoring="softmax")
    logits = torch.tensor([[1.0, 1, 1, 1, 1, 1], [0, 2, 1, 2, 2, 1], [0, 0, 0, 0, 3, 0]])
    assert ref.route(logits, None, routing)[1].tolist() == [[0, 1, 2], [1, 3, 4], [4, 0, 1]]
    grouped = replace(routing, num_groups=3, top_groups=2, group_score="top2", scoring="sigmoid")
    assert ref.route(logits, None, grouped)[1].tolist() == [[0, 1, 2], [3, 4, 2], [4, 0, 1]]


def test_a_token_that_is_not_live_has_no_experts() -> None:
    routing = Routing(num_experts=4, top_k=2, scoring="softmax")
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    weights, ids = ref.route(logits, None, routing)
    found = ref.route(logits, None, routing, torch.tensor([True, False, True]))
    assert torch.equal(found[0], weights) and found[1].dtype == torch.int32
    assert found[1].tolist() == [ids[0].tolist(), [-1, -1], ids[2].tolist()]


def test_the_bias_chooses_and_never_weighs() -> None:
    routing = Routing(num_experts=4, top_k=1, scoring="sigmoid", correction=True)
    weights, ids = ref.route(torch.zeros(1, 4), torch.tensor([0.0, 0, 7, 0]), routing)
    assert ids.tolist() == [[2]] and weights.tolist() == [[0.5]]


def test_large_logits_of_llama4_are_told_apart() -> None:
    """float32 rounds the sigmoid of all of them to 1."""
    torch.manual_seed(6)
    theirs, routing = router("llama4_text")
    x = torch.randn(500, theirs.weight.shape[1])
    with torch.inference_mode():
        theirs.weight.mul_(20)
        scores, logits = theirs(x)
    assert int(((logits > 20).sum(1) > 1).sum()) > 100
    weights, ids = ref.route(logits, None, routing)
    assert torch.equal(ids[:, 0].long(), logits.argmax(1))
    assert torch.equal(scores.nonzero()[:, 1], ids[:, 0].long()), "theirs are 0 for experts that were not chosen"
    torch.testing.assert_close(weights[:, 0], scores.amax(1), rtol=0, atol=0)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    routing = Routing(num_experts=5, top_k=2, scoring="softmax")
    logits = torch.tensor([[0.0, 1, 2, 3, 4], [torch.nan] * 5, [4, 3, 2, 1, 0]])
    weights, ids = ref.route(logits.bfloat16(), None, routing)
    assert ids.tolist() == [[4, 3], [0, 1], [0, 1]] and weights.isnan().all(1).tolist() == [False, True, False]
    assert ref.route(torch.empty(0, 5), None, routing)[1].shape == (0, 2)


def test_uniform_draws_are_even_and_without_repetition() -> None:
    """5,000 draws of 4 of 16: each expert 1,250 times, with a standard deviation of 31."""
    torch.manual_seed(5)
    routing = Routing(
        num_experts=16, top_k=4, scoring="sigmoid", correction=True, num_groups=4, top_groups=1, scaling=9.0
    )
    draw = partial(uniform, ref, routing)
    weights, ids = draw(torch.empty(5000, 3))
    assert all(len(set(row)) == 4 for row in ids.tolist())
    counts = torch.bincount(ids.flatten(), minlength=16)
    assert counts.sum() == 20_000 and bool(((counts - 1250).abs() < 160).all())
    torch.testing.assert_close(weights, torch.full((5000, 4), 0.25), rtol=0.02, atol=0)
    assert not torch.equal(draw(torch.empty(5000, 3))[1], ids)
    together: Tensor = (ids.sort(1).values == torch.arange(4)).all(1)
    assert int(together.sum()) < 20, "four neighbours come once in 1,820 draws"


def test_draws_by_zipfs_law_are_uneven_alike_on_all_ranks() -> None:
    """5,000 draws of 1 of 16: the experts' counts follow 1 / rank^0.7, in another order on each layer."""
    routing = Routing(num_experts=16, top_k=1, scoring="sigmoid", correction=True)
    expected = torch.arange(1.0, 17) ** -0.7
    hottest = []
    for layer in (3, 4):
        counts = []
        for seed in (1, 2):  # of ranks
            torch.manual_seed(seed)
            ids = drawing("zipf", layer, 16, torch.device("cpu"))(ref, routing, torch.empty(5000, 3))[1]
            counts.append(torch.bincount(ids.flatten(), minlength=16))
        shares = [one.sort(descending=True).values / 5000 for one in counts]
        assert all(bool(((one - expected / expected.sum()).abs() < 0.02).all()) for one in shares)
        assert counts[0].argmax() == counts[1].argmax() and not torch.equal(*counts)
        hottest.append(counts[0].argsort().tolist())
    assert hottest[0] != hottest[1]
    uneven = drawing("zipf", 0, 16, torch.device("cpu"))(
        ref, Routing(num_experts=16, top_k=4, scoring="softmax"), torch.empty(500, 3)
    )[1]
    assert all(len(set(row)) == 4 for row in uneven.tolist())
