"""A step runner beside the naive one: the same plans for both, each result compared; and requests that make plans."""

import dataclasses
from collections import deque
from math import gcd
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.args.eagle import EagleArgs
from quire.assemble.kv_views import model_views
from quire.config.engine import SchedulerConfig
from quire.contracts.blocks import KVGeometry
from quire.contracts.protocols import Executor, ExecutorFacts
from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import I32, NO_MASKS, StepPlan, StepResult
from quire.engine.core import EngineCore
from quire.kernels.select import select_kernels
from quire.kernels.step.state import Limits
from quire.kv.allocator import KVAllocator
from quire.kv.pool import BlockPool
from quire.kvstore.arena import KVArena
from quire.layers.context import Build
from quire.layers.decoder import Decoder
from quire.layers.eagle import EagleLayer
from quire.layers.read_states import ReadStates
from quire.layers.stack import Model
from quire.plan.kinds.blocks import operations
from quire.plan.kv_geometry import kv_components, resolve_geometry
from quire.plan.layout import layout
from quire.plan.linears import linear_plans
from quire.worker.construct import make_runner
from quire.worker.runner import StepRunner

from .changed_args import with_layers, with_mixer
from .filled_models import experts_plan, fill, normal
from .naive_runner import NaiveRunner, agree

CPU = torch.device("cpu")
BLOCK, SLOTS, LENGTH, VOCAB = 16, 4, 96, 64
LIMITS = Limits(num_slots=SLOTS, max_tokens=64, max_model_len=LENGTH, block_sizes=(BLOCK,), depth=2)
CONFIG = {
    "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
GLM = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "use_qk_norm": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"model_type": "qwen3_moe", **EXPERTS, "norm_topk_prob": True},
    "latent": {"model_type": "deepseek_v3", **LATENT},
    "sparse latent": {"model_type": "deepseek_v32", **LATENT, **INDEXER},
    "glm": {"model_type": "glm4_moe", **GLM},
}  # fmt: skip


def model_args(kind: str = "dense", **more: object) -> ModelArgs:
    """The arguments of a small model."""
    return parse_checkpoint_config(CONFIG | MODELS[kind] | more)


def kv_geometry(
    args: ModelArgs, dtype: str, sizes: tuple[int, ...] = (BLOCK,), windows: tuple[int | None, ...] = (None,)
) -> KVGeometry:
    """The pages of a model; with two windows and block sizes, every other layer is in a group of its own."""
    size, *others = sizes
    geometry = resolve_geometry(kv_components(args.mixers[0], dtype), args.num_layers + args.draft_layers, size)
    if not others:
        return geometry
    ((group,), layers) = geometry.groups, range(args.num_layers)
    other = replace(group, layers=tuple(layers[1::2]), window=windows[1], block_size=others[0])
    return replace(geometry, groups=(replace(group, layers=tuple(layers[::2])), other))


def make_model(
    args: ModelArgs,
    target: str = "cpu",
    *,
    reference: bool = False,
    dtype: str = "float32",
    window: int | None = None,
    more: tuple[str, ...] = (),
) -> Model:
    """The same random weights with the kernels of `target`, or with the references (`reference`); with operations
    `more` than the model needs."""
    ops = operations(args) + more
    forced = dict.fromkeys(ops, "ref") if reference else None
    kernels = select_kernels(
        target,
        dtype,
        ops=ops,
        head_dim=args.attending[0].head_dim,
        attention_features=frozenset({"window"} if window else ()),
        forced=forced,
    )
    params, grouped = layout(args), ((BLOCK, BLOCK), (None, window)) if window else ()
    build = Build(
        getattr(torch, dtype),
        CPU,
        kernels,
        {param.name: param for param in params},
        linear_plans(args, params, kernels.choices),
        moe=experts_plan(args, dtype, target, "ref" if reference else ""),
        kv_groups=kv_geometry(args, dtype, *grouped).groups,
    )
    model = Decoder(args, params, build)
    fill(model, normal(0.3))
    return model


def num_draft_layers(model: Model) -> int:
    """The number of layers that draft: of the model, or of a draft model or EAGLE head of the model's KV heads."""
    return model.args.draft_layers if model.draft is None else len(model.draft.layers)


def make_headed(args: ModelArgs, target: str = "cpu") -> Model:
    """A random model with a random EAGLE-3 head, which knows half of its ids."""
    size = args.vocab_size // 2
    head = EagleArgs(method="eagle3", vocab_size=args.vocab_size, context=64, layer_ids=(0, args.num_layers - 1))
    model = make_model(args, target)
    own = make_model(
        dataclasses.replace(
            with_layers(with_mixer(args, qk_norm=""), 1), model_type="eagle3", vocab_size=size, eagle=head
        ),
        target,
    )
    first = own.layers[0]
    assert own.ids is not None and isinstance(first, EagleLayer)
    own.ids.take({"offsets": torch.arange(size).float()}, 0)
    model.reads = first.reads = ReadStates(head.reads(len(model.layers)), model.numbers, list(model.layers))
    model.draft = own
    return model


def make_drafted(args: ModelArgs, target: str = "cpu") -> Model:
    """A random model with a draft model of one layer, which has the model's embedding and first layer."""
    model = make_model(args, target)
    model.draft = make_model(with_layers(args, 1), target)
    return model


def runner_of(
    model: Model, limits: Limits = LIMITS, target: str = "cpu", num_blocks: int = 32, **forced: str
) -> StepRunner:
    """A runner with a cache that is full of what is no number."""
    dtype = str(model.embed(torch.zeros(1, dtype=torch.int64)).dtype).removeprefix("torch.")
    prediction = replace(model.args.prediction, drafting=num_draft_layers(model))
    args = dataclasses.replace(model.args, prediction=prediction)
    geometry = kv_geometry(args, dtype, limits.block_sizes, limits.windows)
    arena = KVArena(geometry, num_blocks, CPU)
    views = model_views(model, arena.views)
    for view in views:
        for part in (value for value in vars(view).values() if isinstance(value, torch.Tensor)):
            part.fill_(float("nan"))
    return make_runner(model, views, limits, CPU, target=target, forced=forced)


class ComparedRunners(Executor):
    """An executor: plans go to both runners, and results are compared when they are collected."""

    def __init__(self, runner: StepRunner, naive: NaiveRunner, num_blocks: int = 31) -> None:
        self.runner, self.naive = runner, naive
        self.num_steps = 0
        self.results: list[tuple[StepPlan, StepResult]] = []
        self._plans: deque[StepPlan] = deque()
        self._masks: dict[int, I32] = {}
        limits = runner.limits
        self._facts = ExecutorFacts(
            depth=limits.depth,
            decode_lag=limits.depth,
            num_slots=limits.num_slots,
            num_blocks=num_blocks,
            block_size=gcd(*limits.block_sizes),
            max_model_len=limits.max_model_len,
            vocab_size=runner.model.args.vocab_size,
            num_drafts=limits.num_drafts,
            drafts_cached=num_draft_layers(runner.model) > 0,
        )

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self.runner.submit(plan)

    def release(self, step: int, masks: I32) -> None:
        if len(masks):
            self._masks[step] = masks
            self.runner.release(masks)

    def collect(self) -> StepResult:
        plan, found = self._plans.popleft(), self.runner.collect()
        expected = self.naive.run(plan, lambda: self._masks.pop(plan.step, NO_MASKS), found)
        agree(found, expected)
        self.num_steps += 1
        self.results.append((plan, found))
        return found

    def control(self, name: str, args: dict[str, Any]) -> object:
        raise NotImplementedError

    def facts(self) -> ExecutorFacts:
        return self._facts

    def shutdown(self, *, wait: bool = True) -> None: ...


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "num_logprobs": 2},
    {"temperature": 1.1, "top_k": 5, "presence_penalty": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.4, "num_prompt_logprobs": 2},
    {"temperature": 0.7, "logit_bias": ((4, 3.0), (9, -100.0)), "bad_words": ((3, 4), (7,))},
    {"temperature": 0.0, "stop_ids": (1, 2), "min_length": 60, "frequency_penalty": 0.4},
    {"temperature": 1.0, "allowed_ids": tuple(range(10, 40)), "logprob_ids": (12, 50)},
    {"pool": "mean"},
    {"pool": "last"},
)


def compare_requests(
    executor: ComparedRunners, number: int, *, budget: int, kinds: Any = KINDS, prompts: int = 40, answers: int = 24
) -> EngineCore:
    """Run requests of all kinds to their ends through the engine; what they get is compared step by step.

    prompts, answers   bounds of the numbers of tokens
    """
    facts, args = executor.facts(), executor.runner.model.args
    limits = executor.runner.limits
    geometry = kv_geometry(args, "float32", limits.block_sizes, limits.windows)
    config = SchedulerConfig(
        max_num_batched_tokens=budget, max_num_seqs=facts.num_slots, max_waiting=1000, watermark=0.0
    )
    core = EngineCore(
        executor,
        config,
        KVAllocator(BlockPool(facts.num_blocks), geometry, num_slots=facts.num_slots),
        root_key=bytes(32),
    )
    for handle in range(number):
        random, kind = np.random.default_rng(handle), dict(kinds[handle % len(kinds)])
        prompt = random.integers(0, args.vocab_size, int(random.integers(1, prompts)), dtype=np.uint32)
        prompt[: len(prompt) // 2] = 5  # prefixes that are alike
        pool, drafts = kind.pop("pool", ""), kind.pop("num_drafts", None)
        spec = SamplerSpec(seed=handle, num_prompt=len(prompt), **kind)
        tokens = 0 if pool else int(random.integers(1, answers))
        core.add(
            NewRequest(
                handle=handle,
                request_id=str(handle),
                token_ids=prompt.tobytes(),
                max_tokens=tokens,
                sampler=spec,
                pool=pool,
                read_prefix_cache=pool != "mean",
                num_drafts=drafts,
            )
        )
    while core.has_work:
        core.step()
    core.check()
    return core
