"""Floors of steps against closed forms, and against floors that were counted by hand from the same workloads."""

from math import comb
from pathlib import Path
from typing import Any

import pytest

from quire import bench
from quire.config.engine import EngineConfig
from quire.contracts.parallel import ALONE, Parallel
from quire.reports.chosen import describe_chosen
from quire.reports.gpu_rates import RATES, rates_of
from quire.reports.step_costs import StepWork
from quire.reports.step_time import BETWEEN, RankSteps, StepPart

from ...support.explained import explained

H200 = RATES[0]
BENCH = Path(bench.__file__).with_name("models")
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}


def steps(folder: Path, parallel: Parallel = ALONE, **options: Any) -> RankSteps:
    config = EngineConfig.from_flat(model=str(folder), load_format="dummy", **options)
    report = explained(config, parallel, "h200")
    rank, _ = report.holdings.held[-1]
    return RankSteps(holdings=report.holdings, rank=rank, rates=H200, exchanges=report.exchanges(rank))


def seconds(parts: list[StepPart]) -> float:
    return sum(one.seconds or 0 for one in parts)


def by_name(parts: list[StepPart]) -> dict[str, StepPart]:
    return {one.name: one for one in parts}


def speed(made: RankSteps, requests: int, prompt: int, answer: int) -> float:
    """Output tokens per second of a workload: all prompts, then the decodes; of one token all tokens."""
    spent = seconds(made.prompts(requests, prompt, prompt))
    spent += sum(seconds(made.decode(requests, prompt + i)) for i in range(1, answer))
    return requests * (answer if answer > 1 else prompt + 1) / spent


@pytest.mark.parametrize(
    ("model", "one", "many", "prompts"),
    [
        ("qwen3-0.6b", 3380, 42_100, 578_000),
        ("qwen3-8b", 281, 8880, 51_700),
        ("qwen3-30b-a3b", 695, 4090, 110_000),
        ("deepseek-v2-lite", 868, 7800, 154_000),
        ("qwen3-8b-awq", 846, 12_500, 51_700),
    ],
)
def test_floors_of_workloads(shared: Path, model: str, one: int, many: int, prompts: int) -> None:
    """latency_b1, decode_b64 and prefill_4k of one H200, with uniform routing."""
    made = steps(shared / "bench" / "models" / model)
    assert speed(made, 1, 512, 256) == pytest.approx(one, rel=0.03)
    assert speed(made, 64, 512, 256) == pytest.approx(many, rel=0.005)
    assert speed(made, 64, 4096, 1) == pytest.approx(prompts, rel=0.005)


def test_two_ranks_of_tensor_parallelism(shared: Path) -> None:
    """Also with experts as a whole on each."""
    made = steps(shared / "bench" / "models" / "qwen3-8b", Parallel(tp=2))
    assert speed(made, 1, 512, 256) == pytest.approx(441, rel=0.01)
    assert speed(made, 64, 512, 256) == pytest.approx(14_600, rel=0.01)
    assert speed(made, 64, 4096, 1) == pytest.approx(88_900, rel=0.01)
    made = steps(shared / "bench" / "models" / "qwen3-30b-a3b", Parallel(tp=2, experts=True))
    assert speed(made, 64, 512, 256) == pytest.approx(7400, rel=0.01)


def test_replicas_of_deepseek_v3(shared: Path) -> None:
    """docs/many.md: 128 requests with 2,048 tokens on each of 8 ranks, which hit all experts."""
    found = by_name(steps(shared / "hf" / "DeepSeek-V3", Parallel(dp=8, experts=True)).decode(128, 2048))
    assert found["routed experts"].num_bytes / 1e9 == pytest.approx(81.7, rel=0.002)
    assert (found["routed experts"].seconds or 0) * 1e3 == pytest.approx(19.0, rel=0.002)
    others = ("weights of attention", "dense layers, shared experts, routers", "head")
    assert sum(found[name].num_bytes for name in others) / 1e9 == pytest.approx(18.3, rel=0.005)
    read = found["attention over the KV cache"]
    assert read.num_bytes / 1e9 == pytest.approx(18.4, rel=0.005)
    products = 2 * 128 * (2 * 512 + 64) * 2048 * 128 * 61  # heads, absorbed, tokens, requests, layers
    assert read.operations == products and read.seconds == pytest.approx(products / H200.products)
    away, layers = 7 * (1 - comb(224, 8) / comb(256, 8)), 58
    row = 7168 + 4 * 56  # e4m3, with a scale for 128 columns
    sent = layers * 128 * (7 * 8 * 8 + away * (row + 2 * 7168))
    assert found["exchanges"].num_bytes == pytest.approx(sent)
    assert found["exchanges"].seconds == pytest.approx(sent / H200.link + 2 * layers * H200.exchange)


def test_passes_that_draft(shared: Path) -> None:
    """Three drafts: the layer is read by the first pass and two later ones, and the head three times."""
    folder = shared / "hf" / "DeepSeek-V3"
    plain, made = (steps(folder, Parallel(tp=8), **more) for more in ({}, MTP))
    assert "passes that draft" not in by_name(plain.decode(4, 2048))
    found, drafter = by_name(made.decode(4, 2048)), made.drafter
    assert drafter is not None
    dense, cache = drafter.weights(["attention", "others"], StepWork(1, 1, 2048)), 4 * 2048 * 1152
    experts = 11.27e9 / 8  # of a layer in e4m3, of which a rank has a slice
    hits = sum(times * (1 - (1 - 8 / 256) ** tokens) for times, tokens in ((1, 16), (2, 4)))
    expected = 3 * (dense.num_bytes + cache + found["head"].num_bytes) + experts * hits
    assert found["passes that draft"].num_bytes == pytest.approx(expected, rel=0.005)
    assert by_name(made.prompts(1, 512, 512))["passes that draft"].num_bytes < found["passes that draft"].num_bytes
    assert made.drafts(4) == 3 and made.drafts(1024) == 0, "so many rows are not verified"
    exchanged = [by_name(one.decode(4, 2048))["exchanges"].seconds or 0 for one in (plain, made)]
    assert exchanged[1] - exchanged[0] > 3 * 4 * H200.exchange, "three sums and a choice in each pass"


def test_passes_that_share_a_choice_score_nothing(shared: Path) -> None:
    """Later passes read neither keys of the indexer nor the weights of its queries and heads."""
    drafts = {"method": "mtp", "num_speculative_tokens": 3, "index_share_for_mtp_iteration": False}
    folder, costs = shared / "hf" / "GLM-5.2-FP8", list[StepPart]()
    for more in ({}, {"index_share_for_mtp_iteration": True}):
        made = steps(folder, Parallel(tp=8), speculative_config=drafts | more)
        costs.append(by_name(made.decode(4, 32_768))["passes that draft"])
    each, once = costs
    weights = 32 * 128 * 2048 + 4 * 32 * 6144  # in e4m3, and in float32
    assert each.num_bytes - once.num_bytes == pytest.approx(2 * (weights + 4 * 32_768 * 256), rel=0.01)
    assert each.operations - once.operations >= 2 * 4 * 2 * 32 * 128 * 32_768


def test_contexts_are_read_as_far_as_layers_see_them(shared: Path) -> None:
    """Chosen tokens, windows, and states, which are read and written."""
    glm = steps(shared / "hf" / "GLM-5", Parallel(tp=8))
    for context in (4096, 32_768):
        told = next(one for one in describe_chosen(glm.plan)["reads"] if one[0] == context)  # type: ignore[index]
        assert glm.model.reading(StepWork(3, 1, context)).num_bytes == 3 * told[2]
        assert glm.model.reading(StepWork(1, 4, context)).num_bytes == told[2], "rows of drafts choose mostly alike"
    assert glm.model.reading(StepWork(1, 1, 2048)).num_bytes == 78 * 2048 * 1152, "few tokens are all read"
    gpt = steps(shared / "hf" / "gpt-oss-20b")
    assert gpt.model.reading(StepWork(1, 1, 10_000)).num_bytes == 12 * (10_000 + 128) * 2048
    assert gpt.model.reading(StepWork(1, 1, 100)).num_bytes == 24 * 100 * 2048
    recurrent = steps(BENCH / "qwen3.5-9b")
    kept = recurrent.holdings.page(recurrent.rank).state_bytes
    assert recurrent.model.states(StepWork(5, 1, 100)).num_bytes == 2 * 5 * kept > 0
    assert "weights of attention and recurrent layers" in by_name(recurrent.decode(5, 100))


def test_rows_of_a_prompt_see_what_stands_before_them(shared: Path) -> None:
    """Its first rows see fewer tokens than a window has, or than an indexer chooses, and they choose none."""

    def pairs(rows: int, context: int, most: int) -> int:
        return sum(min(position, most) for position in range(context - rows + 1, context + 1))

    glm, gpt = steps(shared / "hf" / "GLM-5", Parallel(tp=8)), steps(shared / "hf" / "gpt-oss-20b")
    for rows, context in ((4096, 4096), (1000, 2500), (1000, 9000)):
        chosen = [position for position in range(context - rows + 1, context + 1) if position > 2048]
        wanted = 2 * 32 * 128 * sum(chosen) + 2 * 8 * (2 * 512 + 64) * pairs(rows, context, 2048)
        assert glm.model.reading(StepWork(3, rows, context)).operations == 3 * 78 * wanted
        seen = pairs(rows, context, 128) + pairs(rows, context, context)
        assert gpt.model.reading(StepWork(3, rows, context)).operations == 3 * 12 * 4 * 64 * 64 * seen


def test_exchanges_across_hosts_have_no_time(shared: Path) -> None:
    """Rows of decodes go to all ranks, as those of prompts."""
    config = EngineConfig.from_flat(model=str(shared / "hf" / "DeepSeek-V3"), load_format="dummy", max_num_seqs=64)
    floors = explained(config, Parallel(dp=32, experts=True), "h200").describe()["floors"]
    decode, _, prompts = floors["steps"]
    for step in (decode, prompts):
        (far,) = (one for one in step["parts"] if one["name"] == BETWEEN)
        row = 7168 + 4 * 56 + 8 * 8 + 2 * 7168
        assert far["seconds"] is None and far["num_bytes"] == 58 * 31 * step["requests"] * step["tokens"] * row
        assert step["seconds"] == pytest.approx(sum(one["seconds"] or 0 for one in step["parts"]))
    assert decode["slowest"] == "attention over the KV cache", (
        "8 experts a layer are fewer bytes than 128 heads multiply"
    )


def test_the_steps_that_are_told(shared: Path) -> None:
    """As many requests as the cache has room for; the slowest stage; a model that does not fit; a CPU."""

    def plan(model: str, parallel: Parallel = ALONE, device: str = "h200", **options: Any) -> Any:
        config = EngineConfig.from_flat(model=str(shared / "hf" / model), load_format="dummy", **options)
        return explained(config, parallel, device).describe()

    def floors(*given: Any, **options: Any) -> Any:
        return plan(*given, **options)["floors"]

    whole = plan("Qwen3-8B", max_num_seqs=256)
    small, room = whole["floors"], whole["memory"]["num_tokens"]
    assert [(one["kind"], one["context"], one["requests"], one["full"]) for one in small["steps"]] == [
        ("decode", 4096, room // 4096, True),
        ("decode", 40_960, room // 40_960, True),
        ("prompts", 8192, 1, False),
    ]
    assert small["rank"] == 0 and small["steps"][0]["slowest"] == "attention over the KV cache"
    short = floors("Qwen3-8B", max_num_seqs=8, max_model_len=2000, max_num_batched_tokens=4000)
    assert [(one["context"], one["requests"], one["tokens"]) for one in short["steps"]] == [
        (2000, 8, 1),
        (2000, 2, 2000),
    ]
    staged = floors("GLM-4.5", Parallel(tp=8, pp=2), max_num_seqs=64)
    assert staged["rank"] == 8 and staged["stages"] == 2 and staged["steps"][0]["requests"] == 32
    large = floors("GLM-4.5", max_num_seqs=64)
    assert [one["context"] for one in large["steps"]] == [4096, 8192], "no longer context where nothing fits"
    assert floors("Qwen3-0.6B", ALONE, "", max_num_seqs=4) is None, "no GPU is here"
    assert rates_of("cuda (described: NVIDIA H200, sm_90, 139.8 GiB)") is H200 and rates_of("this GPU") is None
