"""Random tiny checkpoints of every architecture give transformers' logits and tokens, however a run is scheduled.

Logits: those that were sampled from, as they were in the run, and log-probabilities of every position of the finished
sequences. Tokens: 40 greedy ones, with --full 64. The checkpoints are resampled until no greedy choice is close (see
conftest).
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.args.checkpoint import read_checkpoint_config
from quire.contracts.blocks import KVGroup
from quire.plan.kinds import mixer
from quire.plan.kv_geometry import layer_groups

from ..support.full import FULL, full_rows, only_full
from ..support.logits_tap import LogitsTap
from ..support.pairwise import Row, label, pairwise
from ..support.tiny_models import ALONE, DENSE, EXPERTS, FAMILIES, tiny_config

NUM_TOKENS = 64 if FULL else 40  # of the longest prompts, 61 and 45 tokens, some blocks are filled by answers
ATOL = 1e-4

CHECKPOINTS: dict[str, Sequence[Any]] = {
    "family": DENSE,
    "tied": (False, True),
    "heads": ((4, 2), (3, 1), (6, 3), (5, 5)),
    "rope": ("default", "theta", "linear", "dynamic", "llama3", "yarn"),
    "bias": (False, True),
}
WITH_EXPERTS: dict[str, Sequence[Any]] = {
    "family": EXPERTS,
    "tied": (False, True),
    "heads": ((4, 2), (3, 1), (5, 5)),
    "rope": ("default", "linear", "yarn"),
    "bias": (False, True),
}
RUNS: dict[str, Sequence[Any]] = {
    "batch": (7, 1),
    "chunk": (7, 16, 64),
    "block_size": (8, 16),
    "prefix": (True, False),
    "depth": (1, 2),
    "pool": ("normal", "small"),
}
Greedy = Callable[..., SamplingParams]


def possible(row: Mapping[str, Any]) -> bool:
    """False for a lone request with preemption, and for biases and rotations that the family does not have."""
    if row.get("batch") == 1 and row.get("pool") == "small":
        return False
    family = FAMILIES[row.get("family", "qwen3")]
    return row.get("rope", "default") in family.ropes and not (row.get("bias") and not family.biases)


def product(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    rows = [dict(zip(factors, combination, strict=True)) for combination in itertools.product(*factors.values())]
    return [row for row in rows if possible(row)]


def split(row: Row) -> tuple[Row, Row]:
    return {k: row[k] for k in CHECKPOINTS}, {k: row[k] for k in RUNS}


@only_full
@pytest.mark.parametrize("checkpoints", [CHECKPOINTS, WITH_EXPERTS])
def test_the_cover_has_every_pair(checkpoints: Mapping[str, Sequence[Any]]) -> None:
    factors = {**checkpoints, **RUNS}
    rows = pairwise(factors, possible)
    one, other = sorted(map(len, factors.values()))[-2:]
    assert all(possible(row) for row in rows) and len(rows) < 1.1 * one * other, "a row for each pair of the longest"
    for (a, xs), (b, ys) in itertools.combinations(factors.items(), 2):
        for x, y in itertools.product(xs, ys):
            assert possible({a: x, b: y}) == any(row[a] == x and row[b] == y for row in rows), (a, x, b, y)


# --- logits and tokens ------------------------------------------------------------------------------------------------


class SampledLogits:
    """Collects what the worker samples from, each row with the tokens that its slot then held."""

    def __init__(self, llm: LLM) -> None:
        self.rows: list[tuple[tuple[int, ...], np.ndarray]] = []
        self._history = llm.engine.worker.state.tables.history
        llm.engine.worker.features.attach(LogitsTap(self))

    def __call__(self, slots: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor) -> None:
        for slot, position, row in zip(slots.tolist(), positions.tolist(), logits, strict=True):
            self.rows.append((tuple(self._history[slot, :position].tolist()), row.numpy().copy()))


def small_pool(folder: Any, run: Row) -> int:
    """Blocks that two of the longest sequences need at once, and a few more."""
    args = read_checkpoint_config(folder)
    windows = [mixer(args.layers[layers[0]].mixer).window for layers in layer_groups(args)]
    groups = [KVGroup(layers=(), components=(), block_size=run["block_size"], window=one) for one in windows]
    return 2 * sum(one.most_blocks(61 + NUM_TOKENS, run["chunk"]) for one in groups) + 2


def build(engine: Callable[..., LLM], folder: Any, run: Row, **more: Any) -> LLM:
    options: Row = {
        "max_num_batched_tokens": run["chunk"],
        "block_size": run["block_size"],
        "async_depth": run["depth"],
        "enable_prefix_caching": run["prefix"],
        "max_num_seqs": min(7, run["chunk"]),
        "max_logprobs": -1,
    }
    if run["pool"] == "small":
        options["num_gpu_blocks_override"] = small_pool(folder, run)
    return engine(folder, **options, **more)


def check_run(llm: LLM, oracle: Any, prompts: list[list[int]], run: Row, greedy: Greedy) -> None:
    mine = prompts if run["batch"] == 7 else prompts[4:5]
    expected = oracle.greedy(mine, NUM_TOKENS)
    sampled = SampledLogits(llm)
    outputs = llm.generate(mine, greedy(NUM_TOKENS), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert (llm.engine.core.scheduler.num_preempted > 0) == (run["pool"] == "small")
    whole = [p + e for p, e in zip(mine, expected, strict=True)]
    truth = {tuple(ids[: n + 1]): row for ids in whole for n, row in enumerate(oracle.logits(ids))}
    assert len(sampled.rows) == NUM_TOKENS * len(mine)
    for known, row in sampled.rows:
        np.testing.assert_allclose(row, truth[known], atol=ATOL, rtol=0)
    again = llm.generate(mine, greedy(8), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [e[:8] for e in expected]
    if run["pool"] == "normal":
        geometry = llm.engine.memory.geometry
        alone = set(geometry.windows) == {1}  # later tokens read no block of a prefix: it is found without being stored
        block = geometry.hit_size if run["prefix"] or alone else len(whole[-1]) + 1
        assert [o.num_cached_tokens for o in again] == [(len(p) - 1) // block * block for p in mine]
    scored = llm.generate(whole, SamplingParams(max_tokens=0, prompt_logprobs=-1), use_tqdm=False)
    for ids, out in zip(whole, scored, strict=True):
        got = out.prompt_logprobs
        assert got is not None and got[0] is None and len(got) == len(ids)
        table = np.array([[row[i].logprob for i in range(len(row))] for row in got[1:] if row is not None])
        np.testing.assert_allclose(table, oracle.logprobs(ids)[:-1], atol=ATOL, rtol=0)


KINDS = ("qwen3", "qwen3_moe", "deepseek_v3")  # dense layers, experts, latent attention
CHUNKED = list(FAMILIES) if FULL else ALONE


def chosen() -> list[Row]:
    """A row of families with chunks, and a second one of each of KINDS with the rest of RUNS.

    Options of a checkpoint change from row to row: each value of CHECKPOINTS is in one of them.
    """
    chunked = {"batch": 7, "prefix": True}
    runs = [chunked | {"chunk": (16, 7)[i % 2], "block_size": (8, 16)[i // 2 % 2]} for i in range(len(CHUNKED))]
    for i, run in enumerate(runs):
        run |= {"depth": 2 - (i % 3 == 2), "pool": ("small", "normal")[i % 2]}
    runs += [{"batch": 1, "chunk": 64, "block_size": 16, "prefix": False, "depth": 1, "pool": "normal"}] * len(KINDS)
    rows = []
    for i, (family, run) in enumerate(zip([*CHUNKED, *KINDS], runs, strict=True)):
        factors = WITH_EXPERTS if family in EXPERTS else CHECKPOINTS
        spec = {name: values[i % len(values)] for name, values in factors.items()} | {"family": family}
        for name, plain in (("rope", "default"), ("bias", False)):
            if not possible({"family": family, name: spec[name]}):
                spec[name] = plain
        rows.append(spec | run)
    return rows


def test_the_chosen_rows_have_every_value() -> None:
    rows = chosen()
    assert all(possible(row) for row in rows)
    for name, values in (CHECKPOINTS | {"family": (*CHUNKED, *KINDS)} | RUNS).items():
        assert {row[name] for row in rows} >= set(values), name


@pytest.mark.parametrize(
    "row",
    [
        *chosen(),
        *full_rows(pairwise(CHECKPOINTS | RUNS, possible) if FULL else ()),
        *full_rows(pairwise(WITH_EXPERTS | RUNS, possible) if FULL else ()),
    ],
    ids=label,
)
def test_logits_and_tokens(
    row: Row, oracle: Any, tiny: Any, engine: Any, prompts: list[list[int]], greedy: Greedy
) -> None:
    spec, run = split(row)
    checkpoint = oracle(tiny(**spec), NUM_TOKENS)
    check_run(build(engine, checkpoint.folder, run), checkpoint, prompts, run, greedy)


@only_full
@pytest.mark.parametrize("spec", pairwise(CHECKPOINTS, possible) + pairwise(WITH_EXPERTS, possible), ids=label)
def test_logits_and_tokens_of_the_full_product(
    spec: Row, oracle: Any, tiny: Any, engine: Any, prompts: list[list[int]], greedy: Greedy
) -> None:
    checkpoint = oracle(tiny(**spec), NUM_TOKENS)
    for run in product(RUNS):
        with build(engine, checkpoint.folder, run) as llm:
            check_run(llm, checkpoint, prompts, run, greedy)
            llm.engine.core.check()


@pytest.mark.parametrize("rope", ["theta", "linear", "llama3", "yarn"])
def test_old_spellings_of_a_config_mean_the_same(rope: str, tiny: Any, tmp_path: Path) -> None:
    """`rope_theta` beside `rope_scaling`, `type` for `rope_type`, `torch_dtype` for `dtype`."""
    new = tiny_config(tiny(family="llama", rope=rope))
    old = {name: value for name, value in new.items() if name not in ("rope_parameters", "dtype")}
    scaling = dict(new["rope_parameters"])
    old["rope_theta"], kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else scaling | {"type": kind}
    old["torch_dtype"] = new["dtype"]
    read = []
    for config in (new, old):
        (tmp_path / "config.json").write_text(json.dumps(config))
        read.append(read_checkpoint_config(tmp_path))
    assert read[0] == read[1] and read[0].mixers[0].rope.theta == new["rope_parameters"]["rope_theta"]


def test_the_oracle_notices_a_wrong_cache(oracle: Any, prompts: list[list[int]]) -> None:
    """Greedy answers depend on the early prompt; otherwise none of these tests could fail for a broken cache."""
    prompt = prompts[-1]
    changed = [prompt[0] % 95 + 1, *prompt[1:]]
    a, b = oracle().greedy([prompt, changed], 64)
    assert len(set(a)) > 20 and a != b


# --- what is reused, and that it is not computed ----------------------------------------------------------------------

CASES = [(8, 1), (16, 2), *full_rows([(8, 2), (16, 1)])]


@pytest.fixture(params=CASES, ids=lambda case: f"block{case[0]}-depth{case[1]}")
def case(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    yield request.param


@pytest.mark.parametrize("length", [16, 45, *full_rows([32, 61])])
def test_a_second_identical_request_computes_only_the_rest(
    case: tuple[int, int], length: int, oracle: Any, engine: Any, record: Any, prompts: list[list[int]], greedy: Greedy
) -> None:
    block, depth = case
    prompt = next(p for p in prompts if len(p) == length)
    llm = engine(oracle().folder, block_size=block, async_depth=depth)
    expected = oracle().greedy([prompt], 64)[0][:12]
    seen = record(llm)
    for reused in (0, (length - 1) // block * block, (length - 1) // block * block):
        before = seen.num_computed
        out = llm.generate(prompt, greedy(12), use_tqdm=False)[0]
        assert out.outputs[0].token_ids == expected
        assert out.num_cached_tokens == reused
        assert seen.num_computed - before == length + 11 - reused


def test_generated_tokens_are_reused_too(
    case: tuple[int, int], oracle: Any, engine: Any, record: Any, prompts: list[list[int]], greedy: Greedy
) -> None:
    """A second turn: the prompt, its answer, and something new. The newest answer token was never computed."""
    block, depth = case
    llm = engine(oracle().folder, block_size=block, async_depth=depth)
    answer = llm.generate(prompts[3], greedy(30), use_tqdm=False)[0].outputs[0].token_ids
    seen = record(llm)
    turn = [*prompts[3], *answer, 7, 8]
    out = llm.generate(turn, greedy(8), use_tqdm=False)[0]
    reused = (23 + 29) // block * block
    assert out.num_cached_tokens == reused
    assert seen.num_computed == len(turn) + 7 - reused
    assert out.outputs[0].token_ids == oracle().greedy([turn], 8)[0]


def test_the_other_completions_of_n_share_the_full_blocks_of_the_prompt(
    case: tuple[int, int], oracle: Any, engine: Any, record: Any, prompts: list[list[int]]
) -> None:
    block, depth = case
    prompt, n, count = prompts[5], 4, 10
    llm = engine(oracle().folder, block_size=block, async_depth=depth)
    seen = record(llm)
    params = SamplingParams(n=n, seed=3, max_tokens=count, ignore_eos=True)
    out = llm.generate(prompt, params, use_tqdm=False)[0]
    shared = (len(prompt) - 1) // block * block
    assert out.num_cached_tokens == 0
    assert seen.num_computed == n * (len(prompt) + count - 1) - (n - 1) * shared
    admitted = [a for plan in seen.plans for a in plan.admitted]
    assert [a.num_computed for a in admitted] == [0] + [shared] * (n - 1)
    assert len({tuple(c.token_ids) for c in out.outputs}) == n


def test_a_resumed_request_finds_its_blocks(
    case: tuple[int, int], oracle: Any, engine: Any, record: Any, prompts: list[list[int]], greedy: Greedy
) -> None:
    """Two requests outgrow the pool; the second gives way, and on its return computes only what was evicted."""
    block, depth = case
    pair, count = [prompts[4], prompts[5]], 64
    total = [len(p) + count for p in pair]
    pool = math.ceil(total[0] / block) + math.ceil(total[1] / block) - 4
    llm = engine(
        oracle().folder,
        block_size=block,
        async_depth=depth,
        max_num_seqs=2,
        watermark=0.0,
        num_gpu_blocks_override=pool,
    )
    seen = record(llm)
    outputs = llm.generate(pair, greedy(count), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == oracle().greedy(pair, 64)
    assert llm.engine.core.scheduler.num_preempted == 1
    *first, resumed = [a for plan in seen.plans for a in plan.admitted]
    assert [a.num_computed for a in first] == [0, 0]
    # When it gave way the pool was empty; what was not its own was the first's, which then grew to its end: first over
    # its blank blocks, then over its full ones from the last. The full blocks before those are found again.
    known = len(resumed.token_ids)
    held = math.ceil((known - 1) / block)
    grown = math.ceil((total[0] - 1) / block) - (pool - held)
    full = (known - 1) // block
    assert grown > held - full, "the case is too easy: nothing was evicted"
    assert resumed.num_computed == (full - (grown - (held - full))) * block > 0
    assert seen.num_computed == total[0] - 1 + known - 1 + total[1] - 1 - resumed.num_computed
