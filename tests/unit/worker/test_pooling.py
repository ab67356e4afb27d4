"""Rows of steps become one vector a request, however its prompt is cut and whoever is in the step beside it."""

from typing import Any

import numpy as np
import pytest
import torch

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import POOL, SAMPLE, Admission, StepPlan
from quire.worker.features import Found
from quire.worker.pooling import Pooler

HIDDEN, SLOTS = 5, 4
METHODS = ("mean", "last", "cls")


pytestmark = pytest.mark.usefixtures("one_thread")


def norm(rows: torch.Tensor) -> torch.Tensor:
    return 2 * rows - 1


def admission(slot: int, length: int, pool: str, computed: int = 0) -> Admission:
    empty = np.empty(0, np.int32)
    return Admission(
        slot=slot,
        request_id="",
        token_ids=empty,
        block_ids=(empty,),
        num_computed=computed,
        sampler=SamplerSpec(seed=0, num_prompt=length),
        pool=pool,
    )


def plan(
    tokens: dict[int, int], *admitted: Admission, outputs: dict[int, int] | None = None, released: tuple[int, ...] = ()
) -> StepPlan:
    bits = [(outputs or {}).get(slot, POOL) for slot in tokens]
    return StepPlan(
        step=0,
        slots=np.array(list(tokens), np.int32),
        num_decodes=0,
        num_tokens=np.array([*tokens.values()], np.int32),
        num_rows=np.zeros(len(tokens), np.int32),
        outputs=np.array(bits, np.uint8),
        admitted=admitted,
        released=np.array(released, np.int32),
    )


def results(pooler: Pooler, step: StepPlan, hidden: torch.Tensor) -> Found:
    pooler.apply(step)
    found = pooler.computed(step, hidden)
    return found() if found else {"pooled": {}, "failed": {}}


def run(pooler: Pooler, step: StepPlan, hidden: torch.Tensor) -> dict[int, np.ndarray]:
    return results(pooler, step, hidden)["pooled"]


def expected(states: np.ndarray, pool: str) -> np.ndarray:
    rows = 2 * states - 1
    return {"mean": rows.mean(0), "last": rows[-1], "cls": rows[0]}[pool]


@pytest.mark.parametrize("seed", range(6))
def test_every_cut_gives_the_same_vector(seed: int) -> None:
    """Slots are taken by one prompt after the other; each goes through in chunks, beside others and beside a decode."""
    rng: Any = np.random.default_rng(seed)
    pooler, live, done = Pooler(norm), dict[int, list[Any]](), 0
    for _ in range(30):
        tokens, admitted, released, rows = dict[int, int](), [], [], []
        for slot in range(SLOTS - 1):
            if slot not in live:
                length, pool = int(rng.integers(1, 12)), METHODS[rng.integers(3)]
                computed = int(rng.integers(0, length)) if pool == "last" else 0  # the rest is in the prefix cache
                states = rng.normal(size=(length, HIDDEN)).astype(np.float32)
                live[slot] = [states, pool, computed]
                admitted.append(admission(slot, length, pool, computed))
                if done:
                    released.append(slot)
            states, pool, at = live[slot]
            tokens[slot] = count = int(rng.integers(1, len(states) - at + 1))
            rows.append(states[at : at + count])
            live[slot][2] += count
        tokens[SLOTS - 1] = 1
        rows.append(rng.normal(size=(1, HIDDEN)).astype(np.float32))
        order = rng.permutation(SLOTS)
        shuffled = {list(tokens)[i]: list(tokens.values())[i] for i in order}
        padding = np.full((3, HIDDEN), np.nan, np.float32)
        hidden = torch.from_numpy(np.concatenate([*(rows[i] for i in order), padding]))
        found = run(pooler, plan(shuffled, *admitted, outputs={SLOTS - 1: SAMPLE}, released=tuple(released)), hidden)
        ended = [slot for slot, (states, _, at) in live.items() if at == len(states)]
        assert sorted(found) == sorted(ended)
        for slot in ended:
            states, pool, _ = live.pop(slot)
            np.testing.assert_allclose(found[slot], expected(states, pool), rtol=1e-5, atol=1e-6)
            assert found[slot].dtype == np.float32
            done += 1
    assert done > 20


def test_a_slot_that_was_given_back_keeps_nothing() -> None:
    pooler = Pooler(norm)
    ones = torch.ones(4, HIDDEN)
    assert run(pooler, plan({1: 4}, admission(1, 6, "mean")), 1000 * ones) == {}
    found = run(pooler, plan({1: 4}, admission(1, 4, "mean"), released=(1,)), ones)
    np.testing.assert_array_equal(found[1], np.ones(HIDDEN))
    run(pooler, plan({2: 2}, admission(2, 6, "mean")), ones)
    assert run(pooler, plan({3: 1}, outputs={3: SAMPLE}, released=(1, 2)), ones) == {} and not pooler._prompts


def test_what_is_no_number_stays_with_its_request() -> None:
    pooler, hidden = Pooler(norm), torch.ones(9, HIDDEN)
    hidden[4, 2], hidden[8, 0] = torch.nan, torch.inf
    admitted = [admission(0, 3, "mean"), admission(1, 3, "mean"), admission(2, 3, "last")]
    found = results(pooler, plan({0: 3, 1: 3, 2: 3}, *admitted), hidden)
    assert found["failed"] == {1: "nan_hidden", 2: "nan_hidden"}
    np.testing.assert_array_equal(found["pooled"][0], np.ones(HIDDEN))


def test_half_precision_is_summed_in_single() -> None:
    hidden = torch.full((3000, HIDDEN), 1.0, dtype=torch.bfloat16)  # a bfloat16 sum of ones stops at 256
    found = run(Pooler(lambda rows: rows), plan({0: 3000}, admission(0, 3000, "mean")), hidden)
    np.testing.assert_allclose(found[0], np.ones(HIDDEN), rtol=1e-6)


def test_nobody_asks_and_nothing_is_launched() -> None:
    def never(rows: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    assert run(Pooler(never), plan({0: 2}, admission(0, 2, ""), outputs={0: SAMPLE}), torch.ones(2, HIDDEN)) == {}
