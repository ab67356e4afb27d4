"""Products of adapters in the interpreter: any mixture of adapters and ranks gives the reference's numbers."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")

from quire.adapters.slots import plan_slots
from quire.assemble.adapters import products_of
from quire.config.adapters import AdapterConfig
from quire.config.engine import SchedulerConfig
from quire.contracts.adapters import Adapter
from quire.contracts.protocols import Executor, ExecutorFacts
from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import StepPlan
from quire.engine.adapters import AdapterSlots
from quire.engine.core import EngineCore
from quire.kernels import triton_runtime
from quire.kernels.activation.ref import gated
from quire.kernels.experts import ref as experts_ref
from quire.kernels.experts import scaled, triton, weight_only
from quire.kernels.experts.inputs import Case, make, make_quantized, packed_by
from quire.kernels.lora import (
    TALL,
    AdapterRows,
    AdapterWeights,
    OutputRun,
    grouped,
    native,
    pairs,
    ref,
    tile_of,
    triton_gated,
)
from quire.kernels.lora import triton as lora
from quire.kernels.lora.inputs import LoraInputs, make_inputs
from quire.kernels.native.library import missing
from quire.kernels.step.state import Limits
from quire.kv.allocator import KVAllocator
from quire.kv.pool import BlockPool
from quire.layers.adapters import AdaptedExperts, AdapterBank, HeldAdapter, attach
from quire.worker.runner import StepRunner

from ..support.compared import BLOCK, LENGTH, SLOTS, kv_geometry, make_model, model_args, runner_of
from ..support.full import FULL, full_rows
from ..support.quantized_cases import SCALED, WEIGHT_ONLY

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from .test_cuda_worker import Event, Recording

MIXED = [0, -1, 2, 0, 2, 2, -1, 1, 0]


def truth(given: LoraInputs) -> torch.Tensor:
    """The definition, row by row and output by output."""
    y = given.y.clone()
    for row, slot in enumerate(given.rows.slots.tolist()):
        if slot >= 0 and (rank := int(given.weights.ranks[slot])):
            inner = given.weights.a[slot, :, :rank] @ given.x[row]
            for run in given.weights.runs:
                own = given.weights.b[slot, run.row : run.row + run.rows, :rank]
                y[row, run.first : run.first + run.rows] += own @ inner[run.module]
    return y


@pytest.mark.parametrize("slots", [[0], [-1], MIXED, [1] * 40 + [0] * 3], ids=["one", "none", "mixed", "many"])
@pytest.mark.parametrize(
    ("sizes", "width", "rank", "ranks"),
    [((40, 24), 70, 16, [3, 16, 1]), ((130,), 512, 64, [64, 20, 0]), ((1, 5), 33, 24, [24, 1, 7])],
)
def test_any_mixture(slots: list[int], sizes: tuple[int, ...], width: int, rank: int, ranks: list[int]) -> None:
    given = make_inputs(slots, sizes, width, rank, ranks=ranks)
    expected = truth(given)
    for kernel in (lora, ref, *([] if missing() else [native])):
        weights = given.weights
        if kernel is ref:  # it multiplies all ranks: those of a slot that the adapter lacks are zero there
            weights = replace(weights, a=weights.a.nan_to_num(), b=weights.b.nan_to_num())
        y = given.y.clone()
        kernel.expand(y, kernel.shrink(given.x, weights, given.rows), weights, given.rows)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        without = given.rows.slots < 0
        assert torch.equal(y[without], given.y[without]), "rows without an adapter keep their bits"


def test_tiles_behind_those_of_the_step_are_empty() -> None:
    """As a captured step has them: tables of the largest step, and more rows of x than the step has."""
    given = make_inputs(MIXED, (40,), 70, 16, ranks=[3, 16, 1])
    expected, most = truth(given), len(MIXED) + 5
    tiles = torch.zeros(7, 3, dtype=torch.int32)
    tiles[: len(given.rows.tiles)] = given.rows.tiles
    order = torch.full((most,), 1 << 20, dtype=torch.int32)
    order[: len(given.rows.order)] = given.rows.order
    rows = AdapterRows(torch.full((most,), -1, dtype=torch.int32), order, tiles)
    x, y = (
        torch.nn.functional.pad(given.x, (0, 0, 0, 5), value=torch.nan),
        torch.nn.functional.pad(given.y, (0, 0, 0, 5)),
    )
    lora.expand(y, lora.shrink(x, given.weights, rows), given.weights, rows)
    torch.testing.assert_close(y[: len(MIXED)], expected, rtol=1e-5, atol=1e-5)
    assert not y[len(MIXED) :].any()


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_of_inputs_and_programs_that_take_turns(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As matrices of a real size have them; the counters of parts are zeros again behind a step."""
    monkeypatch.setattr(lora, "RESIDENT", 3)
    given = make_inputs(MIXED, (40, 24), 250, 16, ranks=[3, 16, 1])
    tiles = torch.cat([given.rows.tiles, torch.zeros(2, 3, dtype=torch.int32)])
    rows = replace(given.rows, tiles=tiles, used=torch.tensor([len(given.rows.tiles)], dtype=torch.int32))
    walk = lora.Tiling(parts, deep=64, stages=1, outputs=16)
    found = [given.y.clone() for _ in range(2)]
    for y in found:
        lora.expand(y, lora.shrink(given.x, given.weights, rows, walk=walk), given.weights, rows, walk=walk)
    torch.testing.assert_close(found[0], truth(given), rtol=1e-5, atol=1e-5)
    assert torch.equal(*found)


def test_rows_of_long_prompts_in_taller_tiles() -> None:
    given = make_inputs([1] * 40 + [-1] + [0] * 70, (40, 24), 70, 16, ranks=[3, 16])
    rows = grouped(given.rows.slots.numpy(), given.rows.slots.device, TALL)
    assert [count for _, _, count in rows.tiles.tolist()] == [64, 6, 40]
    y = given.y.clone()
    lora.expand(y, lora.shrink(given.x, given.weights, rows), given.weights, rows)
    torch.testing.assert_close(y, truth(given), rtol=1e-5, atol=1e-5)


def test_tables_of_all_sizes_are_made_ahead() -> None:
    """A captured step of any size finds them: the host writes no memory while a graph is captured."""
    a, b, ranks = (torch.empty(*shape, device="meta") for shape in ((1, 2, 16, 64), (1, 16384, 16), (1,)))
    weights = AdapterWeights(a, b, ranks, tuple(OutputRun(half, 8192 * half, 8192, 8192 * half) for half in range(2)))
    lora.prepare(weights)
    sizes = set()
    for count in (1, 256, 4096):
        rows = AdapterRows(
            *(torch.empty(count, device="meta") for _ in range(2)), torch.empty(1, 3), tile=tile_of(count)
        )
        sizes.add(lora.tiling(weights, rows, count).outputs)
    assert len(sizes) == 2
    assert {0, *sizes} == {size for size, _ in weights.tables}


@pytest.mark.parametrize("slots", [MIXED, [-1] * 3, [1] * 40 + [0] * 3], ids=["mixed", "none", "many"])
def test_the_activation_behind_an_adapted_product(slots: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without an adapter, or with one that does not change the layer, are computed, too."""
    monkeypatch.setattr(triton_gated, "RESIDENT", 3)
    given = make_inputs(slots, (200, 200), 70, 16, ranks=[3, 16, 0])
    assert lora.fuses(given.weights)
    assert not lora.fuses(replace(given.weights, runs=given.weights.runs[:1]))
    before = given.y.clone()
    inner = lora.shrink(given.x, given.weights, given.rows)
    found = lora.expand_gated(given.y, inner, given.weights, given.rows, "silu")
    torch.testing.assert_close(found, gated(truth(given), "silu"), rtol=1e-5, atol=1e-5)
    assert torch.equal(given.y, before)


EXPERTS: dict[str, Any] = {"plain": triton, "fp8 block": scaled, "int8 token": scaled, "w4 128": weight_only}


@pytest.mark.parametrize("kind", ["plain", *full_rows(one for one in EXPERTS if one != "plain")])
@pytest.mark.parametrize("alone", [False, True])
def test_routed_experts(kind: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of three adapters, of none, and of experts of other ranks; sorted, and each by itself."""
    kernel, dtype = EXPERTS[kind], torch.float32 if kind == "plain" else torch.float16
    case, slots = Case(9, 3, 2, 128, 128 if kind != "plain" else 40), torch.tensor(MIXED)
    if kind == "plain":
        x, weights, ids, *own = make(case, dtype)
        matrices = list(zip(*own, strict=True))
    else:
        x, weights, ids, matrices = make_quantized(case, (SCALED | WEIGHT_ONLY)[kind], dtype, torch.device("cpu"))
    ids = (ids + torch.arange(9)[:, None].int() // 5) % 4  # expert 3 is another rank's
    places = torch.tensor([2, 0, 1, -1], dtype=torch.int32)
    sides = []
    for sizes, width in (((case.inner, case.inner), case.hidden), ((case.hidden,), case.inner)):
        each = [make_inputs([0], sizes, width, 16, ranks=[3, 16, 1], dtype=dtype, seed=n).weights for n in range(3)]
        a, b, ranks = (torch.stack([getattr(one, name) for one in each], 1) for name in ("a", "b", "ranks"))
        ranks[1, 2] = 0
        sides.append(AdapterWeights(a, b / 4, ranks, each[0].runs))
    zeroed = [replace(one, a=one.a.nan_to_num(), b=one.b.nan_to_num()) for one in sides]
    residual, rows = torch.randn_like(x), grouped(slots.numpy().astype(np.int32), x.device)
    monkeypatch.setattr(pairs, "MOST_GROUPS", 1 if alone else 4096)
    if alone:  # factors of pairs count once, not in each part of K
        tiling = lora.tiling
        monkeypatch.setattr(lora, "tiling", lambda *sizes: tiling(*sizes)._replace(parts=2, deep=16))
    found = []
    for one, (own_lora, made) in ((kernel, (lora, sides)), (experts_ref, (ref, zeroed))):
        packed = packed_by(one, [pair[0] for pair in matrices], [pair[1] for pair in matrices])
        adapters = AdaptedExperts(own_lora, *made).of_step(rows)
        found.append(one.run_adapted(x, (weights, ids, places), packed, residual.clone(), adapters))
    plain = experts_ref.run(x, weights, ids, packed, places, residual.clone())
    error, moved = ((found[1].float() - one.float()).norm() / found[1].float().norm() for one in (found[0], plain))
    bound = 1e-5 if kind == "plain" else 0.15  # the kernels of 8 bits differ from the reference by 0.1 without adapters
    assert error < min(bound, moved / 1.5), (error, moved)


@pytest.mark.parametrize("first", [0, 3])
def test_inputs_by_module_and_rows_behind_the_first_of_a_step(first: int) -> None:
    """As the up-projection of latent attention has them: x of each head, one A for all heads, a part of the rows."""
    given = make_inputs(MIXED, (6, 6, 6), 20, 16, ranks=[3, 16, 1])
    random = torch.Generator().manual_seed(1)
    x = torch.randn(len(MIXED), 3, 20, generator=random)
    a = given.weights.a[:, :1].expand(-1, 3, -1, -1)
    runs = tuple(OutputRun(head, 6 * head, 4, 6 * head + 2) for head in range(3))
    weights = AdapterWeights(a, given.weights.b, given.weights.ranks, runs)
    zeroed = replace(weights, a=a.nan_to_num(), b=weights.b.nan_to_num())
    found = []
    for kernel, own in ((lora, weights), (ref, zeroed)):
        y = given.y[first:].clone()
        kernel.expand(y, kernel.shrink(x[first:], own, given.rows, first), own, given.rows, first)
        found.append(y)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[0], given.y[first:])


def test_half_numbers_are_added_in_float32() -> None:
    given = make_inputs(MIXED, (40, 24), 64, 16, ranks=[3, 16, 1], dtype=torch.float16)
    wide = LoraInputs(given.x.float(), given.y.float(), *given[2:])
    expected = truth(
        wide._replace(weights=replace(given.weights, a=given.weights.a.float(), b=given.weights.b.float()))
    )
    for logits in (given.y.clone(), given.y.float()):
        lora.expand(logits, lora.shrink(given.x, given.weights, given.rows), given.weights, given.rows)
        torch.testing.assert_close(logits.float(), expected, rtol=4e-3, atol=4e-3)


class Steps(Executor):
    """An executor over a runner of this process."""

    def __init__(self, runner: StepRunner, facts: ExecutorFacts) -> None:
        self.runner, self._facts = runner, facts

    def submit(self, plan: StepPlan) -> None:
        self.runner.submit(plan)

    def release(self, step: int, masks: Any) -> None:
        """No step has masks."""

    def collect(self) -> Any:
        return self.runner.collect()

    def facts(self) -> ExecutorFacts:
        return self._facts

    def shutdown(self, *, wait: bool = True) -> None:
        """Nothing to end."""

    def control(self, name: str, args: dict[str, Any]) -> object:
        """No workers to tell."""
        raise NotImplementedError(name)


def adapted(args: Any, target: str) -> Any:
    """The same random model with slots for two adapters, whose content depends on their digests alone."""
    model = make_model(args, target, reference=target == "cpu", more=("lora",))
    slots = plan_slots(args, model.layout, AdapterConfig(enable_lora=True, max_loras=2, max_lora_rank=16), "cuda")

    def read(adapter: Adapter) -> HeldAdapter:
        random, rank = torch.Generator().manual_seed(ord(adapter.digest)), 1 + ord(adapter.digest) % 5
        numbers = torch.zeros(slots.size)
        for linear in slots.linears:
            a = numbers[linear.at_a :][: len(linear.modules) * 16 * linear.width].view(-1, 16, linear.width)
            b = numbers[linear.at_b :][: linear.rows * 16].view(-1, 16)
            a[:, :rank], b[:, :rank] = (
                0.2 * torch.randn(one.shape, generator=random) for one in (a[:, :rank], b[:, :rank])
            )
        ranks = torch.full((len(slots.linears),), rank, dtype=torch.int32)
        ranks[::3] = 0
        return HeldAdapter(numbers, ranks)

    bank = AdapterBank(read, torch.zeros(2, slots.size), len(slots.linears))
    attach(model, products_of(model, bank, slots))
    model.adapters = bank
    return model


def answers(args: Any, target: str, limits: Limits, kinds: str) -> dict[int, list[int]]:
    """Greedy tokens of requests for the base model and four adapters, by handle."""
    sizes: dict[str, Any] = {
        "num_blocks": 31,
        "block_size": BLOCK,
        "vocab_size": args.vocab_size,
        "max_model_len": limits.max_model_len,
    }
    facts = ExecutorFacts(depth=2, decode_lag=2, num_slots=limits.num_slots, **sizes)
    runner = runner_of(adapted(args, target), limits, target)
    config = SchedulerConfig(max_num_batched_tokens=limits.max_tokens, max_num_seqs=limits.num_slots)
    geometry = kv_geometry(args, "float32", limits.block_sizes, limits.windows)
    allocator = KVAllocator(BlockPool(31), geometry, num_slots=limits.num_slots)
    core = EngineCore(Steps(runner, facts), config, allocator, root_key=bytes(32))
    core.scheduler.roster.adapters = AdapterSlots(2, 3)
    tokens: dict[int, list[int]] = {}
    for handle, kind in enumerate(kinds):
        prompt = np.random.default_rng(handle).integers(0, args.vocab_size, 3 + 4 * handle, dtype=np.uint32)
        adapter = None if kind == " " else Adapter(kind, "", kind)
        spec = SamplerSpec(seed=0, num_prompt=len(prompt), temperature=0.0)
        num_tokens, packed = 5 if FULL else 3, prompt.tobytes()
        core.add(
            NewRequest(
                handle=handle, request_id="", token_ids=packed, max_tokens=num_tokens, sampler=spec, adapter=adapter
            )
        )
        tokens[handle] = []
    while core.has_work:
        outputs = core.step()
        assert all(one.error is None for one in outputs.finished), outputs.finished
        for handle, token in zip(outputs.handles.tolist(), outputs.tokens.tolist(), strict=True):
            tokens[handle].append(token)
    core.check()
    return tokens


@pytest.mark.parametrize("kind", ["dense", *full_rows(["experts", "latent"])])
def test_a_gpus_engine_answers_as_a_cpus(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that graphs would hold, of decodes and of prompts, read the adapters of their rows from the tables."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr("quire.worker.construct.Graphs", Recording)
    limits = Limits(num_slots=SLOTS, max_tokens=32, max_model_len=LENGTH, block_sizes=(BLOCK,), depth=2, adapters=True)
    sized, args = (
        replace(limits, graph_sizes=(1, 4), graph_tokens=(16, 32)),
        model_args(kind, num_hidden_layers=2 if FULL else 1),
    )
    kinds = "a b cda" if FULL else "a b"
    expected = answers(args, "cpu", limits, kinds)
    assert answers(args, "cuda", sized, kinds) == expected


def test_compiles_for_hopper(compiled: Callable[[str], set[str]]) -> None:
    own = {"_shrink_kernel", "_expand_kernel", "_gated_kernel", "_groups_kernel", "_tiles_kernel", "_sort_kernel"}
    assert compiled("compile_lora") == own
