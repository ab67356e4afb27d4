"""The worker of a GPU against the CPU's on the same plans, its kernels in Triton's interpreter."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire.config.checkpoint import parse_checkpoint_config
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import I32, POOL, PROMPT_LOGPROBS, SAMPLE, Admission, SharedPrefix, StepPlan, StepResult
from quire.kernels import triton_runtime
from quire.kernels.attention import KVView
from quire.kernels.select import select_kernels
from quire.layers.context import Build
from quire.layers.decoder import Decoder
from quire.layers.stack import Model
from quire.models.layout import layout
from quire.models.registry import kv_components, kv_views, linear_plans, operations
from quire.worker.sampler import Sampler
from quire.worker.sampling_table import SamplingTable
from quire.worker.slots import SlotTables
from quire.worker.worker import Worker

from ..filled_models import experts_plan, fill, normal

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from triton.runtime import interpreter

from quire.worker.cuda_worker import CudaWorker, Limits
from quire.worker.gpu_sampler import Mode

CPU = torch.device("cpu")
BLOCK, SLOTS, LENGTH, VOCAB = 16, 4, 96, 64
LIMITS = Limits(num_slots=SLOTS, max_tokens=64, max_model_len=LENGTH, block_size=BLOCK, graph_sizes=(),
                graph_tokens=(), depth=2)  # fmt: skip
CONFIG = {
    "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip


class Event:
    """Stands for an event of a device that has always done everything."""

    made = 0

    def __init__(self, **_: object) -> None:
        Event.made += 1

    def record(self) -> None:
        """At once."""

    synchronize = record


class Recording:
    """Stands for the graphs: work runs as it comes, and its keys are kept."""

    def __init__(self) -> None:
        self.ran: list[object] = []
        self.captured: list[object] = []

    def run(self, key: object, work: Callable[[], None]) -> None:
        self.ran.append(key)
        work()

    def capture(self, key: object, work: Callable[[], None]) -> None:
        self.captured.append(key)


def make_model(device: str) -> Model:
    args = parse_checkpoint_config(CONFIG)
    kernels = select_kernels(device, "float32", ops=operations(args), head_dim=args.head_dim)
    params = layout(args)
    build = Build(torch.float32, CPU, kernels, {param.name: param for param in params},
                  linear_plans(args, params, kernels.choices), moe=experts_plan(args, device=device))  # fmt: skip
    model = Decoder(args, params, build)
    fill(model, normal(0.3))
    return model


def make_cache() -> list[KVView]:
    args = parse_checkpoint_config(CONFIG)
    components = kv_components(args, "float32")
    layers = ([torch.full((32, c.num_heads, BLOCK, c.head_dim), float("nan")) for c in components] for _ in range(2))
    return kv_views(args, map(tuple, layers))


@pytest.fixture
def cuda_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CudaWorker]:
    """Makes workers. The interpreter takes a scalar that was loaded as a loop's bound, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def make(limits: Limits = LIMITS) -> CudaWorker:
        worker = CudaWorker(make_model("cuda"), make_cache(), limits, CPU)
        worker.graphs = Recording()  # type: ignore[assignment]
        return worker

    return make


def cpu_worker() -> Worker:
    table = SamplingTable(SLOTS, VOCAB, LENGTH)
    tables = SlotTables(table, SLOTS, LENGTH // BLOCK, CPU)
    return Worker(make_model("cpu"), make_cache(), tables, Sampler(table), block_size=BLOCK)


def i32(*values: int) -> I32:
    return np.array(values, np.int32)


def admission(slot: int, num_tokens: int, blocks: tuple[int, ...], **spec: object) -> Admission:
    ids = np.arange(7, 7 + num_tokens, dtype=np.int32) % VOCAB
    return Admission(slot=slot, request_id=str(slot), token_ids=ids, block_ids=(i32(*blocks),), num_computed=0,
                     sampler=SamplerSpec(num_prompt=num_tokens, **{"seed": 0, "temperature": 0.0} | spec))  # type: ignore[arg-type]


def plan(
    step: int, slots: tuple[int, ...], tokens: tuple[int, ...], outputs: tuple[int, ...], **more: Any
) -> StepPlan:
    """Slots of one token decode, but those that are admitted, or pool."""
    fresh = {a.slot for a in more.get("admitted", ())}
    decodes = [count == 1 and out == SAMPLE and slot not in fresh
               for slot, count, out in zip(slots, tokens, outputs, strict=True)]  # fmt: skip
    assert decodes == sorted(decodes, reverse=True), "decodes come first"
    rows = [count if out & PROMPT_LOGPROBS else 1 for count, out in zip(tokens, outputs, strict=True)]
    return StepPlan(step=step, slots=i32(*slots), num_decodes=sum(decodes), num_tokens=i32(*tokens),
                    num_rows=i32(*rows), outputs=np.array(outputs, np.uint8), **more)


# Chunks, decodes beside a chunk, sampling of every mode, logprobs of both kinds, a slot that is given to another.
PLANS = (
    plan(1, (2,), (30,), (PROMPT_LOGPROBS,),
         admitted=(admission(2, 33, (1, 2, 3), seed=5, temperature=0.9, num_prompt_logprobs=2),)),
    plan(2, (2, 0), (3, 5), (SAMPLE | PROMPT_LOGPROBS, SAMPLE),
         admitted=(admission(0, 5, (4,), seed=6, temperature=0.7, top_p=0.9, num_logprobs=2),)),
    plan(3, (0, 2), (1, 1), (SAMPLE, SAMPLE)),
    plan(4, (0, 2, 1), (1, 1, 20), (SAMPLE, SAMPLE, 0), admitted=(admission(1, 24, (5, 6), repetition_penalty=1.5),)),
    plan(5, (2, 1), (1, 4), (SAMPLE, SAMPLE)),
    plan(6, (1, 3), (1, 7), (SAMPLE, SAMPLE), released=i32(0, 2), admitted=(admission(3, 7, (1,), seed=9),)),
    plan(7, (1, 3), (1, 1), (SAMPLE, SAMPLE)),
    plan(8, (1, 3), (1, 1), (SAMPLE, SAMPLE)),
)  # fmt: skip


def run_ahead(worker: CudaWorker, plans: tuple[StepPlan, ...]) -> list[StepResult]:
    """Every step is launched before the one before it is collected."""
    found = []
    for number, each in enumerate(plans):
        worker.submit(each)
        if number:
            found.append(worker.collect())
    return [*found, worker.collect()]


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS = {
    "dense": {},
    "experts": {"model_type": "qwen3_moe", **EXPERTS, "norm_topk_prob": True},
    "latent": {"model_type": "deepseek_v3", **LATENT},
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sizes", [(), (2, 4)])
def test_the_same_tokens_as_on_a_cpu(
    cuda_worker: Callable[..., CudaWorker], monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], model: str
) -> None:
    """With sizes decodes and samples are padded, and whole steps of up to 48 tokens, made for 2 and for 4 sequences."""
    monkeypatch.setattr(f"{__name__}.CONFIG", CONFIG | MODELS[model])
    monkeypatch.setattr("quire.worker.cuda_worker.NARROW", 2)
    oracle = cpu_worker()
    worker = cuda_worker(replace(LIMITS, graph_sizes=sizes, graph_tokens=(48,) if sizes else ()))
    for expected, found in zip(map(oracle.run, PLANS), run_ahead(worker, PLANS), strict=True):
        assert found.step == expected.step and found.num_computed == expected.num_computed
        assert found.slots.tolist() == expected.slots.tolist() and found.tokens.tolist() == expected.tokens.tolist()
        assert found.failed == expected.failed == {}
        for one, other in ((found.logprobs, expected.logprobs), (found.prompt_logprobs, expected.prompt_logprobs)):
            assert one.keys() == other.keys()
            for slot, rows in one.items():
                assert rows.ids.tolist() == other[slot].ids.tolist()
                np.testing.assert_allclose(rows.logprobs, other[slot].logprobs, atol=1e-4)
    assert torch.equal(worker.tables.computed[:SLOTS], oracle.tables.computed)


def pooled(slot: int, num_tokens: int, blocks: tuple[int, ...], pool: str) -> Admission:
    return msgspec.structs.replace(admission(slot, num_tokens, blocks), pool=pool)


# A prompt in three chunks, one in two and whole ones, beside an answer; then a slot is given to another in the middle.
POOLED = (
    plan(1, (2, 0), (30, 5), (POOL, SAMPLE), admitted=(pooled(2, 40, (1, 2, 3), "mean"), admission(0, 5, (4,)))),
    plan(2, (0, 2, 1), (1, 3, 20), (SAMPLE, POOL, POOL), admitted=(pooled(1, 24, (5, 6), "cls"),)),
    plan(3, (0, 2, 1, 3), (1, 7, 4, 1), (SAMPLE, POOL, POOL, POOL), admitted=(pooled(3, 1, (7,), "last"),)),
    plan(4, (0, 1, 2), (1, 9, 30), (SAMPLE, POOL, POOL), released=i32(1, 2, 3),
         admitted=(pooled(1, 9, (5,), "last"), pooled(2, 40, (1, 2, 3), "mean"))),
    plan(5, (2,), (9,), (POOL,), released=i32(1, 2), admitted=(pooled(2, 9, (1,), "mean"),)),
    plan(6, (0,), (1,), (SAMPLE,), released=i32(2)),
)  # fmt: skip


@pytest.mark.parametrize("sizes", [(), (2, 4)])
def test_the_same_vectors_as_on_a_cpu(cuda_worker: Callable[..., CudaWorker], sizes: tuple[int, ...]) -> None:
    oracle, seen = cpu_worker(), dict[int, np.ndarray]()
    worker = cuda_worker(replace(LIMITS, graph_sizes=sizes, graph_tokens=(48,) if sizes else ()))
    for expected, found in zip(map(oracle.run, POOLED), run_ahead(worker, POOLED), strict=True):
        assert found.tokens.tolist() == expected.tokens.tolist() and found.failed == expected.failed == {}
        assert found.pooled.keys() == expected.pooled.keys()
        for slot, vector in found.pooled.items():
            np.testing.assert_allclose(vector, expected.pooled[slot], rtol=1e-4, atol=1e-5)
        seen |= {10 * found.step + slot: vector for slot, vector in found.pooled.items()}
    assert sorted(seen) == [31, 32, 33, 41, 52]
    assert not worker._pooler._prompts


def test_a_vector_that_is_not_a_number_fails_alone(cuda_worker: Callable[..., CudaWorker]) -> None:
    worker = cuda_worker()
    admitted = (pooled(0, 9, (1,), "mean"), pooled(1, 9, (2,), "mean"))
    worker.submit(plan(1, (0, 1), (5, 6), (POOL, POOL), admitted=admitted))
    worker.collect()
    for view in worker._kv:
        view.k[2] = float("nan")
    worker.submit(plan(2, (0, 1), (4, 3), (POOL, POOL)))
    found = worker.collect()
    assert found.failed == {1: "nan_hidden"} and np.isfinite(found.pooled[0]).all()


def test_what_runs_is_what_was_captured(cuda_worker: Callable[..., CudaWorker]) -> None:
    """One launch for the layers and one for all that comes after the logits; none are drawn where nothing is sampled.
    The smallest of each kind runs before anybody waits."""
    worker = cuda_worker(replace(LIMITS, graph_sizes=(2, 4), graph_tokens=(48,)))
    worker.warm_up()
    graphs = worker.graphs
    assert isinstance(graphs, Recording) and len(set(graphs.captured)) == len(graphs.captured) == 2 + 2 * (2 + 4)
    assert graphs.ran == [key for key in graphs.captured if key[1] in (2, 48)]  # type: ignore[index]
    graphs.ran.clear()
    run_ahead(worker, PLANS[:4])
    assert len(graphs.ran) == 2 * 4 and set(graphs.ran) - set(graphs.captured) == {("sample", 0, 0)}


def test_steps_with_prompts_are_captured_for_few_and_for_many(
    cuda_worker: Callable[..., CudaWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.worker.cuda_worker.NARROW", 2)
    worker = cuda_worker(replace(LIMITS, graph_sizes=(2, 4), graph_tokens=(48,)))
    worker.warm_up()
    graphs = worker.graphs
    assert isinstance(graphs, Recording)
    graphs.ran.clear()
    run_ahead(worker, PLANS[:5])
    mixed = [key for key in graphs.ran if key[0] == "mixed"]  # type: ignore[index]
    assert mixed == [("mixed", 48, 4), ("mixed", 48, 4), ("mixed", 48, 8), ("mixed", 48, 4)]
    assert set(mixed) <= set(graphs.captured)


def test_rehearsing_leaves_no_result_and_does_what_is_captured(cuda_worker: Callable[..., CudaWorker]) -> None:
    worker, did = cuda_worker(replace(LIMITS, graph_sizes=(2,), graph_tokens=(16,))), []
    for name in ("_mixed", "_decode", "_sample"):
        setattr(worker, name, lambda *args: did.append(args))
    worker.rehearse([PLANS[2]])
    assert did[2:] == [(16, 4, False), (16, 4, True), (2, False), (2, True), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert not worker._running


@pytest.mark.parametrize("model", ["dense", "latent"])
def test_a_shared_prefix_changes_no_token(
    cuda_worker: Callable[..., CudaWorker], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr(f"{__name__}.CONFIG", CONFIG | MODELS[model])
    prompts = tuple(admission(slot, 40, (1, 2, 3 + slot), seed=slot, temperature=1.0) for slot in (0, 1))
    plans = (
        plan(1, (0,), (40,), (SAMPLE,), admitted=prompts[:1]),
        plan(2, (1,), (8,), (SAMPLE,), admitted=(msgspec.structs.replace(prompts[1], num_computed=32),)),
        *(plan(n, (0, 1), (1, 1), (SAMPLE, SAMPLE)) for n in (3, 4)),
    )
    together = tuple(each if each.step < 3 else plan(each.step, (0, 1), (1, 1), (SAMPLE, SAMPLE),
                                                     shared=(SharedPrefix(i32(0, 1), 2),)) for each in plans)
    alone, shared = run_ahead(cuda_worker(), plans), run_ahead(cuda_worker(), together)
    assert [each.tokens.tolist() for each in alone] == [each.tokens.tolist() for each in shared]


@pytest.mark.parametrize("model", ["dense", "latent"])
@pytest.mark.parametrize("sizes, tokens", [
    ((4, 16), (48,)), *(pytest.param(*each, marks=pytest.mark.full) for each in (((4, 16), ()), ((), ()))),
])  # fmt: skip
def test_a_shared_prefix_beside_prompts_changes_no_logit(
    cuda_worker: Callable[..., CudaWorker], monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...],
    tokens: tuple[int, ...], model: str,
) -> None:  # fmt: skip
    """Five decodes share a prefix; then, in the same buffer, two of them, one who shares nothing and a prompt."""
    monkeypatch.setattr(f"{__name__}.CONFIG", CONFIG | MODELS[model] | {"num_hidden_layers": 1})
    limits = replace(LIMITS, num_slots=16, graph_sizes=sizes, graph_tokens=tokens)
    first = [admission(slot, 36, (1, 2, 3 + slot)) for slot in range(5)]
    members = [first[0], *(msgspec.structs.replace(each, num_computed=32) for each in first[1:])]
    ids = np.arange(20, dtype=np.int32) * 13 % VOCAB
    outsider = msgspec.structs.replace(admission(13, 20, (28, 29)), token_ids=ids)

    def plans(shared: bool) -> list[StepPlan]:
        def together(*slots: int) -> dict[str, object]:
            return {"shared": (SharedPrefix(i32(*slots), 2),)} if shared else {}

        admitted = [plan(n, (each.slot,), (len(each.token_ids) - each.num_computed,), (SAMPLE,), admitted=(each,))
                    for n, each in enumerate([*members, outsider])]
        return [
            *admitted,
            plan(6, (0, 1, 2, 3, 4), (1,) * 5, (SAMPLE,) * 5, **together(0, 1, 2, 3, 4)),
            *(plan(n, (13,), (1,), (SAMPLE,)) for n in (7, 8, 9)),
            plan(10, (13, 4, 2, 12), (1, 1, 1, 5), (SAMPLE,) * 4, admitted=(admission(12, 5, (20,)),),
                 **together(4, 2)),
        ]

    def logits(shared: bool) -> torch.Tensor:
        worker, found = cuda_worker(limits), []
        for each in plans(shared):
            worker.submit(each)
            worker.collect()
            found.append(worker._logits[: len(each.slots)].clone())
        return torch.cat(found)

    torch.testing.assert_close(logits(True), logits(False), rtol=0, atol=1e-5)


def test_a_batch_goes_through_what_its_rows_need(cuda_worker: Callable[..., CudaWorker]) -> None:
    sampler = cuda_worker().sampler
    specs = ({"temperature": 0.0}, {}, {"top_k": 3}, {"temperature": 0.0, "logit_bias": ((1, 2.0),)})
    for slot, spec in enumerate(specs):
        sampler.admit(slot, SamplerSpec(seed=0, num_prompt=1, **spec))  # type: ignore[arg-type]
        assert sampler.mode(i32(0, slot)) == Mode(slot)
    sampler.admit(0, SamplerSpec(seed=0, num_prompt=1, temperature=0.0, presence_penalty=0.5))
    assert sampler.mode(i32(0, 2)) == Mode.FULL
    sampler.release(0)
    assert sampler.mode(i32(0, 1)) == Mode.PLAIN and sampler.mode(i32()) == Mode.GREEDY


@pytest.mark.parametrize("sizes", [(), (2, 4)])
def test_a_step_with_a_grammar_samples_when_its_masks_are_there(
    cuda_worker: Callable[..., CudaWorker], sizes: tuple[int, ...]
) -> None:
    """The layers run when it is submitted, and the step before is collected in between; beside a row that is free."""
    oracle = cpu_worker()
    worker = cuda_worker(replace(LIMITS, graph_sizes=sizes, graph_tokens=(48,) if sizes else ()))
    admitted = (admission(2, 33, (1, 2, 3), grammar=True), admission(0, 5, (4,), seed=6, temperature=0.7),
                admission(1, 5, (5,), seed=7, temperature=0.9, top_k=20, grammar=True))  # fmt: skip
    plans = (
        plan(1, (2, 0, 1), (30, 5, 5), (0, SAMPLE, SAMPLE), admitted=admitted, grammar=i32(1)),
        plan(2, (0, 1, 2), (1, 1, 3), (SAMPLE, SAMPLE, SAMPLE), grammar=i32(1, 2)),
        plan(3, (0, 1), (1, 1), (SAMPLE, SAMPLE), grammar=i32(1)),
        plan(4, (0,), (1,), (SAMPLE,), released=i32(1)),
        plan(5, (0, 2), (1, 1), (SAMPLE, SAMPLE), grammar=i32(2)),
    )  # fmt: skip
    bits = np.random.default_rng(0).random((5, 3, VOCAB)) < 0.1
    lates = [np.packbits(bits[i, : len(p.grammar)], axis=1, bitorder="little").view(np.int32)
             for i, p in enumerate(plans)]  # fmt: skip
    found: list[StepResult] = []
    for number, (each, late) in enumerate(zip(plans, lates, strict=True)):
        worker.submit(each)
        assert len(worker._running) == (number > 0) + (not len(each.grammar))
        if number:
            found.append(worker.collect())
        if len(late):
            worker.release(late)
    found.append(worker.collect())
    for i, (each, late, result) in enumerate(zip(plans, lates, found, strict=True)):
        expected = oracle.run(each, lambda late=late: late)
        assert result.tokens.tolist() == expected.tokens.tolist() and result.failed == expected.failed == {}
        for slot, token in zip(result.slots.tolist(), result.tokens[:, 0].tolist(), strict=True):
            masked = each.grammar.tolist()
            assert slot not in masked or bits[i, masked.index(slot), token]
    graphs = worker.graphs
    assert isinstance(graphs, Recording) and [key[0] for key in graphs.ran[:4]].count("sample") == (2 if sizes else 4)


def test_steps_make_no_events(cuda_worker: Callable[..., CudaWorker]) -> None:
    worker = cuda_worker()
    before = Event.made
    run_ahead(worker, PLANS[:3])
    assert Event.made == before


def test_a_row_that_is_not_a_number_fails_alone(cuda_worker: Callable[..., CudaWorker]) -> None:
    worker = cuda_worker()
    worker.submit(plan(1, (0, 1), (5, 6), (SAMPLE, SAMPLE), admitted=(admission(0, 5, (1,)), admission(1, 6, (2,)))))
    worker.collect()
    for view in worker._kv:
        view.k[2] = float("nan")
    worker.submit(plan(2, (0, 1), (1, 1), (SAMPLE, SAMPLE)))
    assert worker.collect().failed == {1: "nan_logits"}
