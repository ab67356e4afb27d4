"""Drafters with layers on simulated ranks: tokens are plain decoding's on one rank, and as many drafts are right.

Every exchange is compared over the ranks, so a rank that makes other passes than the others fails at once.
"""

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from quire.args.checkpoint import read_checkpoint_config
from quire.assemble.loaded import Parts
from quire.config.bundled import bundled_model
from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.distributed.expert_moves import ExpertMover
from quire.engine import balancer
from quire.engine.balancer import Balancer
from quire.engine.replicas import Core, Replicas

from ...support import eagle
from ...support.even_replicas import exchange_evenly
from ...support.full import FULL, full_rows
from ...support.prediction_layers import noisy, predicting, small
from ...support.simulated_engine import simulated
from ...support.tiny_models import Tiny, random_model, write_model
from .test_engine import BALANCED, until_moved

COUNT, DRAFTS = 20, 3
LEAST = 12  # drafts that are right, of the answers to `requests`
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": 24,
    "max_num_seqs": 6,
    "block_size": 16,
    "skip_tokenizer_init": True,
}
DP2: dict[str, Any] = {"dp": 2, "experts": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MTP = {"method": "mtp", "num_speculative_tokens": DRAFTS}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"repetition_penalty": 1.2},
    {"num_logprobs": 2},
    {"temperature": 0.8, "top_p": 0.8},
]
Models = Callable[[str], Path]


class Answers(NamedTuple):
    """Tokens of each request, its counts of drafts (made, first right, second right, ...), and preemptions, and
    blocks that came from tiers."""

    tokens: dict[int, list[int]]
    drafts: dict[int, tuple[int, ...]]
    preempted: int = 0
    loaded: int = 0

    @property
    def accepted(self) -> int:
        return sum(sum(counts[1:]) for counts in self.drafts.values())


def request(handle: int, prompt: list[int], count: int = COUNT, **kind: Any) -> NewRequest:
    return NewRequest(
        handle=handle,
        request_id=str(handle),
        token_ids=np.array(prompt, np.uint32).tobytes(),
        max_tokens=count,
        sampler=SamplerSpec(seed=handle, num_prompt=len(prompt), **{"temperature": 0.0} | kind),
    )


def requests() -> list[NewRequest]:
    """Prompts in one chunk and in several, likeliest tokens and drawn ones, of other lengths: replicas get idle."""
    return [
        request(i, [(7 * i + j * j + 3) % 90 for j in range(3 + 11 * i)], 8 + 5 * i, **kind)
        for i, kind in enumerate(KINDS)
    ]


def run(
    folder: Path,
    asked: list[NewRequest],
    wait: Callable[[Core, list[Parts]], None] = lambda core, parts: None,
    **options: Any,
) -> Answers:
    """Answer requests, of which two come late: other replicas decode meanwhile, and later they are idle.

    wait   called after every step
    """
    made, parts = simulated(folder, **SETTINGS | options)
    tokens: dict[int, list[int]] = {one.handle: [] for one in asked}
    drafts, waiting, steps = dict[int, tuple[int, ...]](), list(asked), 0
    try:
        while waiting or made.has_work:
            while waiting and (steps > 4 or len(asked) - len(waiting) < 3):
                made.add(waiting.pop(0))
            outputs = made.step()
            wait(made, parts)
            steps += 1
            for handle, token in zip(outputs.handles.tolist(), outputs.tokens.tolist(), strict=True):
                tokens[handle].append(token)
            for finish in outputs.finished:
                assert finish.error is None
                drafts[finish.handle] = tuple(map(int, finish.drafts))
        made.check()
    finally:
        made.shutdown()
    cores = made.cores if isinstance(made, Replicas) else (made,)
    loaded = sum(tier.num_loaded for one in cores for tier in one.state().stats.tiers.values())
    return Answers(tokens, drafts, sum(one.scheduler.num_preempted for one in cores), loaded)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Makes a model with a prediction layer, of which about half of the drafts are right."""
    return functools.cache(lambda family: predicting(tmp_path_factory.mktemp(family), family, bundled_model(), 0.04))


@functools.cache
def plain(folder: Path) -> Answers:
    """Answers of one rank without drafts."""
    return run(folder, requests())


@functools.cache
def alone(folder: Path, drafts: str, tp: int) -> Answers:
    """Answers of one replica that drafts; drafts: its `speculative_config` as JSON."""
    return run(folder, requests(), speculative_config=json.loads(drafts), tp=tp)


SIZES: dict[str, dict[str, Any]] = {
    "dp2-ep": DP2,
    "dp2-tp2-ep": DP2 | {"tp": 2},
    "dp4-ep": DP2 | {"dp": 4},
    "dp2-ep-in-turn": DP2 | {"expert_placement_strategy": "round_robin"},
}
MORE = [(family, size) for family in ("deepseek_v3", "glm4_moe", "glm4_moe_lite") for size in SIZES]


FIRST = [("deepseek_v3", "dp2-ep"), ("glm4_moe", "dp2-tp2-ep"), ("glm_moe_dsa", "dp2-tp2-ep")]


@pytest.mark.parametrize(("family", "size"), [*FIRST, *full_rows(MORE)])
def test_replicas_make_the_drafts_of_one_rank(family: str, size: str, models: Models) -> None:
    folder = models(family)
    drafted = alone(folder, json.dumps(MTP), SIZES[size].get("tp", 1))
    found = run(folder, requests(), **SIZES[size], speculative_config=MTP)
    assert found.tokens == plain(folder).tokens == drafted.tokens
    assert found.accepted > LEAST and found.drafts == drafted.drafts


@pytest.mark.parametrize(
    ("drafts", "sizes"),
    [
        (MTP, DP2),
        *full_rows([(MTP, SIZES["dp2-tp2-ep"]), (MTP, SIZES["dp4-ep"]), (NGRAM, DP2), (MTP, DP2 | {"pp": 2})]),
    ],
)
def test_drafts_with_decodes_of_one_size_on_all_replicas(
    drafts: dict[str, Any], sizes: dict[str, Any], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models("deepseek_v3")
    drafted = alone(folder, json.dumps(drafts), sizes.get("tp", 1))
    steps = exchange_evenly(monkeypatch)
    found = run(folder, requests(), **sizes, speculative_config=drafts)
    assert found.tokens == plain(folder).tokens and found.drafts == drafted.drafts
    assert {bound for bound, *_ in steps} >= {0, 2 * (1 + DRAFTS)}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("deepseek_v3", {"dp": 2}), *full_rows([("glm4_moe", {"tp": 2}), ("glm4_moe", {"dp": 2, "tp": 2})])],
)
def test_experts_of_the_draft_layer_move(
    family: str, sizes: dict[str, Any], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counts are there, it is the last layer that switches, and its drafts are as before."""
    monkeypatch.setattr(balancer, "LEAST_GAIN", -1.0)
    switched, loads, real = list[int](), list[Any](), ExpertMover.switch
    monkeypatch.setattr(ExpertMover, "switch", lambda mover, layer: switched.append(layer) or real(mover, layer))
    plan = Balancer._plan
    monkeypatch.setattr(Balancer, "_plan", lambda own, load: loads.append(load) or plan(own, load))
    folder = models(family)
    found = run(folder, requests(), until_moved, **BALANCED, **sizes, speculative_config=MTP)
    drafted = alone(folder, json.dumps(MTP), sizes.get("tp", 1))
    assert found.tokens == plain(folder).tokens and found.drafts == drafted.drafts and found.accepted > LEAST
    num_layers = len(loads[0])
    assert num_layers - 1 in switched and all(load[-1].sum() > 0 for load in loads)
    assert num_layers == 1 + sum(layer.experts is not None for layer in read_checkpoint_config(folder).layers[:4])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, models: Models) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """Makes models and drafters: a model with noise in its weights, a small one without experts, EAGLE heads."""

    @functools.cache
    def make(kind: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "mtp":
            return models("glm4_moe"), MTP
        if kind == "ngram":
            write_model(random_model(Tiny(family="glm4_moe"), 0), folder, "glm4_moe")
            return folder, NGRAM
        if kind.startswith("eagle"):
            target = eagle.model(folder / "model", bundled_model(), 0.001, "gpt_oss")
            eagle.write(folder / "drafter", kind, eagle.knowing(kind, target))
        else:
            target = models("glm4_moe")
            {"noisy": noisy, "small": small}[kind](target, folder / "drafter")
        method = kind if kind.startswith("eagle") else "draft_model"
        return target, {"method": method, "model": str(folder / "drafter"), "num_speculative_tokens": DRAFTS}

    return make


FEW: list[tuple[str, dict[str, Any], int]] = [
    ("noisy", DP2 | {"tp": 2}, 0),
    ("small", DP2 | {"tp": 2}, 1),
    ("eagle3", {"tp": 2, "experts": True}, 1),
]
MANY: list[tuple[str, dict[str, Any], int]] = [
    (kind, sizes, whole)
    for kind in ("noisy", "small", "eagle", "eagle3")
    for sizes in ({"tp": 2}, {"dp": 2}, {"tp": 2, "experts": True}, DP2, DP2 | {"tp": 2})
    for whole in (0, 1)
]


@pytest.mark.parametrize(("kind", "sizes", "whole"), [*FEW, *full_rows(MANY)])
def test_drafters_of_another_checkpoint(kind: str, sizes: dict[str, Any], whole: int, pairs: Any) -> None:
    """The ranks divide the drafter as the model, or each rank has the whole of it."""
    folder, given = pairs(kind)
    drafted = alone(folder, json.dumps(given), sizes.get("tp", 1))
    given = given | ({"draft_tensor_parallel_size": 1} if whole else {})
    found = run(folder, requests(), **sizes, speculative_config=given)
    assert found.tokens == plain(folder).tokens == drafted.tokens
    assert found.accepted > LEAST and found.drafts == drafted.drafts


STAGES: list[tuple[str, dict[str, Any]]] = [
    ("ngram", {"pp": 2}),
    ("mtp", {"pp": 3, "tp": 2}),
    ("mtp", DP2 | {"pp": 2}),
    ("noisy", DP2 | {"pp": 2}),
]
MORE_STAGES: list[tuple[str, dict[str, Any]]] = [
    (kind, sizes)
    for kind in ("ngram", "mtp", "noisy", "small", "eagle")
    for sizes in ({"pp": 2}, {"pp": 3}, {"pp": 2, "tp": 2}, {"pp": 2, "tp": 2, "experts": True}, DP2 | {"pp": 2})
]


@pytest.mark.parametrize(("kind", "sizes"), [*STAGES, *full_rows(MORE_STAGES)])
def test_drafts_of_a_pipeline(kind: str, sizes: dict[str, Any], pairs: Any) -> None:
    """The last stage drafts as one rank does."""
    folder, given = pairs(kind)
    found = run(folder, requests(), **sizes, speculative_config=given)
    assert found.tokens == plain(folder).tokens
    assert found.accepted >= (3 if kind == "ngram" else LEAST), found.drafts
    if kind != "ngram" and "tp" not in sizes:  # n-grams are not tried where none is found
        assert found.drafts == alone(folder, json.dumps(given), 1).drafts


TIERS: list[tuple[str, dict[str, Any]]] = [
    ("mtp", DP2),
    ("noisy", {"pp": 2}),
]
MORE_TIERS: list[tuple[str, dict[str, Any]]] = [
    (kind, sizes)
    for kind in ("mtp", "noisy", "small", "eagle")
    for sizes in ({"tp": 2}, {"pp": 2}, DP2, DP2 | {"pp": 2}, DP2 | {"tp": 2})
]


@pytest.mark.parametrize(("kind", "sizes"), [*TIERS, *full_rows(MORE_TIERS)])
def test_drafts_over_kv_tiers(kind: str, sizes: dict[str, Any], pairs: Any, tmp_path: Path) -> None:
    """Requests come again when the device has dropped their blocks, which come back with the entries of drafters."""
    folder, given = pairs(kind)
    asked = [request(i, [(i % 6 + 3 * j) % 90 for j in range(34)], 9) for i in range(12)]
    expected = run(folder, asked)
    tiers = {"kv_offload_gb": 0.01, "kv_offload_dir": str(tmp_path), "kv_offload_policy": "write_through"}
    small = {"num_gpu_blocks_override": 10 if kind == "eagle" else 5, "max_num_seqs": 1}  # with two KV groups
    found = run(folder, asked, **tiers, **small, **sizes, speculative_config=given)
    assert found.tokens == expected.tokens and found.accepted > 10
    assert found.loaded > 0, "no block came from a tier"


SCHEDULES = 40 if FULL else 1


@pytest.mark.parametrize("sizes", [DP2, DP2 | {"pp": 2}, *full_rows([{"pp": 3}, DP2 | {"tp": 2}])], ids=str)
@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_random_schedules(seed: int, sizes: dict[str, Any], models: Models) -> None:
    """Requests come at any time, some are aborted, blocks are short, and k changes with the load."""
    draw, folder = random.Random(seed), models("deepseek_v3")
    asked = [
        request(i, [draw.randrange(90) for _ in range(draw.choice([2, 9, 33]))], draw.choice([2, 9, 24]))
        for i in range(12 if FULL else 8)
    ]
    expected = run(folder, asked).tokens
    by_batch = draw.choice([None, [[1, 1, 3], [2, 2, 1], [3, 9, 0]]])
    core, _ = simulated(
        folder,
        **SETTINGS,
        **sizes,
        async_depth=draw.choice([1, 2]),
        num_gpu_blocks_override=draw.choice([6, 20]),
        speculative_config=MTP | ({"num_speculative_tokens_per_batch_size": by_batch} if by_batch else {}),
    )
    tokens: dict[int, list[int]] = {one.handle: [] for one in asked}
    waiting, aborted = list(asked), set[int]()
    try:
        while waiting or core.has_work:
            if waiting and draw.random() < 0.3:
                core.add(waiting.pop(0))
            if core.handles and draw.random() < 0.03:
                aborted.add(handle := draw.choice(core.handles))
                core.abort(handle)
            outputs = core.step()
            for handle, token in zip(outputs.handles.tolist(), outputs.tokens.tolist(), strict=True):
                tokens[handle].append(token)
            assert all(finish.error is None for finish in outputs.finished)
        core.check()
    finally:
        core.shutdown()
    for handle, found in tokens.items():
        assert found == expected[handle][: len(found) if handle in aborted else None]
