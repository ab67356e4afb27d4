"""Costs of steps: floors as `explain` has them, forecasts beside measured cells, and what cannot be told."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from quire import bench
from quire.config.engine import EngineConfig
from quire.contracts.parallel import ALONE
from quire.entry.cli.main import main
from quire.explain.cost import describe_cost
from quire.reports.gpu_rates import RATES
from quire.reports.step_costs import StepWork
from quire.reports.step_kernels import forecast, launches
from quire.reports.step_time import RankSteps

from ...support.explained import explained

H200 = RATES[0]
BENCH = Path(bench.__file__).with_name("models")
PROMPTS = 8192  # tokens of a step of prompts on a GPU
CELLS = {  # docs/performance.md, tokens/s of latency_b1, decode_b64, decode_b256 and prefill_4k on one H200
    "qwen3-0.6b": (1209, 25_021, 54_171, 373_953),
    "qwen3-8b": (246.7, 7027, 15_214, 41_326),
    "qwen3-8b-fp8": (349, 9514, 18_491, 57_043),
    "qwen3-8b-awq": (413, 8094, 14_234, 41_188),
    "qwen3-30b-a3b": (393.6, 3573, 11_294, 72_654),
    "qwen3-30b-a3b-fp8": (394, 5586, 16_139, 95_073),
    "deepseek-v2-lite": (488, 6401, 20_244, 107_339),
}
WORK = ((1, 512, 256), (64, 512, 256), (256, 256, 256), (64, 4096, 1))  # requests, tokens of a prompt, of an answer


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.from_flat(model=str(folder), load_format="dummy", **options)


@pytest.mark.parametrize("model", CELLS)
def test_forecasts_of_measured_cells(model: str) -> None:
    """Each within 15% of what was measured."""
    report = explained(config(BENCH / model), ALONE, "h200")
    rank, layers = report.holdings.held[0][0], list(report.layers())
    made = RankSteps(holdings=report.holdings, rank=rank, rates=H200, exchanges=[])
    counts = {prompts: launches(layers, rank.layers, prompts) for prompts in (False, True)}
    for work, measured in zip(WORK, CELLS[model], strict=True):
        requests, prompt, answer = work
        each = min(prompt, PROMPTS)
        step = StepWork(max(1, min(requests, PROMPTS // each)), each, each)
        spent = requests * prompt / step.tokens * forecast(made, counts[True], step, prompts=True).seconds
        for tokens in range(1, answer, 15):  # every fifteenth step, which stands for those behind it
            decode = forecast(made, counts[False], StepWork(requests, 1, prompt + tokens), prompts=False)
            spent += min(15, answer - tokens) * decode.seconds
        made_tokens = requests * (answer if answer > 1 else prompt + 1)
        assert made_tokens / spent == pytest.approx(measured, rel=0.15), work


def test_floors_are_those_of_explain() -> None:
    cost = describe_cost(config(BENCH / "qwen3-30b-a3b"), "h200", requests=64, context=1000)
    report = explained(config(BENCH / "qwen3-30b-a3b"), ALONE, "h200")
    made = RankSteps(holdings=report.holdings, rank=report.holdings.held[0][0], rates=H200, exchanges=[])
    floor = sum(one.seconds or 0 for one in made.decode(64, 1000))
    step = cost["steps"][0]
    assert step["floor"] == pytest.approx(floor, rel=1e-4)
    kernels = {one["name"]: one for one in step["kernels"]}
    qkv = kernels["attention.qkv"]
    assert qkv["num_bytes"] == 48 * 2 * 5120 * 2048 and qkv["operations"] == 48 * 2 * 64 * 5120 * 2048
    assert qkv["intensity"] == 64 and qkv["bound"] == "memory"
    many = describe_cost(config(BENCH / "qwen3-30b-a3b"), "h200", requests=512)
    assert next(one for one in many["steps"][0]["kernels"] if one["name"] == "head")["bound"] == "operations"
    assert step["seconds"] == pytest.approx(sum(one["seconds"] for one in step["kernels"]) + step["gaps"])
    assert cost["parameters"]["active"] == 3_041_867_776 and dict(cost["experts"])[1] == pytest.approx(8)


def test_latents_and_other_divisions(shared: Path) -> None:
    """DeepSeek-V3: 576 numbers of a token instead of 128 x (192 + 128). Layouts send what `explain` of them says."""
    folder = shared / "hf" / "DeepSeek-V3"
    cost = describe_cost(config(folder, tensor_parallel_size=8), "h200", requests=8, layouts=True)
    assert cost["latent"] == {"absorbed": 1152, "naive": 128 * 320 * 2}
    found = {one["layout"]: one for one in cost["layouts"]}
    asked = found["-tp 8"]
    assert asked["asked"] and asked["steps"][0] == [cost["steps"][0]["exchanges"], cost["steps"][0]["seconds"]]
    assert asked["steps"][0][0] > 0 and found["-tp 2"]["steps"][0][1] > asked["steps"][0][1]
    assert "-dp 8 --enable-expert-parallel" in found


def test_layouts_that_do_not_divide_the_model_say_why() -> None:
    cost = describe_cost(config(BENCH / "gemma-3-1b"), "h200", layouts=True)
    refused = [one["refused"] for one in cost["layouts"] if one["layout"] == "-tp 8"]
    assert refused and "4" in refused[0]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(BENCH / "qwen3-0.6b")
    assert main(["explain", model, "--device", "h200", "--cost", "--batch", "2", "--context", "1k"]) == 0
    out = capsys.readouterr().out
    assert "2 requests, 1 token each, context 1,000" in out and "mlp.gate_up" in out and "forecast" in out
    assert "replicas" not in out and main(["explain", model, "--device", "h200", "--cost", "-dp", "2"]) == 0
    assert "are those of one of 2 replicas" in capsys.readouterr().out
    assert main(["explain", model, "--cost", "--json", "--device", "cpu"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rates"] is None and told["parameters"]["active"] == told["parameters"]["all"]
    assert main(["explain", model, "--cost", "--json", "--device", "h200"]) == 0
    counted = ("name", "times", "num_bytes", "operations")
    here, there = (
        [[one[key] for key in counted] for one in cost["steps"][0]["kernels"]]
        for cost in (told, json.loads(capsys.readouterr().out))
    )
    assert here == there and told["steps"][0]["seconds"] is None and told["steps"][0]["kernels"][0]["bound"] is None
    assert main(["explain", "--cost", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "FLOP/byte" in out and "GFLOP, " in out and "forecast" not in out
    assert re.search(r"attention\.output .* 0\.\d{4} ", out)  # a decode has few operations
    assert all(line == line.rstrip() for line in out.splitlines())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--expert", "17"], "--rank N tells the rank of each expert"),
        (["--batch", "2"], "add --cost"),
        (["--layouts"], "add --cost"),
        (["--cost", "--context", "1m"], "longer than the model's 40,960"),
        (["--cost", "--batch", "0"], "0 is not a positive number"),
        (["--cost", "--batch", "x"], "x is no number such as 64 or 4k"),
        (["--cost", "--layouts", "--device", "cpu"], "--layouts compares seconds"),
        (["--diff", "'q"], "No closing quotation: quote its words once more"),
        (["--diff", ""], "compares with other flags or another model"),
        (["--diff", "--layer 0"], "--layer says what is printed, not what is planned"),
        (["--svg", "x.svg"], "x.svg is a name of one: give a folder"),
        (["--svg", "x", "--json"], "leave one out"),
        (["--svg", ""], "an empty text: give the folder"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["explain", str(BENCH / "qwen3-0.6b"), "--device", "h200", *flags]) != 0
    assert words in " ".join(capsys.readouterr().err.split())
