"""The step operations in Triton; contract and layout of the packed buffer: see `quire.kernels.step`."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.step import (
    HEADER,
    NUM_DECODES,
    NUM_ROWS,
    NUM_RUNS,
    NUM_SEQS,
    NUM_TOKENS,
    RUN_WORDS,
    RUNS_AT,
    StepBuffers,
    StepWords,
    Tables,
)
from quire.kernels.triton_runtime import jit, tl

PROGRAMS = 128  # programs of `_apply_kernel`, which share the runs
BLOCK = 128
COPIED = 1024  # words that a program of `_copy_kernel` copies
KEPT = 1024  # numbers of a state that a program of `_keep_kernel` copies


def apply_runs(words: Tensor) -> None:
    """Copy the words of every run (table change) in `words` to the run's device address."""
    _apply_kernel[(PROGRAMS,)](words, PROGRAMS, RUN_WORDS, NUM_RUNS, RUNS_AT, num_warps=4)


def copy_words(source: Tensor, target: Tensor) -> None:
    """Copy int32 words [N] between the device and pinned host memory, in the order of the stream.

    A kernel reads or writes the host's memory. A copy of the driver waits for all earlier copies of its direction, also
    for those of other streams: a step would wait until blocks of the KV cache have come from host memory.
    """
    count = source.numel()
    _copy_kernel[(-(-count // COPIED),)](source, target, count, COPIED, num_warps=4)


def build_inputs(step: StepWords, tables: Tables, buffers: StepBuffers) -> None:
    """Fill `buffers` with the inputs of a step (token ids, positions, KV slots, ...). See `quire.kernels.step`."""
    tokens, seqs, rows = len(buffers.token_ids), len(buffers.seq_lens), len(buffers.sample_rows)
    token_programs, seq_programs = -(-tokens // BLOCK), -(-max(seqs, rows) // BLOCK)
    block_tables = tables.block_tables
    _inputs_kernel[(token_programs + seq_programs,)](
        step.words,
        tables.computed,
        tables.history,
        block_tables,
        buffers.token_ids,
        buffers.positions,
        buffers.kv_slots,
        buffers.live,
        buffers.seq_lens,
        buffers.sample_rows,
        buffers.sample_slots,
        buffers.sample_positions,
        buffers.drafts,
        tables.history.stride(0),
        block_tables.stride(1),
        block_tables.stride(0),
        buffers.kv_slots.stride(0),
        tables.computed.shape[0] - 1,
        token_programs,
        tokens,
        seqs,
        rows,
        step.max_seqs,
        tables.block_sizes,
        step.max_seqs.bit_length(),
        BLOCK,
        HEADER,
        NUM_SEQS,
        NUM_TOKENS,
        NUM_DECODES,
        NUM_ROWS,
        len(block_tables),
        num_warps=4,
    )


def gather_blocks(step: StepWords, tables: Tables, group: int, seqs: int, most: int) -> tuple[Tensor, Tensor]:
    """Return (block_tables, table_rows) of `AttentionMeta` for a KV group and the first `seqs` sequences of a step.

    Copies nothing: returns the table of all slots, and the sequences' slots as rows.
    No sequence has more than `most` blocks. See `quire.kernels.step`.
    """
    return tables.block_tables[group], step.slots[:seqs]


def finish_step(
    step: StepWords, tables: Tables, buffers: StepBuffers, tokens: Tensor, codes: Tensor, out: Tensor
) -> None:
    """Write sampled tokens to the history and to `out`, and advance the computed lengths of the sequences.

    See `quire.kernels.step`. `buffers` have their full sizes: the kernel reads the step's sizes from its header.
    """
    _finish_kernel[(-(-max(step.max_seqs, out.shape[1]) // BLOCK),)](
        step.words,
        tables.computed,
        tables.history,
        buffers.seq_lens,
        buffers.sample_slots,
        buffers.sample_positions,
        buffers.drafts,
        tokens,
        codes,
        out,
        tables.history.stride(0),
        tables.history.shape[1],
        step.max_seqs,
        out.shape[1],
        BLOCK,
        HEADER,
        NUM_SEQS,
        NUM_DECODES,
        NUM_ROWS,
        num_warps=4,
    )


def keep_states(
    step: StepWords, buffers: StepBuffers, hidden: Tensor, kept: Tensor, first: Tensor, behind: bool
) -> None:
    """Keep hidden states [T, width] of a step's rows in `kept` [num_slots, room, width]. See `quire.kernels.step`."""
    rows, width = hidden.shape
    _keep_kernel[(len(buffers.seq_lens), max(1, -(-width // KEPT)))](
        step.words,
        buffers.seq_lens,
        hidden,
        kept,
        first,
        hidden.stride(0),
        rows,
        width,
        kept.shape[1],
        step.max_seqs,
        behind,
        KEPT,
        HEADER,
        NUM_SEQS,
        NUM_DECODES,
        num_warps=4,
    )


@jit
def _apply_kernel(packed, PROGRAMS: tl.constexpr, WORDS: tl.constexpr, NUM_RUNS: tl.constexpr, RUNS_AT: tl.constexpr):
    """Copy the runs of the packed buffer to their addresses. Grid (PROGRAMS,).

    packed              [.] int32, see `quire.kernels.step`
    WORDS               most words of a run
    NUM_RUNS, RUNS_AT   indices in the header
    """
    count = tl.load(packed + NUM_RUNS)
    runs = packed + tl.load(packed + RUNS_AT)
    lanes = tl.arange(0, WORDS)
    run = tl.program_id(0)
    while run < count:
        low = tl.load(runs + 4 * run).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(runs + 4 * run + 1).to(tl.int64)
        length = tl.load(runs + 4 * run + 2)
        source = packed + tl.load(runs + 4 * run + 3)
        target = ((high << 32) | low).to(tl.pointer_type(tl.int32))
        words = tl.load(source + lanes, mask=lanes < length)
        tl.store(target + lanes, words, mask=lanes < length)
        run += PROGRAMS


@jit
def _copy_kernel(source, target, count, COPIED: tl.constexpr):
    """Copy `count` int32 words. Grid (ceil(count / COPIED),)."""
    words = tl.program_id(0) * COPIED + tl.arange(0, COPIED)
    tl.store(target + words, tl.load(source + words, mask=words < count, volatile=True), mask=words < count)


@jit
def _sequence(starts, num_seqs, token, live, STEPS: tl.constexpr):
    """Return the sequence of each token [BLOCK]: the last one that starts at or before it."""
    low = tl.zeros_like(token)
    high = low + num_seqs
    for _ in range(STEPS):
        middle = (low + high) // 2
        after = tl.load(starts + middle, mask=live, other=0) <= token
        low = tl.where(after, middle, low)
        high = tl.where(after, high, middle)
    return low


@jit
def _inputs_kernel(
    packed,
    computed,
    history,
    block_tables,
    token_ids,
    positions,
    kv_slots,
    alive,
    seq_lens,
    sample_rows,
    sample_slots,
    sample_positions,
    drafts,
    history_stride,
    table_stride,
    group_stride,
    kv_stride,
    dummy,
    token_programs,
    tokens,
    seqs,
    rows,
    MAX_SEQS: tl.constexpr,
    BLOCK_SIZES: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADER: tl.constexpr,
    NUM_SEQS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    NUM_DECODES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Build the inputs of a step. Grid: token_programs programs of BLOCK tokens, then programs of BLOCK sequences.

    packed                                 [.] int32: header, slots, starts, samples, see `quire.kernels.step`
    computed, history, block_tables        `Tables` by slot, inputs
    token_ids, positions, kv_slots, alive  `StepBuffers` by token, outputs; `alive` is its `live`
    seq_lens                               `StepBuffers` by sequence, output
    sample_rows, sample_slots, sample_positions, drafts   `StepBuffers` by sampled row, outputs
    history_stride, table_stride           elements from slot to slot in history and in block_tables
    group_stride, kv_stride                elements from KV group to KV group in block_tables and in kv_slots
    dummy                                  slot of padded rows
    tokens, seqs, rows                     lengths of the output buffers: at least the sizes in the header
    MAX_SEQS, STEPS                        sequences that the layout holds; iterations of a bisection over them
    BLOCK_SIZES, GROUPS                    tokens of a KV block, by group; KV groups
    HEADER, NUM_SEQS, NUM_TOKENS, NUM_DECODES, NUM_ROWS   words of the header, and indices in it
    """
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    num_seqs = tl.load(packed + NUM_SEQS)
    slots = packed + HEADER
    starts = slots + MAX_SEQS
    if program < token_programs:
        token = program * BLOCK + lanes
        live = token < tl.load(packed + NUM_TOKENS)
        seq = _sequence(starts, num_seqs, token, live, STEPS)
        slot = tl.load(slots + seq, mask=live, other=0).to(tl.int64)
        position = tl.load(computed + slot, mask=live, other=0) + token - tl.load(starts + seq, mask=live, other=0)
        position = tl.where(live, position, 0)
        word = tl.load(history + slot * history_stride + position, mask=live, other=0)
        inside = token < tokens
        tl.store(token_ids + token, tl.maximum(word, 0).to(tl.int64), mask=inside)  # a draft may be -1
        tl.store(alive + token, live & (word >= 0), mask=inside)
        tl.store(positions + token, position, mask=inside)
        for group in tl.static_range(GROUPS):
            blocks = block_tables + group * group_stride + slot * table_stride
            block = tl.load(blocks + position // BLOCK_SIZES[group], mask=live, other=0).to(tl.int64)
            where = tl.where(live, block * BLOCK_SIZES[group] + position % BLOCK_SIZES[group], 0)
            tl.store(kv_slots + group * kv_stride + token, where, mask=inside)
    else:
        seq = (program - token_programs) * BLOCK + lanes
        live = seq < num_seqs
        slot = tl.load(slots + seq, mask=live, other=0).to(tl.int64)
        first = tl.load(starts + seq, mask=live, other=0)
        length = tl.load(computed + slot, mask=live, other=0) + tl.load(starts + seq + 1, mask=live, other=0) - first
        tl.store(seq_lens + seq, tl.where(live, length, 0).to(tl.int32), mask=seq < seqs)
        row = seq
        sampled = row < tl.load(packed + NUM_ROWS)
        decodes = tl.load(packed + NUM_DECODES)
        verified = tl.load(starts + decodes)  # rows of decodes; row r is token r
        decoding = row < verified
        prompt = tl.load(starts + MAX_SEQS + 1 + decodes + row - verified, mask=sampled & (row >= verified), other=0)
        owner = tl.where(decoding, _sequence(starts, num_seqs, row, decoding, STEPS), prompt)
        slot = tl.load(slots + owner, mask=sampled, other=0).to(tl.int64)
        first = tl.load(starts + owner, mask=sampled, other=0)
        end = tl.load(starts + owner + 1, mask=sampled, other=0)
        token = tl.where(decoding, row, end - 1)
        position = tl.load(computed + slot, mask=sampled, other=0) + token + 1 - first
        follows = sampled & decoding & (token + 1 < end)
        draft = tl.load(history + slot * history_stride + position, mask=follows, other=-1)
        tl.store(sample_rows + row, tl.where(sampled, token, 0).to(tl.int64), mask=row < rows)
        tl.store(sample_slots + row, tl.where(sampled, slot, dummy), mask=row < rows)
        tl.store(sample_positions + row, tl.where(sampled, position, 0), mask=row < rows)
        tl.store(drafts + row, draft, mask=row < rows)


@jit
def _finish_kernel(
    packed,
    computed,
    history,
    seq_lens,
    sample_slots,
    sample_positions,
    drafts,
    tokens,
    codes,
    out,
    history_stride,
    history_length,
    MAX_SEQS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADER: tl.constexpr,
    NUM_SEQS: tl.constexpr,
    NUM_DECODES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
):
    """Write the results of a step to the tables. Grid (ceil(max(sequences, rows) / BLOCK),).

    packed                           [.] int32, see `quire.kernels.step`
    computed, history                `Tables` by slot, outputs
    seq_lens                         [seqs] int32: lengths with this step, the new `computed` of prompts
    sample_slots, sample_positions   [rows] int64: slot and position of each sampled token
    drafts                           [rows] int32: draft of each sampled token
    tokens, codes                    [rows] int64 and uint8: the sampled tokens and their codes
    out                              [3, MAX_ROWS] int32: (token, code, draft) by row, output
    history_stride, history_length   elements from slot to slot; tokens of a slot's history
    HEADER, NUM_SEQS, NUM_DECODES, NUM_ROWS   words of the header, and indices in it
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < tl.load(packed + NUM_SEQS)
    decodes = tl.load(packed + NUM_DECODES)
    starts = packed + HEADER + MAX_SEQS
    slot = tl.load(packed + HEADER + lane, mask=live, other=0).to(tl.int64)
    length = tl.load(seq_lens + lane, mask=live, other=0).to(tl.int64)
    decoding = live & (lane < decodes)
    last = tl.load(starts + lane, mask=decoding, other=0)  # the last accepted row of the decode
    end = tl.load(starts + lane + 1, mask=decoding, other=0)
    going = last + 1 < end
    while tl.max(going.to(tl.int32), 0) > 0:
        token = tl.load(tokens + last, mask=going, other=0).to(tl.int32)
        draft = tl.load(drafts + last, mask=going, other=-1)
        accepted = going & (token == draft) & (tl.load(codes + last + 1, mask=going, other=1) == 0)
        last += accepted.to(tl.int32)
        going = accepted & (last + 1 < end)
    length = tl.where(decoding, tl.load(sample_positions + last, mask=decoding, other=0), length)
    tl.store(computed + slot, length, mask=live)
    token = tl.load(tokens + last, mask=decoding, other=0).to(tl.int32)  # the accepted rows before it are the drafts
    tl.store(history + slot * history_stride + length, token, mask=decoding & (length < history_length))

    row = lane
    sampled = row < tl.load(packed + NUM_ROWS)
    token = tl.load(tokens + row, mask=sampled, other=0).to(tl.int32)
    slot = tl.load(sample_slots + row, mask=sampled, other=0)
    position = tl.load(sample_positions + row, mask=sampled, other=0)
    room = sampled & (row >= tl.load(starts + decodes)) & (position < history_length)
    tl.store(history + slot * history_stride + position, token, mask=room)
    tl.store(out + row, token, mask=sampled)
    tl.store(out + MAX_ROWS + row, tl.load(codes + row, mask=sampled, other=0).to(tl.int32), mask=sampled)
    tl.store(out + 2 * MAX_ROWS + row, tl.load(drafts + row, mask=sampled, other=-1), mask=sampled)


@jit
def _keep_kernel(
    packed,
    seq_lens,
    hidden,
    kept,
    first,
    hidden_stride,
    rows,
    width,
    ROOM: tl.constexpr,
    MAX_SEQS: tl.constexpr,
    BEHIND: tl.constexpr,
    KEPT: tl.constexpr,
    HEADER: tl.constexpr,
    NUM_SEQS: tl.constexpr,
    NUM_DECODES: tl.constexpr,
):
    """Keep states of a step's rows by slot. Grid (sequences, max(1, ceil(width / KEPT))).

    packed                [.] int32, see `quire.kernels.step`
    seq_lens              [seqs] int32: lengths with this step
    hidden                [rows, width] states, `hidden_stride` elements from row to row
    kept                  [num_slots, ROOM, width], output
    first                 [num_slots] int64: position of the first state of a slot; without BEHIND an output
    BEHIND                True: the row of a decode comes behind the states that are kept already
    HEADER, NUM_SEQS, NUM_DECODES   words of the header, and indices in it
    """
    seq = tl.program_id(0)
    if seq < tl.load(packed + NUM_SEQS):
        slot = tl.load(packed + HEADER + seq).to(tl.int64)
        start = tl.load(packed + HEADER + MAX_SEQS + seq)
        end = tl.load(packed + HEADER + MAX_SEQS + seq + 1)
        length = tl.load(seq_lens + seq).to(tl.int64)
        decoding = seq < tl.load(packed + NUM_DECODES)
        place = length * 0
        count = tl.where(decoding, tl.minimum(end - start, ROOM), 1)
        if BEHIND:
            if decoding:
                place = tl.minimum(tl.maximum(length - 1 - tl.load(first + slot), 0), ROOM - 1)
                count = 1
        elif tl.program_id(1) == 0:
            tl.store(first + slot, length - count)
        lanes = tl.program_id(1) * KEPT + tl.arange(0, KEPT)
        for row in range(count):
            source = end - count + row
            state = tl.load(
                hidden + source.to(tl.int64) * hidden_stride + lanes, mask=(lanes < width) & (source < rows)
            )
            tl.store(kept + (slot * ROOM + place + row) * width + lanes, state, mask=(lanes < width) & (source < rows))
