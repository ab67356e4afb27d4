"""Output for real models on described devices. SNAPSHOTS=1 writes the files anew: read what changed."""

import io
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from quire.config.engine import EngineConfig
from quire.contracts.parallel import Parallel
from quire.explain.describe import one_layer
from quire.explain.render import render

from ...support.explained import explained
from ...support.full import full_rows

FOLDER = Path(__file__).with_name("snapshots")
TOGETHER = Parallel(tp=8, experts=True)
CASES = {
    "deepseek-v3-tp8-ep": ("DeepSeek-V3", TOGETHER, "h200", None),
    "qwen3-30b-a3b": ("Qwen3-30B-A3B", Parallel(), "h200", None),
    "qwen3-30b-a3b-tp8-ep": ("Qwen3-30B-A3B", TOGETHER, "h200", None),
    "glm-4.5-dp2-pp2-ep": ("GLM-4.5", Parallel(tp=4, pp=2, dp=2, experts=True), "h200", None),
    "mixtral-8x7b": ("Mixtral-8x7B-v0.1", Parallel(), "h100", None),  # too small
    "qwen3-0.6b": ("Qwen3-0.6B", Parallel(), "a100", None),
    "deepseek-v2-lite-layer-0": ("DeepSeek-V2-Lite", Parallel(), "h200", "0"),
}
FULL_CASES = {
    "deepseek-v3": ("DeepSeek-V3", Parallel(), "h200", None),
    "glm-4.5": ("GLM-4.5", Parallel(), "h100", None),
    "glm-4.5-tp8-ep": ("GLM-4.5", TOGETHER, "h200", None),
    "gpt-oss-20b-tp2": ("gpt-oss-20b", Parallel(tp=2), "h200", None),
    "deepseek-v3-dp8-ep": ("DeepSeek-V3", Parallel(dp=8, experts=True), "h200", None),
}


@pytest.mark.parametrize("name", [*CASES, *full_rows(FULL_CASES)])
def test_plans_of_real_models(shared: Path, name: str) -> None:
    model, parallel, device, layer = (CASES | FULL_CASES)[name]
    config = EngineConfig.from_flat(model=str(shared / "hf" / model))
    plan = explained(config, parallel, device).describe()
    plan["model"]["name"] = model  # not where it lies
    out = io.StringIO()
    plan = one_layer(plan, layer) if layer else plan
    Console(file=out, width=160, highlight=False).print(render(plan, bool(layer)))
    text = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
    text = re.sub(r"(dispatchers|expert_rows)\.py:\d+", r"\1.py:LINE", text)
    file = FOLDER / f"{name}.txt"
    if os.environ.get("SNAPSHOTS"):
        file.write_text(text)
    assert text == file.read_text()
