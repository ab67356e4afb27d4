"""`--batch-invariant` on a CPU: random schedules of the same sequences give each token the same bits.

A schedule cuts the sequences into chunks at random, and computes chunks of several of them in a step, also from
recordings. 1,000 schedules of each model with QUIRE_FULL=1.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.errors import ConfigError
from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.native.library import missing
from quire.kernels.supports import FIXED_ORDER
from quire.layers.context import StepContext
from quire.layers.stack import Model, embedded
from quire.worker.recordings import LayerRecordings

from ...support.filled_models import built, fill, normal, planned
from ...support.full import FULL

SIZE, BLOCKS, VOCAB = 16, 48, 64  # tokens of a block; blocks of a sequence
LENGTHS = (3, 17, 40, 90, 600)  # the last is read in two parts
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 1024,
}  # fmt: skip
MOE = {"moe_intermediate_size": 40, "num_experts_per_tok": 3}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma2": {"sliding_window": 21, "query_pre_attn_scalar": 24, "final_logit_softcapping": 8.0},
    "qwen3_moe": MOE | {"num_experts": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "glm4_moe": MOE | {
        "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
needs_native = pytest.mark.skipif(bool(missing()), reason=missing() or "runs")


def made(kind: str, dtype: str, invariant: bool = True) -> Model:
    args = parse_checkpoint_config(BASE | MODELS[kind] | {"model_type": kind})
    model = built(args, dtype, batch_invariant=invariant)
    fill(model, normal(0.3))
    return model


def cache_of(model: Model) -> list[KVView]:
    own = next(layer.attention for layer in model.layers)
    size = (2, len(LENGTHS) * BLOCKS + 1, own.num_kv_heads, SIZE, own.head_dim)
    return [KVView(*torch.empty(size, dtype=model.dtype)) for _ in model.layers]


def step_of(model: Model, kv: list[KVView], chunks: list[tuple[int, int, int]]) -> StepContext:
    """A step of `chunks` (sequence, tokens before, tokens); each sequence has blocks of its own."""
    tables = torch.arange(1, len(LENGTHS) * BLOCKS + 1, dtype=torch.int32).view(len(LENGTHS), BLOCKS)
    where = [(s, p) for s, start, count in chunks for p in range(start, start + count)]
    starts = np.cumsum([0, *(count for _, _, count in chunks)]).tolist()
    groups = 1 + max(layer.attention.group for layer in model.layers)
    metas = tuple(
        AttentionMeta(
            query_start=starts,
            seq_lens=[start + count for _, start, count in chunks],
            block_tables=tables[[s for s, _, _ in chunks]].contiguous(),
            kv_slots=torch.tensor([int(tables[s, p // SIZE]) * SIZE + p % SIZE for s, p in where]),
            kv_group=group,
        )
        for group in range(groups)
    )
    return StepContext(torch.tensor([p for _, p in where]), metas, kv)


def schedule(random: np.random.Generator) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the chunks of each step."""
    done = [0] * len(LENGTHS)
    order = random.permutation(len(LENGTHS))
    small = random.random() < 0.4  # short chunks, as decodes and short prompts have them
    while left := [int(s) for s in order if done[s] < LENGTHS[s]]:
        chunks = []
        for s in left[: 1 + int(random.integers(len(left)))]:
            most = LENGTHS[s] - done[s]
            short = small and done[s] + 40 > LENGTHS[s] or random.random() < 0.2
            count = min(most, int(random.integers(1, 5)) if short else int(random.integers(1, 2 + most)))
            chunks.append((s, done[s], count))
            done[s] += count
        yield chunks


@torch.inference_mode()
def run(
    model: Model, kv: list[KVView], recordings: LayerRecordings, steps: Iterable[list[tuple[int, int, int]]]
) -> list[Tensor]:
    """Return the logits of every position of each sequence, [tokens, V]."""
    for view in kv:
        view.k.fill_(torch.nan)
        view.v.fill_(torch.nan)
    ids = [torch.from_numpy(np.random.default_rng(s).integers(0, VOCAB, n)) for s, n in enumerate(LENGTHS)]
    found = [torch.full((n, VOCAB), torch.nan) for n in LENGTHS]
    for chunks in steps:
        tokens = torch.cat([ids[s][start : start + count] for s, start, count in chunks])
        hidden, step = embedded(model, tokens, step_of(model, kv, chunks))
        logits = model.head(model.norm(recordings.run_layers(model, hidden, step)))
        for (s, start, count), rows in zip(chunks, logits.split([count for *_, count in chunks]), strict=True):
            found[s][start : start + count] = rows
    return found


@needs_native
@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", "bfloat16"), *((kind, "float32") for kind in MODELS)])
def test_random_schedules_give_the_same_bits(kind: str, dtype: str) -> None:
    model, recordings = made(kind, dtype), LayerRecordings()
    kv = cache_of(model)
    alone = run(model, kv, recordings, [[(s, 0, n)] for s, n in enumerate(LENGTHS)])
    assert all(rows.isfinite().all() for rows in alone)
    for seed in range(1000 if FULL else 4):
        found = run(model, kv, recordings, schedule(np.random.default_rng(seed)))
        assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True)), seed
    assert recordings.counts["replayed"] > 0 or kind.endswith("moe")


def test_the_plan_names_kernels_of_one_order_and_the_others_with_their_reason() -> None:
    args = parse_checkpoint_config(BASE | MODELS["qwen3_moe"] | {"model_type": "qwen3_moe"})
    plan = planned(args, batch_invariant=True, probe=lambda need: "needs AMX" if "AMX" in need else "")
    chosen = {choice.op: choice for choice in plan.kernels}
    assert all(FIXED_ORDER in choice.features for choice in chosen.values()), chosen
    assert {chosen[op].name for op in ("attention", "routing")} == {"invariant_cpu"}
    assert ("native", "has no fixed order") in chosen["attention"].rejected
    assert plan.experts is not None and plan.experts.experts == "invariant_cpu"
    assert {one.layout for one in plan.linears.values()} == {"panels"}
    usual = planned(args, probe=lambda need: "needs AMX" if "AMX" in need else "")
    assert not [choice for choice in usual.kernels if choice.name.startswith("invariant")]


def test_an_engine_without_kernels_of_one_order_is_refused_with_the_table() -> None:
    args = parse_checkpoint_config(BASE | {"model_type": "qwen3"})
    with pytest.raises(ConfigError, match="no implementation of norm serves .* with fixed order .*native: no compiler"):
        planned(args, batch_invariant=True, probe=lambda need: "no compiler")
    with pytest.raises(ConfigError, match="linear .*cpu: has no fixed order"):
        planned(args, batch_invariant=True, forced={"linear": "cpu"})
