"""Around the forward pass on a device: slot tables brought up to date, inputs built from them, results written back.

A step comes as one packed int32 buffer, copied to the device in one go (`worker/packed.py` writes it):

    header    [HEADER] num_runs, where the runs start, num_seqs, num_tokens, num_samples
    slots     [max_seqs]      slot of each sequence, in order; the dummy slot past the last
    starts    [max_seqs + 1]  first token of each sequence; the number of tokens past the last
    samples   [max_seqs]      which sequences sample a token
    shared    [words]         what attention wants to know of shared prefixes, as it likes
    runs      [num_runs, 4]   device address (low and high word), length, where in the buffer the words start
    words     what the runs copy

Every kernel has a grid that depends on buffer sizes alone, and learns from the header how much of it there is to do.
"""

from dataclasses import dataclass

from torch import Tensor

HEADER = 8
NUM_RUNS, RUNS_AT, NUM_SEQS, NUM_TOKENS, NUM_SAMPLES = range(5)
RUN_WORDS = 1024  # of a run at most: longer ones are split, so that programs share them


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The device's tables by slot; the last slot is a dummy for padding.

    block_table [num_slots, max_blocks] int32;  computed [num_slots] int64 tokens whose KV is written
    history     [num_slots, max_model_len] int32 token ids by position
    """

    block_table: Tensor
    computed: Tensor
    history: Tensor
    block_size: int


@dataclass(frozen=True, kw_only=True)
class StepBuffers:
    """What a forward pass reads, at addresses that never change.

    token_ids, positions, kv_slots   [max_tokens] int64; past the last token: id 0, position 0, slot 0 of block 0
    seq_lens                         [max_seqs] int32 context with this step; 0 past the last sequence
    sample_rows, sample_slots, sample_positions   [max_seqs] int64: the token row whose logits are sampled, its slot,
                                     and the position of the new token; 0, the dummy slot and 0 past the last
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    seq_lens: Tensor
    sample_rows: Tensor
    sample_slots: Tensor
    sample_positions: Tensor
