"""Features that are planned and cannot be run: one table tells `quire explain` and refuses in `quire serve`."""

from dataclasses import replace
from pathlib import Path

import pytest

from quire.args.checkpoint import read_checkpoint_config
from quire.config.engine import CacheConfig
from quire.contracts.errors import UnsupportedModel
from quire.contracts.parallel import ALONE, Parallel
from quire.kernels.experts import plan as kernel_plan
from quire.kernels.experts.plan import DISPATCHERS, MoEPlan
from quire.plan import dispatchers
from quire.plan.dispatchers import Hardware, resolve_moe
from quire.plan.missing import check_missing, missing_blend, missing_features, not_runnable

SPREAD = Parallel(dp=2, experts=True)


def plans(shared: Path, device: str, **asked: str) -> dict[str, MoEPlan | str]:
    hardware = Hardware(device=device, kernels=(("ref", ""),))
    args = read_checkpoint_config(shared / "hf" / "DeepSeek-V2-Lite")
    return {phase: resolve_moe(args, None, SPREAD, hardware, phase, asked) for phase in ("prefill", "decode")}


def test_nothing_is_missing_of_an_engine_that_runs(shared: Path) -> None:
    assert missing_features(ALONE, {}) == () and not_runnable([]) == ""
    assert missing_features(SPREAD, plans(shared, "cpu")) == ()
    assert missing_features(Parallel(dp=2), {"prefill": "no kernel"}) == (), "replicas with all experts send no tokens"


def test_replicas_whose_tokens_no_dispatcher_brings_are_refused_with_the_way_out(shared: Path) -> None:
    found = missing_features(SPREAD, plans(shared, "cpu") | {"decode": "no way to run the experts"})
    assert [one.feature for one in found] == ["a dispatcher for decode (-dp 2 --enable-expert-parallel)"]
    with pytest.raises(UnsupportedModel) as refused:
        check_missing(found)
    assert str(refused.value) == found[0].reason and "leave out -dp or --enable-expert-parallel" in found[0].reason
    check_missing(())


def test_a_planned_dispatcher_is_named(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = replace(DISPATCHERS["pull"], implemented=False)
    for place in (dispatchers, kernel_plan):
        monkeypatch.setattr(place, "DISPATCHERS", {**DISPATCHERS, "pull": planned})
    (found,) = missing_features(SPREAD, plans(shared, "cuda", dispatcher="pull"))
    assert found.feature == "dispatcher pull for prefill and decode (-dp 2 --enable-expert-parallel)"
    assert "use --all2all-backend allgather_reducescatter with --enforce-eager" in found.reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_are_balanced_on_all_devices(shared: Path, device: str) -> None:
    assert missing_features(replace(SPREAD, redundant=0), plans(shared, device)) == ()


BLENDS = CacheConfig(enable_cache_blend=True)


@pytest.mark.parametrize(
    ("model", "parallel", "windows", "device", "why"),
    [
        ("Qwen3-0.6B", Parallel(tp=2), (None,), "cpu", "ranks do not tell each other which rows they keep"),
        ("Qwen3-0.6B", ALONE, (None, 512), "cpu", "given up the KV of most tokens"),
        ("DeepSeek-V2-Lite", ALONE, (None,), "cuda", "its kernels take only the last rows"),
    ],
)
def test_models_whose_kv_is_not_moved_are_refused_by_reason(
    shared: Path, model: str, parallel: Parallel, windows: tuple[int | None, ...], device: str, why: str
) -> None:
    args = read_checkpoint_config(shared / "hf" / model)
    (found,) = missing_blend(BLENDS, args, parallel, windows, device)
    assert why in found.reason and found.reason.endswith("leave out --enable-cache-blend.")
    assert missing_blend(BLENDS, args, ALONE, (None,), "cpu") == ()
    assert missing_blend(CacheConfig(), args, parallel, windows, device) == ()
    (short,) = missing_blend(BLENDS, replace(args, num_layers=2), ALONE, (None,), "cpu")
    (off,) = missing_blend(replace(BLENDS, enable_prefix_caching=False), args, ALONE, (None,), "cpu")
    (drafts,) = missing_blend(BLENDS, replace(args, draft_layers=1), ALONE, (None,), "cpu")
    assert "for 2 layers" in short.reason and "with --no-enable-prefix-caching" in off.reason
    assert "with method mtp is not implemented yet, because a layer that drafts needs" in drafts.reason


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (["tensor parallelism (-tp 2)"], "tensor parallelism (-tp 2) is"),
        (["a", "b", "c"], "a, b and c are"),
    ],
)
def test_the_sentence(features: list[str], words: str) -> None:
    assert not_runnable(features) == (f"Not runnable yet: {words} not implemented; the plan below is what it would be.")
