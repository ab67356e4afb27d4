"""Experts that move between the processes of ranks while requests are served: tokens are those of one rank."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput
from quire.engine import balancer
from quire.engine.replicas import Replicas

from ..e2e.serving import running_server
from ..support.balancing import moving
from ..support.full import full_rows, only_full
from ..support.many_ranks import SIZES, Fault, Left
from .test_answers import ask, compare, requests

SMALL_FLAGS = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--kv-cache-memory-bytes", "4M")
ROUNDS = 30  # of requests, in which every layer must have moved


def balanced(folder: Path, ranks: int = 4) -> dict[str, Any]:
    """The options with which experts of this model move between `ranks`, or fewer of 4, every few steps."""
    raw = json.loads((folder / "config.json").read_text())
    count = next(raw[name] for name in ("num_local_experts", "num_experts", "n_routed_experts") if raw.get(name))
    settings = {"num_redundant_experts": -count % ranks or ranks, "step_interval": 8, "window_size": 4}
    return {"enable_eplb": True, "eplb_config": settings}


def balancer_of(llm: LLM) -> balancer.Balancer:
    core = llm.engine.core
    assert isinstance(core, Replicas) and core.balancer is not None
    return core.balancer


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", "dp2-ep"),
        *full_rows([("deepseek_v3", "tp2-ep"), ("deepseek_v3", "dp2-tp2-ep"), ("gpt_oss", "dp2-ep")]),
    ],
)
def test_every_layer_moves_while_requests_are_served(
    family: str,
    sizes: str,
    checkpoint: Callable[[str], Path],
    engine: Callable[..., LLM],
    truth: Callable[..., list[RequestOutput]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(balancer, "LEAST_GAIN", -1.0)
    folder = checkpoint(family)
    expected = truth(requests(24), folder)
    ranks = engine(folder, **SIZES[sizes], **balanced(folder), async_depth=2)
    for _ in range(ROUNDS):
        compare(ask(ranks, requests(24)), expected)
        if balancer_of(ranks)._total:
            break
    assert balancer_of(ranks)._total, "not every layer was switched to another map"
    assert 0 < balancer_of(ranks).balancedness <= 1
    compare(ask(ranks, requests(24)), expected)


@only_full  # `tests/unit/distributed/test_engine.py` has it with simulated ranks
def test_a_mover_of_a_rank_that_is_frozen_leaves_the_old_map_in_use(
    left: Left,
    tmp_path: Path,
    checkpoint: Callable[[str], Path],
    engine: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Requests get their tokens, a warning comes after the deadline, and the engine ends as always."""
    monkeypatch.setattr(balancer, "LEAST_GAIN", -1.0)
    monkeypatch.setattr(balancer, "DEADLINE", 0.05)
    moment, folder = tmp_path / "moment", checkpoint("qwen3_moe")
    expected = ask(engine(folder), requests())
    for name, text in Fault(1, "mover", "freeze").variables(moment).items():
        monkeypatch.setenv(name, text)
    ranks = engine(folder, **SIZES["dp2-ep"], **balanced(folder))
    with caplog.at_level("WARNING", "quire"):
        for _ in range(ROUNDS):
            compare(ask(ranks, requests()), expected)
            if "no expert weights have moved" in caplog.text:
                break
    assert moment.exists() and caplog.text.count("no expert weights have moved for") == 1
    assert moving(balancer_of(ranks)) and balancer_of(ranks)._switched == 0


def test_a_server_tells_the_balancedness(left: Left, checkpoint: Callable[[str], Path]) -> None:
    """The core's process logs it, and its notes come to the server's stderr."""
    folder = checkpoint("qwen3_moe")
    settings = json.dumps(balanced(folder)["eplb_config"] | {"log_balancedness": True})
    flags = ("-dp", "2", "-ep", "--enable-eplb", "--eplb-config", settings, "--skip-tokenizer-init", *SMALL_FLAGS)
    with running_server(str(folder), *flags, **left.variables) as server:
        assert server.ask("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 24, "ignore_eos": True}).status == 200
        line = r"^quire core: balancedness of experts over the last steps: ([01]\.\d{3})$"
        found = re.findall(line, server.stderr, re.MULTILINE)
        assert found and all(0 < float(number) <= 1 for number in found), server.stderr
