"""Checkpoints that store all experts of a layer in one tensor give the logits and tokens of transformers."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.assemble.quantize_checkpoint import Recipe, plan_quantization
from quire.contracts.errors import ConfigError
from quire.explain.verify.parity import verify

from ..support.stacked_checkpoints import round_experts, stack_experts, write_mxfp4
from ..support.tiny_models import MARGIN, Oracle, Tiny, generate, random_model, write_model
from .test_parity import build, check_run

RUN = {"batch": 7, "chunk": 16, "block_size": 8, "prefix": True, "depth": 2, "pool": "normal"}


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> Oracle:
    """A random gpt-oss with experts in MXFP4, and transformers' model with the numbers that they mean.

    96 numbers between gate and down are three blocks: two ranks have unequal slices.
    """
    spec = Tiny(family="gpt_oss", rope="yarn", bias=True, changes=(("intermediate_size", 96),))
    for seed in itertools.count():
        model = random_model(spec, seed)
        blocks = round_experts(model)
        runs = generate(model, prompts, 64)
        if min(min(leads) for _, leads in runs) > MARGIN:
            break
    folder = tmp_path_factory.mktemp("mxfp4")
    write_model(model, folder / "plain", "gpt_oss")
    write_mxfp4(folder / "plain", blocks, folder / "quantized")
    return Oracle(folder / "quantized", model, {tuple(p): t for p, (t, _) in zip(prompts, runs, strict=True)})


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_stacked_experts(
    family: str,
    oracle: Callable[[Tiny], Oracle],
    tmp_path: Path,
    engine: Callable[..., LLM],
    prompts: list[list[int]],
    greedy: Any,
) -> None:
    known = oracle(Tiny(family=family))
    stacked = replace(known, folder=stack_experts(known.folder, tmp_path / "stacked"))
    llm = build(engine, stacked.folder, RUN)
    moe = llm.engine.worker.model.args.moe
    assert moe is not None and moe.stored == "rows"
    check_run(llm, stacked, prompts, RUN, greedy)


def test_mxfp4(mxfp4: Oracle, engine: Callable[..., LLM], prompts: list[list[int]], greedy: Any) -> None:
    llm = build(engine, mxfp4.folder, RUN)
    params = {param.name: param for param in llm.engine.worker.model.layout}
    scheme = params["layers.1.mlp.experts.down"].scheme
    assert scheme is not None and scheme.values == "e2m1"
    check_run(llm, mxfp4, prompts, RUN, greedy)


def test_verify_reads_stacks_back(mxfp4: Oracle, oracle: Callable[[Tiny], Oracle], tmp_path: Path) -> None:
    """The comparison with transformers finds every number of a quantized stack in the form that transformers reads."""
    stacked = stack_experts(oracle(Tiny(family="qwen3_moe")).folder, tmp_path / "stacked")
    for folder in (stacked, mxfp4.folder):
        report = verify(str(folder))
        assert report.ok, str(report)


def test_dummy_weights_have_the_form_of_config_json(mxfp4: Oracle, tmp_path: Path, engine: Callable[..., LLM]) -> None:
    """No name of a tensor tells: quantization_config does."""
    (tmp_path / "config.json").write_text((mxfp4.folder / "config.json").read_text())
    llm = engine(tmp_path, load_format="dummy")
    model = llm.engine.worker.model
    assert model.args.moe is not None and model.args.moe.stored == "paired blocks"
    assert len(llm.generate([[1, 2, 3]], use_tqdm=False)[0].outputs[0].token_ids) > 0


def test_quantize_refuses_stacks(oracle: Callable[[Tiny], Oracle], tmp_path: Path) -> None:
    folder = stack_experts(oracle(Tiny(family="qwen3_moe")).folder, tmp_path / "stacked")
    with pytest.raises(ConfigError, match="stores all experts of a layer in one tensor"):
        plan_quantization(folder, Recipe(scheme="fp8-block"))
