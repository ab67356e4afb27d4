"""Causal attention over the paged KV cache.

paged_attention(q [T, Hq, D], kv, meta, scale, window=None, soft_cap=None, sinks=None) -> [T, Hq, D]
    Row i of sequence s is at position p = seq_len_s - query_len_s + i; `meta.row_positions`, if given, replaces p. The
    row attends to positions <= p of its own sequence. Query head h reads KV head h // (Hq / Hkv). Softmax in float32;
    the result has q's dtype. score = scale * q . k.

    window     w > 0: the row attends only to positions > p - w. w < 0: only to positions of its own chunk of -w tokens,
               that is from floor(p / -w) * -w on
    soft_cap   c: the score becomes c * tanh(score / c)
    sinks      [Hq]: one more score per head. It takes part in the softmax and adds nothing to the result

Contract: all KV of the step is written (`quire.kernels.heads`) before any row attends. So a sequence may read blocks
that another sequence of the same step fills, if the step has parts of prompts: decodes fill blocks for later steps
alone, and `kernels/joined/` writes and reads in one launch. Keys past a sequence's length may be anything, NaN too.
Kernels of a GPU multiply whole tiles, so there every value in the cache is finite: the kernel that writes it replaces
any other value by the largest number.

A cache of 8-bit floating-point numbers holds codes (`eight_bits.py`): a value is its code times a scale of `KVView`.

Features that an implementation may declare: window (above 0), chunked (a window below 0), soft_cap, sinks, rows (it
takes `row_positions`), e4m3 cache, e5m2 cache (types of 8-bit caches that it reads; of `quire.kernels.heads`: that it
writes), heads (its plan of a step serves `kernels/joined/decode_attention.py`, too), clusters
(`kernels/joined/decode_clusters.py` can run), and

recording   Its calls can be recorded (kernels/native/recording.py) in a step where rows_only(meta, block_size, window)
            is true: no sequence has a long chunk of a prompt. retarget(address of the recording, meta, block_size,
            num_heads, head_dim, window) gives the recorded calls of the KV group `meta.kv_group` the rows of another
            such step, whose meta must live until the recording has been replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

Prompt = tuple[int, int, int, int]  # first row, end of the rows, sequence of the step, tokens of context before them


@dataclass(frozen=True)
class KVView:
    """Keys and values of a layer, as views of the KV cache tensor, which holds all layers.

    k, v               [num_blocks, Hkv, block_size, D]: contiguous inside a block; the stride between blocks is a page,
                       which holds the block of every layer of the KV group
    k_scale, v_scale   scales of an 8-bit cache, whose values are codes times the scale; 1 for other caches
    """

    k: Tensor
    v: Tensor
    k_scale: float = field(default=1.0, compare=False)
    v_scale: float = field(default=1.0, compare=False)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.k.shape[2]


@dataclass(frozen=True)
class SharedBlocks:
    """N groups of decodes whose contexts begin with the same blocks, in a step of S sequences.

    All fields are int32 tensors of static sizes.
    starts    [N + 1]: members[starts[g]] to members[starts[g + 1] - 1] belong to group g; unused groups are empty
    members   [M]: indices of the sequences that belong to groups, group by group; M <= S
    place     [S]: index of each sequence in `members`; -1: it shares no prefix
    blocks    [S]: number of leading blocks that each sequence shares with its group
    """

    starts: Tensor
    members: Tensor
    place: Tensor
    blocks: Tensor

    @staticmethod
    def words(num_groups: int, num_seqs: int) -> int:
        """Return the number of int32 words of an array for all four fields. Each field is aligned to 16 bytes."""
        return padded(num_groups + 1) + 3 * padded(num_seqs)

    @staticmethod
    def view(packed: Tensor, num_groups: int, most_seqs: int, num_seqs: int) -> SharedBlocks:
        """Return the `SharedBlocks` that lie in a packed array, as views of it for `num_seqs` sequences.

        packed   the array of `triton_plan.pack_shared`, made for `num_groups` groups and `most_seqs` sequences
        """
        starts, members, place, blocks = packed.split([padded(num_groups + 1), *[padded(most_seqs)] * 3])
        return SharedBlocks(starts[: num_groups + 1], members[:num_seqs], place[:num_seqs], blocks[:num_seqs])


@dataclass
class AttentionMeta:
    """S sequences of a step, their T rows (tokens) and their blocks; the same for all layers of a KV group.

    query_start    [S + 1] int32: rows query_start[s] .. query_start[s + 1] - 1 belong to sequence s (tensor or list)
    seq_lens       [S] int32: context length, this step's tokens included (tensor or list)
    block_tables   [S, max_blocks] int32; entries past a sequence's last block are never read
    kv_slots       [T] int64: slot of each row's key and value in the cache, block * block_size + offset
    table_rows     [S] int32: row of `block_tables` of each sequence; None: row s belongs to sequence s
    max_query_len  upper bound of the rows of a sequence, known to the host; None: read it from the tensors
    decode_len     a sequence of at most this many rows is a decode: 1, or 1 + the number of drafts; 0: no decodes
    shared         groups of decodes with a common prefix, for implementations that read it once; None: no groups
    prompts        (first row, end of rows, sequence, tokens of context before) of each sequence after the decodes, for
                   implementations whose host needs it; () in a CUDA graph; None: taken from the lengths above. With
                   `row_positions`, the fourth number is the context's length without as many tokens as it has rows
    row_positions  [T] int64: position of each row in its sequence, for steps that compute only chosen rows. Positions
                   are below seq_lens and ascend in a sequence; decode_len is 0. None: the rows of a sequence are its
                   last tokens
    kv_group       number of the KV group
    plans          scratch of the implementation: values derived from the fields above, once per step
    most_context   upper bound of the context length of a sequence, known to the host; None: that of the engine
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
    kv_group: int = 0
    plans: dict[object, object] = field(default_factory=dict)
    most_context: int | None = None


def as_list(values: Tensor | list[int]) -> list[int]:
    """Return `values` as Python integers. A tensor on a GPU makes the host wait for the GPU."""
    return values.tolist() if isinstance(values, Tensor) else list(values)


def sequences(meta: AttentionMeta) -> tuple[Prompt, ...]:
    """Return (first row, end of the rows, sequence, tokens of context before them) for every sequence with query rows.

    If `meta` has its lengths on a GPU, the host waits for the GPU.
    """
    starts, lengths = as_list(meta.query_start), as_list(meta.seq_lens)
    spans = zip(starts, starts[1:], range(len(lengths)), strict=False)
    return tuple((first, last, s, lengths[s] - last + first) for first, last, s in spans if first < last)


def padded(words: int) -> int:
    """Round a number of int32 words up to whole 16 bytes, the alignment that kernels are compiled for."""
    return -(-words // 4) * 4
