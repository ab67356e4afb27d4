"""The exchanges of a step, in bytes that a rank hands over for a token or a row. `explain/test_ranks.py` runs them."""

from quire.config.checkpoint import ModelArgs, parse_checkpoint_config
from quire.config.placement import Parallel
from quire.models.collectives import Collective, collectives

RAW = {"model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
       "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
       "num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "decoder_sparse_step": 2}  # fmt: skip


def args(**changes: int) -> ModelArgs:
    return parse_checkpoint_config(RAW | changes)


def exchanges(parallel: Parallel, spread: str = "") -> list[Collective]:
    return list(collectives(args(), parallel, item_bytes=2, device="cuda", spread=spread))


def test_messages_are_bytes_that_a_rank_hands_over_for_a_token_of_its_own() -> None:
    """A hidden state has 32 values of 2 bytes, the vocabulary 64 logits of 4."""
    assert exchanges(Parallel()) == []
    both = {(one.kind, one.where): one for one in exchanges(Parallel(tp=2, pp=3))}
    summed = both["all-reduce", "attention output"]
    assert summed.message_bytes == 64 and summed.times == 6
    assert both["send", "hidden states to the next stage"].times == 2
    assert both["all-gather", "logits"].message_bytes == 128, "half of the vocabulary"
    assert both["all-gather", "each rank's best ids"].message_bytes == 8
    spread = exchanges(Parallel(dp=4, experts=True), "all-gather")
    both_ways = [("all-gather", 64, 3), ("reduce-scatter", 256, 3)]
    assert [(one.kind, one.message_bytes, one.times) for one in spread] == both_ways, "back go the rows of 4 replicas"
    direct = exchanges(Parallel(dp=4, experts=True), "all-to-all")
    assert [(one.kind, one.message_bytes) for one in direct] == [("all-to-all", 192)] * 2, "to 3 ranks, not to all 4"
    assert exchanges(Parallel(dp=4)) == [], "replicas that share no experts"
