"""Engines of simulated ranks: the tokens of one rank, whatever is cut, scheduled and asked for.

Every exchange is compared over the ranks. Checkpoints are those whose greedy choices are clear, so that no rounding
decides a token.
"""

import functools
import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.assemble.loaded import Parts
from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.distributed.expert_moves import ExpertMover
from quire.engine import balancer
from quire.engine.balancer import Balancer
from quire.engine.core import EngineCore
from quire.engine.replicas import Core, Replicas
from quire.layers.indexer import Indexer
from quire.worker.balancing import RankBalancing

from ...support.balancing import moving
from ...support.even_replicas import exchange_evenly
from ...support.features import feature
from ...support.full import full_rows
from ...support.late_copies import apart
from ...support.logits_tap import LogitsTap
from ...support.quantized_checkpoints import FORMS, quantize_checkpoint
from ...support.simulated_engine import simulated
from ...support.tiny_models import (
    DENSE,
    EXPERTS,
    FAMILIES,
    MARGIN,
    ON_RANKS,
    Tiny,
    mixed_prompts,
    random_model,
    write_model,
)

SIZES: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2}, "tp4": {"tp": 4}, "pp2": {"pp": 2}, "tp2-pp2": {"tp": 2, "pp": 2}, "pp3": {"pp": 3},
    "pp2-by-hand": {"pp": 2, "pipeline_layer_partition": (2, 1)},
    "tp2-ep": {"tp": 2, "experts": True}, "tp4-ep": {"tp": 4, "experts": True},
    "dp2-ep2": {"dp": 2, "experts": True}, "dp2-tp2-ep4": {"dp": 2, "tp": 2, "experts": True},
    "tp2-ep-in-turn": {"tp": 2, "experts": True, "expert_placement_strategy": "round_robin"},
    "dp2-ep2-in-turn": {"dp": 2, "experts": True, "expert_placement_strategy": "round_robin"},
    "dp2-pp2-ep2": {"dp": 2, "pp": 2, "experts": True}, "dp4-ep4": {"dp": 4, "experts": True},
}  # fmt: skip
COUNT = 14  # tokens of an answer: experts are moved after every 6 steps
BALANCED: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "experts": True,
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 4, "step_interval": 6, "window_size": 4},
}
Folders = Callable[[str], Path]


@dataclass
class Answers:
    """Tokens and log-probabilities of every request, and the logits that greedy tokens were chosen from."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[np.ndarray]] = field(default_factory=dict)
    logits: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (first token of the prompt, position)
    num_preempted: int = 0


def requests() -> list[NewRequest]:
    """Greedy ones, sampled ones, filters, penalties and log-probabilities."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "num_logprobs": 3},
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "num_prompt_logprobs": 2},
    ]
    return [
        NewRequest(
            handle=i,
            request_id=str(i),
            token_ids=np.array(ids, np.uint32).tobytes(),
            max_tokens=COUNT,
            sampler=SamplerSpec(seed=i, num_prompt=len(ids), **kind),
        )
        for i, (ids, kind) in enumerate(zip(mixed_prompts(), kinds, strict=True))
    ]


def run(folder: Path, wait: Callable[[Core, list[Parts]], None] = lambda core, parts: None, **options: Any) -> Answers:
    """Answer the requests; `wait` is called after every step."""
    settings: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "block_size": 16, "dtype": "float32"}
    core, parts = simulated(folder, **(settings | options))
    found = Answers()

    def keep(own: EngineCore, slots: Tensor, positions: Tensor, logits: Tensor) -> None:
        for slot, position, row in zip(slots.tolist(), positions.tolist(), logits, strict=True):
            request = own.scheduler.table.requests[slot]
            if request is not None:
                found.logits[request.new.handle, position] = row.clone()

    cores = core.cores if isinstance(core, Replicas) else (core,)
    for part in parts:
        assert part.worker is not None and part.model is not None
        rank = part.plan.mesh.rank
        if part.model.last:
            own = functools.partial(keep, cores[rank.replica])
            part.worker.features.attach(LogitsTap(own if rank.place == 0 else lambda slots, positions, logits: None))
    try:
        for request in requests():
            core.add(request)
            found.tokens[request.handle] = []
        while core.has_work:
            outputs = core.step()
            wait(core, parts)
            for handle, token in zip(outputs.handles.tolist(), outputs.tokens.tolist(), strict=True):
                found.tokens[handle].append(token)
            for finish in outputs.finished:
                assert finish.error is None
        found.num_preempted = sum(one.scheduler.num_preempted for one in cores)
        core.check()
    finally:
        core.shutdown()
    return found


def clear(answers: Answers) -> bool:
    """True where no greedy choice is close."""
    tops = torch.stack([row.topk(2).values for (handle, _), row in answers.logits.items() if handle not in (2, 4)])
    return bool(((tops[:, 0] - tops[:, 1]) > MARGIN).all())


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], tuple[Path, Answers]]:
    @functools.cache
    def made(family: str, tied: bool) -> tuple[Path, Answers]:
        for seed in range(20):
            folder: Path = tmp_path_factory.mktemp(family)
            write_model(random_model(Tiny(family=family, tied=tied), seed), folder, family)
            answers = run(folder, skip_tokenizer_init=True)
            if clear(answers):
                return folder, answers
        raise AssertionError(f"{family}: all seeds have close choices")

    return made


def compare(found: Answers, expected: Answers) -> None:
    """Logits within 1e-5 of the largest one of the row."""
    assert found.tokens == expected.tokens
    assert found.logits.keys() == expected.logits.keys()
    for key, row in found.logits.items():
        most = float(expected.logits[key].abs().max())
        torch.testing.assert_close(row, expected.logits[key], rtol=0, atol=1e-5 * max(most, 1.0))


def until_moved(core: Core, parts: list[Parts]) -> None:
    """Wait for the next map, and for the movers' next layer: how many steps they take depends on the machine."""
    assert isinstance(core, Replicas) and core.balancer is not None
    if core.balancer._planned is not None:
        core.balancer._planned.result(timeout=60)
    for part in parts:
        assert part.worker is not None
        mover = feature(part.worker, RankBalancing)._mover
        with mover._changed:
            due = mover._before + min(len(mover._work), mover._switched + 1)
            assert mover._changed.wait_for(lambda mover=mover, due=due: mover.told >= due, 60)  # type: ignore[misc]


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 3}], ids=str)
def test_all_ranks_attend_to_the_same_tokens(
    truths: Any, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slices, each rank chooses the same positions. With stages, the second one shares an indexer of the first."""
    found: dict[int, list[Tensor]] = {}
    forward = Indexer.forward

    def noted(*given: Any) -> Any:
        chosen = forward(*given)
        found.setdefault(threading.get_ident(), []).append(chosen.positions)
        return chosen

    folder, expected = truths("glm_moe_dsa", False)
    monkeypatch.setattr(Indexer, "forward", noted)
    compare(run(folder, skip_tokenizer_init=True, **sizes), expected)
    assert len(found) == 2
    if "tp" in sizes:
        one, other = found.values()
        assert sum(map(len, one)) > 300
        for ours, theirs in zip(one, other, strict=True):
            assert torch.equal(ours, theirs)


IN_TURN = {"expert_placement_strategy": "round_robin"}
MOVED: tuple[dict[str, Any], ...] = (
    {"tp": 2},
    {"dp": 2} | IN_TURN,
    {"dp": 2, "tp": 2},
    {"dp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "pipeline_layer_partition": (1, 2)} | IN_TURN,
)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *((family, MOVED[number % len(MOVED)]) for number, family in list(enumerate(EXPERTS))[::4]),
        *full_rows((family, sizes) for sizes in MOVED for family in EXPERTS),
    ],
    ids=str,
)
def test_experts_that_move_while_requests_are_served(
    truths: Any, family: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    switched: list[int] = []
    real = ExpertMover.switch
    monkeypatch.setattr(ExpertMover, "switch", lambda mover, layer: switched.append(layer) or real(mover, layer))
    monkeypatch.setattr(balancer, "LEAST_GAIN", -1.0)
    folder, expected = truths(family, family == "qwen3_moe")
    raw = json.loads((folder / "config.json").read_text())
    count = next(raw[name] for name in ("num_local_experts", "num_experts", "n_routed_experts") if raw.get(name))
    settings = {"num_redundant_experts": -count % 4 or 4, "step_interval": 6, "window_size": 4}
    compare(run(folder, until_moved, **BALANCED | {"eplb_config": settings}, **sizes), expected)
    assert switched, "no layer was switched to another map"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Answers]]:
    """Makes a checkpoint of 8-bit weights in which the scales of an expert need another type than those of others."""

    @functools.cache
    def made(form: str) -> tuple[Path, Answers]:
        for seed in range(20):
            plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp(form)
            model = random_model(Tiny(family="qwen3_moe", tied=True), seed)
            model.save_pretrained(plain)
            stored = load_file(plain / "model.safetensors")
            for name, tensor in stored.items():
                if ".experts.5." in name:
                    tensor *= 1e-7
            save_file(stored, plain / "model.safetensors", {"format": "pt"})
            quantize_checkpoint(plain, folder, FORMS[form])
            answers = run(folder, skip_tokenizer_init=True)
            if clear(answers):
                return folder, answers
        raise AssertionError(f"{form}: all seeds have close choices")

    return made


@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        ("ct-int8-weights", {"tp": 2}),
        ("ct-w8-zeros", {"dp": 2}),
        *full_rows((("ct-int8-weights", {"dp": 2}), ("ct-w8-zeros", {"tp": 2}))),
    ],
    ids=str,
)
def test_quantized_experts_that_move(
    quantized: Any, form: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balancer, "LEAST_GAIN", -1.0)
    switched: list[int] = []
    real = ExpertMover.switch
    monkeypatch.setattr(ExpertMover, "switch", lambda mover, layer: switched.append(layer) or real(mover, layer))
    folder, expected = quantized(form)
    compare(run(folder, until_moved, **BALANCED, **sizes), expected)
    assert switched, "no layer was switched to another map"


def test_a_mover_that_is_frozen_leaves_the_old_map_in_use(
    truths: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every request gets its tokens, and a warning comes once."""
    monkeypatch.setattr(balancer, "LEAST_GAIN", -1.0)
    monkeypatch.setattr(balancer, "DEADLINE", 0.0)
    real, frozen, seen = ExpertMover._fetch, threading.Event(), list[Balancer]()

    def fetch(mover: ExpertMover, layer: int, moves: Any) -> Any:
        if mover._group.rank == 1:
            frozen.wait(120)
        return real(mover, layer, moves)

    def planned(core: Core, parts: list[Parts]) -> None:
        assert isinstance(core, Replicas) and core.balancer is not None
        seen.append(core.balancer)
        if core.balancer._planned is not None:
            core.balancer._planned.result(timeout=60)

    monkeypatch.setattr(ExpertMover, "_fetch", fetch)
    folder, expected = truths("qwen3_moe", True)
    with caplog.at_level("WARNING", "quire"):
        compare(run(folder, planned, **BALANCED, dp=2), expected)
    frozen.set()
    assert moving(seen[0]) and seen[0]._switched == 0 and np.array_equal(seen[0].experts.experts[0, :8], np.arange(8))
    assert caplog.text.count("no expert weights have moved for") == 1 and "the old map" in caplog.text


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", "dp2-tp2-ep4"),
        *full_rows([("qwen3_moe", "dp2-pp2-ep2"), ("qwen3", "tp4"), ("glm_moe_dsa", "tp2-pp2"), ("gpt_oss", "tp2-ep")]),
    ],
)
def test_weights_in_host_memory(truths: Any, family: str, sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank streams its own layers; a replica without tokens, too, because others need its experts."""
    folder, expected = truths(family, family in ("qwen3", "qwen3_moe"))
    made = apart(monkeypatch, 1)
    compare(run(folder, skip_tokenizer_init=True, enforce_eager=True, cpu_offload_gb=1.0, **SIZES[sizes]), expected)
    ranks = math.prod(SIZES[sizes].get(name, 1) for name in ("tp", "pp", "dp"))
    assert len(made) == ranks and all(copies.copied for copies in made)


@pytest.mark.parametrize(
    ("sizes", "balanced"),
    [
        ("dp2-ep2", False),
        *full_rows((sizes, False) for sizes in ("dp2-tp2-ep4", "dp2-pp2-ep2", "dp4-ep4", "dp2-ep2-in-turn")),
        *full_rows((sizes, True) for sizes in ("dp2-ep2", "dp2-tp2-ep4")),
    ],
)
def test_decodes_of_one_size_on_all_replicas(
    truths: Any, sizes: str, balanced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas with fewer decodes, or none, bring padding; steps with prompts exchange exact numbers."""
    folder, expected = truths("qwen3_moe", True)
    steps, more = exchange_evenly(monkeypatch), {"skip_tokenizer_init": True}
    if balanced:
        monkeypatch.setattr(balancer, "LEAST_GAIN", -1.0)
        more = BALANCED
    compare(run(folder, *[until_moved] * balanced, **more | SIZES[sizes]), expected)
    assert {bound for bound, *_ in steps} >= {0, 2}
    assert any(bound and 0 < min(rows) < max(rows) for bound, *rows in steps)
    assert any(bound and not min(rows) for bound, *rows in steps), "a replica without tokens joins"


PLACED = [
    (family, sizes)
    for family in FAMILIES
    for sizes in SIZES
    if not SIZES[sizes].get("experts") or family in EXPERTS
    if not SIZES[sizes].get("pp") or family != "gemma4_inputs"  # which has no pipeline: see plan/meeting_rows
]


def once(kind: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each family of a kind once, and sizes in turn: those with `experts` for families that have some."""
    found = []
    for number, family in enumerate(family for family in ON_RANKS if family in kind):
        sizes = [size for name, size in PLACED if name == family and ("ep" in size) == (kind is EXPERTS)]
        found.append((family, sizes[number % len(sizes)]))
    return found


ONCE = [*once(DENSE), *once(EXPERTS)]


@pytest.mark.parametrize(("family", "sizes"), [*ONCE, *full_rows(PLACED)])
def test_tokens_and_logits_of_one_rank(truths: Any, family: str, sizes: str) -> None:
    """Every size in a row at least, and families that have no row in e2e/test_parity.py; with --full all pairs."""
    assert {sizes for _, sizes in ONCE} == set(SIZES)
    folder, expected = truths(family, family in ("qwen3", "qwen3_moe"))
    compare(run(folder, skip_tokenizer_init=True, **SIZES[sizes]), expected)
