"""Causal attention over the paged KV cache.

paged_attention(q [T, Hq, D], kv, meta, scale, window=None, soft_cap=None, sinks=None) -> [T, Hq, D]
    Row i of sequence s is at position p = seq_len_s - query_len_s + i, or where `meta.row_positions` says, and attends
    to positions <= p of its own sequence; with `window` w, only to positions > p - w. score = scale * q . k; with
    `soft_cap` c it becomes c * tanh(score / c); `sinks` [Hq] adds one score per head that takes weight and gives
    nothing. Query head h reads KV head h // (Hq / Hkv). Softmax in float32. The result has q's dtype.

Contract: all KV of the step is written (`quire.kernels.heads`) before any row attends, so a sequence may read blocks
that another sequence of the same step fills. Slots of a block past the sequence's length may hold any key, NaN too. On
a GPU every value in the cache is a finite number, because tiles are multiplied whole: who writes it puts the largest
where there is none.
Features an implementation may declare: window, soft_cap, sinks, rows (it takes `row_positions`), and

tape  It can be recorded (kernels/native/tape.py) in a step where rows_only(meta, block_size) is true: no sequence has a
    chunk of a prompt. retarget(tape address, meta, block_size, num_heads, head_dim) gives what is recorded the rows of
    another such step, which must live until it has been played.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

Prompt = tuple[int, int, int, int]  # first row, end of its rows, sequence of the step, tokens of context before them


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


@dataclass(frozen=True)
class SharedBlocks:
    """Decodes whose contexts begin with the same blocks, in groups; int32 on the device, of static sizes.

    starts    [N + 1]: members starts[g] .. starts[g + 1] belong to group g; unused groups are empty
    members   [M]: sequences of the step, each at most once
    place     [S]: where a sequence is in `members`; -1: nowhere
    blocks    [S]: how many leading blocks it shares with its group
    """

    starts: Tensor
    members: Tensor
    place: Tensor
    blocks: Tensor

    @staticmethod
    def words(num_groups: int, num_seqs: int) -> int:
        """Length of the array that holds all four, each on 16 bytes: kernels are compiled for that."""
        return padded(num_groups + 1) + 3 * padded(num_seqs)

    @staticmethod
    def view(packed: Tensor, num_groups: int, most_seqs: int, num_seqs: int) -> SharedBlocks:
        """The four parts, for `num_seqs` sequences, of what `triton_plan.pack_shared` gives for up to `most_seqs`."""
        starts, members, place, blocks = packed.split([padded(num_groups + 1), *[padded(most_seqs)] * 3])
        return SharedBlocks(starts[: num_groups + 1], members[:num_seqs], place[:num_seqs], blocks[:num_seqs])


@dataclass
class AttentionMeta:
    """Who attends to what in one step; the same for all layers of a KV group.

    query_start    [S + 1] int32: rows query_start[s] .. query_start[s + 1] belong to sequence s (tensor or list)
    seq_lens       [S] int32: context length, this step's tokens included (tensor or list)
    block_tables   [S, max_blocks] int32; entries past a sequence's last block are never read
    kv_slots       [T] int64: where each row's key and value are written
    table_rows     [S] int32: the row of block_tables that belongs to each sequence; None: its own index
    max_query_len  no sequence has more rows (known without waiting for the device); None: read from the tensors
    decode_len     a sequence of at most this many rows is a decode: 1, or one more than the drafts to verify; 0: none
                   is
    shared         which decodes share the beginning of their context, for implementations that read it once
    prompts        the sequences from the first of more than `decode_len` rows on, for who wants to know them on the
                   host; none in a captured step; None: they are to be read from the lengths
    row_positions  [T] int64: position of each row in its sequence, for steps that compute chosen rows; below seq_lens,
                   ascending in a sequence, and decode_len is 0. None: the rows are the last of their sequences
    plans          scratch of the implementation: what it derives from the above, once per step, by what it is for
    """

    query_start: Tensor | list[int]
    seq_lens: Tensor | list[int]
    block_tables: Tensor
    kv_slots: Tensor
    table_rows: Tensor | None = None
    max_query_len: int | None = None
    decode_len: int = 1
    shared: SharedBlocks | None = None
    prompts: tuple[Prompt, ...] | None = None
    row_positions: Tensor | None = None
    plans: dict[object, object] = field(default_factory=dict)


def as_list(values: Tensor | list[int]) -> list[int]:
    """Lengths as Python integers."""
    return values.tolist() if isinstance(values, Tensor) else list(values)


def padded(words: int) -> int:
    """Whole 16 bytes of int32: kernels are compiled for arrays that begin there."""
    return -(-words // 4) * 4
