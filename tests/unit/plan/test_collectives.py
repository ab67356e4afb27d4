"""The exchanges of a step, in bytes that a rank hands over for a token or a row. `explain/test_ranks.py` runs them."""

from pathlib import Path
from typing import Any

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.config.engine import EngineConfig
from quire.contracts.parallel import Parallel
from quire.contracts.scheme import AS_THEY_ARE, Wire
from quire.distributed.process_group import MOST_SENT
from quire.explain.describe import plan_engine
from quire.plan.collectives import Collective, buffer_bytes, collectives
from quire.plan.engine import EnginePlan
from quire.plan.placement import ranks
from quire.plan.weight_bytes import UNDER_WAY

RAW = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 2,
}


def args(**changes: int) -> ModelArgs:
    return parse_checkpoint_config(RAW | changes)


def exchanges(parallel: Parallel, prefill: str = "", decode: str = "", wire: Wire = AS_THEY_ARE) -> list[Collective]:
    spread = {"prefill": prefill, "decode": decode or prefill} if prefill else {}
    return list(collectives(args(), parallel, item_bytes=2, device="cuda", spread=spread, wire=wire))


def test_messages_are_bytes_that_a_rank_hands_over_for_a_token_of_its_own() -> None:
    """A hidden state has 32 values of 2 bytes, the vocabulary 64 logits of 4."""
    assert exchanges(Parallel()) == []
    both = {(one.kind, one.where): one for one in exchanges(Parallel(tp=2, pp=3))}
    summed = both["all-reduce", "attention output"]
    assert summed.message_bytes == 64 and summed.times == 6
    assert both["send", "hidden states to the next stage"].times == 2
    assert both["all-gather", "logits"].message_bytes == 128, "half of the vocabulary"
    assert both["all-gather", "each rank's best ids"].message_bytes == 8


def test_replicas_that_share_experts_exchange_rows() -> None:
    """A packed row has 64 bytes of hidden state, and an id and a weight of 4 bytes each for each of 3 experts."""
    spread = exchanges(Parallel(dp=4, experts=True), "all-gather")
    assert [(one.kind, one.group, one.message_bytes, one.per, one.times) for one in spread] == [
        ("all-gather", "ep", 64 + 24, "token", 3),
        ("reduce-scatter", "ep", 64, "token of all replicas", 3),
    ]
    cut = {(one.kind, one.group, one.where): one for one in exchanges(Parallel(dp=2, tp=2, experts=True), "all-gather")}
    assert cut["all-reduce", "tp", "feed-forward output"].times == 3, "of the dense layers alone"
    assert cut["all-reduce", "tp", "attention output"].times == 6
    there = cut["all-gather", "ep", "tokens to experts, with ids and weights"]
    assert (there.message_bytes, there.per, there.when) == (88, "token of its share", "a replica has tokens")
    back = cut["all-gather", "tp", "outputs of the replica's tokens"]
    assert (back.message_bytes, back.per, back.times) == (64, "token of its share", 3)
    pulled = exchanges(Parallel(dp=4, experts=True), "all-gather", "pull")
    assert [(one.kind, one.when) for one in pulled] == [
        ("all-gather", "a replica has a prompt"),
        ("reduce-scatter", "a replica has a prompt"),
        *[("pull", "no replica has a prompt")] * 3,
    ]
    assert [(one.message_bytes, one.per) for one in pulled[2:]] == [
        (24, "token"),
        *[(64, "token and rank with an expert of it")] * 2,
    ]
    assert pulled[-1].algorithm == "symmetric memory"
    assert exchanges(Parallel(dp=4)) == exchanges(Parallel(dp=4), "all-gather") == [], "replicas that share no experts"


def test_rows_in_8_bits_have_a_byte_per_number_and_scales() -> None:
    """Hidden states of 32 values on the way to experts; results come back as they are."""
    parallel = Parallel(dp=4, experts=True)
    for wire, size in ((Wire("int8"), 32 + 4), (Wire("e4m3", 16), 32 + 8), (AS_THEY_ARE, 64)):
        words = f"tokens to experts {wire}" if wire.values else "tokens to experts"
        there, back = exchanges(parallel, "all-gather", wire=wire)
        assert (there.where, there.message_bytes, back.message_bytes) == (
            f"{words}, with ids and weights",
            size + 24,
            64,
        )
        _, there, back = exchanges(parallel, "pull", wire=wire)
        assert (there.where, there.message_bytes, back.message_bytes) == (words, size, 64)


def test_buffers_of_replicas() -> None:
    """8 tokens of 64 bytes; all-gather: twice the packed rows of 4 replicas. Dense stages exchange no tokens."""

    def room(parallel: Parallel, *spread: str, number: int = 0, wire: Wire = AS_THEY_ARE, **changes: int) -> int:
        made = args(**changes)
        return buffer_bytes(
            made,
            list(ranks(made, parallel))[number],
            parallel,
            item_bytes=2,
            tokens=8,
            rows=1,
            spread=dict(zip(("prefill", "decode"), spread, strict=False)),
            wire=wire,
        )

    together = Parallel(dp=4, experts=True)
    assert room(together) == room(Parallel(dp=4), "all-gather") == 0
    assert room(together, "all-gather", "all-gather") == 2 * 4 * 8 * (64 + 24)
    assert room(together, "pull", "pull") == (2 * 4 + 1) * 8 * 64 + 8 * 24
    assert room(together, "all-gather", "all-gather", wire=Wire("int8")) == 2 * 4 * 8 * (36 + 24)
    assert room(together, "pull", "pull", wire=Wire("int8")) == (4 * 64 + 36 + 24 + 4 * 36) * 8
    assert room(together, "pull", "all-gather") == room(together, "all-gather", "pull") == 2 * 4 * 8 * (64 + 24)
    stages = Parallel(dp=4, pp=6, experts=True)  # layers 1, 3 and 5 have experts
    assert room(stages, "all-gather", number=1) - room(stages, "all-gather", number=2) == 2 * 4 * 8 * (64 + 24)


def test_experts_that_move_need_room(shared: Path) -> None:
    """The slots of a layer may all change, and as many experts as a rank sends at a time are on their way."""

    def plan(**options: Any) -> EnginePlan:
        config = EngineConfig.from_flat(
            model=str(shared / "hf" / "DeepSeek-V2-Lite"), data_parallel_size=2, enable_expert_parallel=True, **options
        )
        return plan_engine(config, "h200").plan

    fixed, moved = plan(), plan(enable_eplb=True, eplb_config={"num_redundant_experts": 2})
    expert = 3 * 2048 * 1408 * 2
    assert moved.buffer_bytes - fixed.buffer_bytes == (33 + UNDER_WAY) * expert
    assert 2 * UNDER_WAY == MOST_SENT
