"""Steps that reuse KV of other positions: all kept is a full prefill bit for bit, none kept is full reuse.

The reference computes a prompt in one piece, without pages. It takes the KV of moved tokens, in the layers behind the
check layer, from their text alone, computed at the positions that the text has in the prompt.
"""

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from quire.args.check_layer import check_layer
from quire.assemble.kv_views import kv_views
from quire.config.engine import SchedulerConfig
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.request import NewRequest, ReusedParts
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import FIRST_TOKENS, StepPlan
from quire.engine.core import EngineCore
from quire.kernels.attention import AttentionMeta
from quire.kernels.step.state import Limits
from quire.kv.allocator import KVAllocator
from quire.kv.pool import BlockPool
from quire.layers.context import ReplicaTokens, StepContext
from quire.layers.stack import Model, run_layers
from quire.plan.kv_geometry import kv_components
from quire.worker.blending import _context
from quire.worker.runner import StepRunner

from ...support.compared import BLOCK, VOCAB, kv_geometry, make_model, model_args, runner_of
from ...support.logits_tap import LogitsTap

pytestmark = pytest.mark.usefixtures("one_thread")
LIMITS = Limits(num_slots=4, max_tokens=256, max_model_len=256, block_sizes=(BLOCK,), depth=2)
WINDOW = 24  # of every other layer of a model of kind "windows", which rotates heads otherwise, too
RANDOM = np.random.default_rng(5)
NOTES = [RANDOM.integers(0, VOCAB, count, dtype=np.uint32).tolist() for count in (40, 33, 64)]
SIZES = {"num_hidden_layers": 6, "max_position_embeddings": 512}
QUESTION = [1, 2, 3, 4, 5]


class Engine:
    """A core over a runner. `logits`: of the first token of each request, by slot and position."""

    def __init__(self, model: Model, *, budget: int = 256, depth: int = 1, num_blocks: int = 60) -> None:
        windows, sizes = ((None, WINDOW), (BLOCK, BLOCK)) if len(model.args.rotations) > 1 else ((None,), (BLOCK,))
        limits = replace(LIMITS, block_sizes=sizes, windows=windows)
        self.runner = runner_of(model, limits, num_blocks=num_blocks + 1)
        self.plans: list[StepPlan] = []
        self.logits: dict[int, Tensor] = {}  # position of the new token -> [V]
        self.runner.features.attach(LogitsTap(self._note))
        facts = ExecutorFacts(
            depth=depth,
            decode_lag=depth,
            num_slots=4,
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_model_len=256,
            vocab_size=VOCAB,
            blends=True,
        )
        geometry = kv_geometry(model.args, "float32", sizes, windows)
        self.core = EngineCore(
            _Executor(self.runner, facts, self.plans),
            SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=4, watermark=0.0),
            KVAllocator(BlockPool(num_blocks), geometry, num_slots=4),
            root_key=bytes(32),
        )
        self._handle = 0

    def _note(self, slots: Tensor, positions: Tensor, logits: Tensor) -> None:
        for position, row in zip(positions.tolist(), logits, strict=True):
            self.logits[position] = row.clone()

    def add(self, prompt: list[int], max_tokens: int = 1, **fields: Any) -> None:
        self._handle += 1
        spec = SamplerSpec(seed=0, num_prompt=len(prompt), temperature=0.0)
        self.core.add(
            NewRequest(
                handle=self._handle,
                request_id=str(self._handle),
                sampler=spec,
                token_ids=array("I", prompt).tobytes(),
                max_tokens=max_tokens,
                **fields,
            )
        )

    def drain(self) -> "Engine":
        while self.core.has_work:
            self.core.step()
        self.core.check()
        return self

    def ask(self, prompt: list[int], **fields: Any) -> Tensor:
        """Return the logits of the prompt's last token."""
        self.logits.clear()
        self.add(prompt, **fields)
        self.drain()
        return self.logits[len(prompt)]


class _Executor:
    def __init__(self, runner: StepRunner, facts: ExecutorFacts, plans: list[StepPlan]) -> None:
        self._runner, self._facts, self._plans = runner, facts, plans

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._runner.submit(plan)

    def release(self, step: int, masks: Any) -> None: ...

    def collect(self) -> Any:
        return self._runner.collect()

    def facts(self) -> ExecutorFacts:
        return self._facts


def model_of(kind: str, *, reference: bool = False) -> Model:
    """A model of six layers with kernels for moved tokens."""
    args = model_args("dense" if kind == "windows" else kind, **SIZES)
    if kind == "windows":
        layers = [
            structs.replace(one, mixer=structs.replace(one.mixer, rope=replace(one.mixer.rope, theta=100.0)))
            for one in args.layers[1::2]
        ]
        args = replace(args, layers=tuple(one for pair in zip(args.layers[::2], layers, strict=True) for one in pair))
    more = () if reference else ("blend",)
    return make_model(args, reference=reference, window=WINDOW if kind == "windows" else None, more=more)


def prompt_of(*order: int, before: tuple[int, ...] = ()) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    tokens, chunks = list(before), []
    for note in order:
        chunks.append((len(tokens), len(tokens) + len(NOTES[note])))
        tokens = tokens + NOTES[note]
    return tokens + QUESTION, tuple(chunks)


def computed(model: Model, hidden: Tensor, first: int, caches: list[Any], layers: range, rows: Tensor) -> Tensor:
    """Run layers on the rows `rows` of a sequence with a cache of one block; its position 0 is turned to `first`."""
    length = caches[0][0].shape[2]
    meta = AttentionMeta(
        [0, len(rows)], [length], torch.zeros(1, 1, dtype=torch.int32), rows, row_positions=rows, decode_len=0
    )
    groups = meta, replace(meta, kv_group=1)
    ctx = StepContext(rows + first, groups, kv_views([one.mixer for one in model.held], caches))
    return run_layers(model, hidden, ctx, layers)


def empty_caches(model: Model, length: int) -> list[tuple[Tensor, ...]]:
    return [
        tuple(torch.zeros(1, c.num_heads, length, c.head_dim) for c in kv_components(model.args.mixers[0], "float32"))
        for _ in model.layers
    ]


@torch.inference_mode()
def blended(model: Model, prompt: list[int], chunks: tuple[tuple[int, int], ...], ratio: float) -> Tensor:
    """Return the logits of the last token of a prompt, none of whose chunks is an exact prefix."""
    everything, length = range(len(model.layers)), len(prompt)
    caches, moved, places = empty_caches(model, length), [], []
    old = empty_caches(model, length)
    for first, last in chunks:
        text, own = prompt[first:last], empty_caches(model, last - first)
        computed(model, model.embed(torch.tensor(text)), first, own, everything, torch.arange(len(text)))
        whole = len(text) // BLOCK * BLOCK
        moved += range(first, first + whole)
        places += range(whole)
        for layer in everything:
            for to, side in zip(old[layer], own[layer], strict=True):
                to[:, :, first : first + whole] = side[:, :, :whole]
    early = range(check_layer(model.args) + 1)
    hidden = computed(model, model.embed(torch.tensor(prompt)), 0, caches, early, torch.arange(length))
    sides = zip(caches[check_layer(model.args)], old[check_layer(model.args)], strict=True)
    far = sum((new - was).square().sum((0, 1, 3)) for new, was in sides)
    ranked = sorted(zip(moved, places, strict=True), key=lambda one: (one[1] >= FIRST_TOKENS, -float(far[one[0]])))
    kept = {row for row, _ in ranked[: int(np.ceil(ratio * len(moved) - 1e-6))]}
    rows = torch.tensor([row for row in range(length) if row in kept or row not in moved])
    for layer in everything[check_layer(model.args) + 1 :]:
        for to, side in zip(caches[layer], old[layer], strict=True):
            to[:, :, moved] = side[:, :, moved]
    hidden = computed(model, hidden[rows], 0, caches, everything[check_layer(model.args) + 1 :], rows)
    return model.head(model.norm(hidden[-1:]))[0]


def warmed(model: Model, **more: Any) -> Engine:
    engine = Engine(model, **more)
    for note in NOTES:
        engine.ask(note)
    return engine


@pytest.mark.parametrize("budget", [256, 48])
@pytest.mark.parametrize("kind", ["dense", "experts", "latent", "windows"])
def test_all_kept_is_a_full_prefill_bit_for_bit(kind: str, budget: int) -> None:
    model = model_of(kind)
    prompt, chunks = prompt_of(2, 0, 1, before=(9, 8, 7))
    expected = Engine(model, budget=budget).ask(prompt)
    engine = warmed(model, budget=budget)
    actual = engine.ask(prompt, reused=ReusedParts(tuple(chunks), 1.0))
    moved = sum(len(one.tokens) for plan in engine.plans for one in plan.features.blended)
    assert moved == 32 + 32 + 64 and torch.equal(actual, expected)


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.6])
@pytest.mark.parametrize("kind", ["dense", "experts", "latent", "windows"])
def test_what_is_kept_and_what_is_reused(kind: str, ratio: float) -> None:
    """0 is full reuse behind the check layer. The reference's keys are rotated to their new positions at once."""
    prompt, chunks = prompt_of(1, 2, 0, before=(9, 8, 7))
    reference = model_of(kind, reference=True)
    expected = blended(reference, prompt, chunks, ratio)
    actual = warmed(model_of(kind)).ask(prompt, reused=ReusedParts(tuple(chunks), ratio))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)
    exact = Engine(model_of(kind)).ask(prompt)
    assert (exact - expected).abs().max() > 0.05, "the case tells nothing"


def test_later_layers_tell_an_exchange_of_experts_how_many_rows_they_have() -> None:
    """`rows` stay what all replicas know: upper bounds."""
    meta = AttentionMeta([0, 5], [5], torch.ones(1, 1, dtype=torch.int32), torch.arange(5))
    replicas = ReplicaTokens((5, 7), torch.tensor([5], dtype=torch.int32), 8)
    found = _context(StepContext(torch.arange(5), (meta,), [], replicas), torch.tensor([1, 4]), np.array([2], np.int32))
    assert found.replicas is not None and found.replicas.count.tolist() == [2]
    assert (found.replicas.rows, found.replicas.bound) == ((5, 7), 8)


def test_the_host_knows_the_prompts_of_the_last_layers() -> None:
    """Behind a decode, 3 of 8 rows of a prompt are kept, and none of another. Contexts are as long as before."""
    prompts = (1, 9, 1, 32), (9, 12, 2, 9)
    meta = AttentionMeta([0, 1, 9, 12], [30, 40, 12], torch.ones(3, 1), torch.arange(12), prompts=prompts)
    kept, counts = torch.tensor([0, 2, 5, 8]), np.array([1, 3, 0], np.int32)
    assert _context(StepContext(torch.arange(12), (meta,), []), kept, counts).attention[0].prompts == ((1, 4, 1, 37),)


@pytest.mark.parametrize("depth", [1, 2])
def test_other_requests_of_the_step_are_as_ever(depth: int) -> None:
    """A decode and a prompt beside it, whose rows are all kept."""
    model = model_of("dense")
    prompt, chunks = prompt_of(1, 2, 0, before=(9, 8, 7))
    texts = []
    for ratio in (None, 0.2):
        engine = warmed(model, depth=depth)
        engine.add([3] * 20, max_tokens=12)
        for _ in range(4):
            engine.core.step()
        tokens = dict[int, list[int]]()
        engine.add(prompt, 2, **({} if ratio is None else {"reused": ReusedParts(tuple(chunks), ratio)}))
        engine.add([6] * 45, max_tokens=3)
        while engine.core.has_work:
            out = engine.core.step()
            for handle, token in zip(out.handles.tolist(), out.tokens.tolist(), strict=True):
                tokens.setdefault(handle, []).append(token)
        engine.core.check()
        assert any(len(plan.slots) == 3 and plan.num_decodes == 1 for plan in engine.plans)
        assert (ratio is not None) == any(plan.features.blended for plan in engine.plans)
        texts.append([tokens[handle] for handle in (4, 6)])
    assert texts[0] == texts[1]
