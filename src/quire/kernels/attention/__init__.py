"""Causal attention over the paged KV cache.

write_kv(k [T, Hkv, D], v [T, Hkv, D], kv, kv_slots [T] int64) -> None
    Store each token's key and value at slot = block * block_size + offset. Block 0 takes padding.
paged_attention(q [T, Hq, D], kv, meta, scale, window=None, soft_cap=None, sinks=None) -> [T, Hq, D]
    Row i of sequence s is at position p = seq_len_s - query_len_s + i and attends to positions <= p of its own
    sequence; with `window` w, only to positions > p - w. score = scale * q . k; with `soft_cap` c it becomes
    c * tanh(score / c); `sinks` [Hq] adds one score per head that takes weight and gives nothing. Query head h reads
    KV head h // (Hq / Hkv). Softmax in float32. The result has q's dtype.

Contract: all KV of the step is written before any row attends, so a sequence may read blocks that another sequence of
the same step fills. Slots of a block past the sequence's length hold anything, NaN included, and are never read.
Features an implementation may declare: window, soft_cap, sinks, and

tape  It can be recorded (kernels/native/tape.py) in a step where rows_only(meta, block_size) is true: no sequence has a
    chunk of a prompt. retarget(tape address, meta, block_size, num_heads, head_dim) gives what is recorded the rows of
    another such step, which must live until it has been played.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class KVView:
    """One layer's keys and values inside the arena.

    k, v   [num_blocks, Hkv, block_size, D] strided views: the block stride is the page's, the rest is contiguous
    """

    k: Tensor
    v: Tensor

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.k.shape[2]


@dataclass
class AttentionMeta:
    """Who attends to what in one step; the same for all layers of a KV group.

    query_start    [S + 1] int32: rows query_start[s] .. query_start[s + 1] belong to sequence s (tensor or list)
    seq_lens       [S] int32: context length, this step's tokens included (tensor or list)
    block_tables   [S, max_blocks] int32; entries past a sequence's last block are never read
    kv_slots       [T] int64: where each row's key and value are written
    table_rows     [S] int32: the row of block_tables that belongs to each sequence; None: its own index
    max_query_len, max_seq_len   no sequence has more rows, or a longer context (upper bounds known without waiting for
                   the device); None: read from the tensors
    plans          scratch of the implementation: what it derives from the above, once per step, by block size
    """

    query_start: Tensor | list[int]
    seq_lens: Tensor | list[int]
    block_tables: Tensor
    kv_slots: Tensor
    table_rows: Tensor | None = None
    max_query_len: int | None = None
    max_seq_len: int | None = None
    plans: dict[int, object] = field(default_factory=dict)


def as_list(values: Tensor | list[int]) -> list[int]:
    """Lengths as Python integers."""
    return values.tolist() if isinstance(values, Tensor) else list(values)
