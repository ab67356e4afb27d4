"""The step operations in PyTorch; contract: see `quire.kernels.step`."""

import torch
from torch import Tensor

from quire.kernels.step import NUM_DECODES, StepBuffers, StepWords, Tables


def build_inputs(step: StepWords, tables: Tables, buffers: StepBuffers) -> None:
    """Fill `buffers` with the inputs of a step (token ids, positions, KV slots, ...). See `quire.kernels.step`."""
    seqs, tokens, rows = step.num_seqs, step.num_tokens, step.num_rows
    slots, b = step.slots[:seqs].long(), buffers
    past = tables.computed.index_select(0, slots)
    if (tokens, seqs, rows) != (len(b.token_ids), len(b.seq_lens), len(b.sample_rows)):
        _pad(b, tokens, seqs, rows, dummy=len(tables.computed) - 1)
        b = b.cut(tokens, seqs, rows)
    if tokens == seqs:  # one token of each sequence
        owner, ends = slots, None
        b.positions.copy_(past)
        torch.add(past, 1, out=b.seq_lens)
    else:
        starts, ends = step.starts[:seqs], step.starts[1 : seqs + 1]
        counts = ends - starts
        seq = torch.repeat_interleave(counts, output_size=tokens)
        torch.add(torch.arange(tokens, device=past.device), (past - starts)[seq], out=b.positions)
        torch.add(past, counts, out=b.seq_lens)
        owner = slots[seq]
    b.token_ids.copy_(tables.history[owner, b.positions])
    torch.ge(b.token_ids, 0, out=b.live)
    places = {size: (b.positions % size, b.positions // size) for size in dict.fromkeys(tables.block_sizes)}
    for kv_slots, block_table, size in zip(b.kv_slots, tables.block_tables, tables.block_sizes, strict=True):
        inside, blocks = places[size]
        torch.add(inside, block_table[owner, blocks], alpha=size, out=kv_slots)
    verified = step.num_verified
    if verified:
        torch.arange(verified, out=b.sample_rows[:verified])
        b.sample_slots[:verified] = owner[:verified]
        torch.add(b.positions[:verified], 1, out=b.sample_positions[:verified])
    if verified > step.num_decodes:
        following = b.sample_positions[:verified].clamp(max=tables.history.shape[1] - 1)
        b.drafts[:verified] = tables.history[owner[:verified], following]
        b.drafts[step.starts[1 : step.num_decodes + 1].long() - 1] = -1  # the last rows of the decodes
        b.token_ids.clamp_(min=0)
    if rows > verified:
        chosen = step.samples[step.num_decodes : step.num_samples]
        b.sample_rows[verified:rows] = chosen if ends is None else ends[chosen] - 1
        b.sample_slots[verified:rows] = slots[chosen]
        b.sample_positions[verified:rows] = b.seq_lens[chosen]


def _pad(buffers: StepBuffers, tokens: int, seqs: int, rows: int, *, dummy: int) -> None:
    """Fill the padding past the last token, sequence and row."""
    b = buffers
    for buffer, count in (
        (b.token_ids, tokens),
        (b.positions, tokens),
        (b.kv_slots, tokens),
        (b.seq_lens, seqs),
        (b.sample_rows, rows),
        (b.sample_positions, rows),
    ):
        buffer[..., count:] = 0
    b.live[tokens:] = False
    b.sample_slots[rows:], b.drafts[rows:] = dummy, -1


def gather_blocks(step: StepWords, tables: Tables, group: int, seqs: int, most: int) -> tuple[Tensor, None]:
    """Return (block_tables, table_rows) of `AttentionMeta` for a KV group and the first `seqs` sequences of a step.

    Returns a copy of the sequences' rows, for kernels without `table_rows`.
    No sequence has more than `most` blocks. See `quire.kernels.step`.
    """
    return tables.block_tables[group][step.slots[:seqs], :most], None


def finish_step(
    step: StepWords, tables: Tables, buffers: StepBuffers, tokens: Tensor, codes: Tensor, out: Tensor
) -> None:
    """Write sampled tokens to the history and to `out`, and advance the computed lengths of the sequences.

    See `quire.kernels.step`. The caller never samples past the end of the history.
    """
    seqs, rows, decodes, verified = step.num_seqs, step.num_rows, step.num_decodes, step.num_verified
    words, computed = out[:, :rows], buffers.seq_lens[:seqs].long()
    where = buffers.sample_slots[:rows], buffers.sample_positions[:rows]
    words[0].copy_(tokens[:rows])
    words[1].copy_(codes[:rows])
    found = words[0]
    if verified > decodes:
        words[2].copy_(buffers.drafts[:rows])
        last = _last_accepted(step.starts[: decodes + 1].long(), words[:, :verified])
        computed[:decodes] = where[1][last]
        kept = torch.cat((last, torch.arange(verified, rows, device=last.device)))
        found, where = found[kept], (where[0][kept], where[1][kept])
    tables.computed.index_copy_(0, step.slots[:seqs].long(), computed)
    tables.history[where] = found


def _last_accepted(starts: Tensor, rows: Tensor) -> Tensor:
    """Return the last accepted row [D] of each decode.

    starts   [D + 1] first row of each decode; the number of rows past the last
    rows     [3, R] token, code and draft of every row of the decodes
    """
    tokens, codes, drafts = rows
    ends = tokens != drafts  # the draft of a decode's last row is -1
    ends[:-1] |= codes[1:] != 0
    stops = ends.nonzero().flatten()
    return stops[torch.searchsorted(stops, starts[:-1])]


def keep_states(
    step: StepWords, buffers: StepBuffers, hidden: Tensor, kept: Tensor, first: Tensor, behind: bool
) -> None:
    """Keep hidden states [T, width] of a step's rows in `kept` [num_slots, room, width]. See `quire.kernels.step`."""
    seqs, room = len(buffers.seq_lens), kept.shape[1]
    slots = step.slots[:seqs].long()
    if behind:
        places = (buffers.seq_lens - 1 - first[slots]).clamp_(0, room - 1)
        kept[slots, places] = hidden[:seqs]
        return
    starts, ends = step.starts[:seqs].long(), step.starts[1 : seqs + 1].long()
    lanes = torch.arange(max(seqs, room), device=slots.device)
    begins = torch.where(lanes[:seqs] < step.words[NUM_DECODES], starts, ends - 1)
    rows = torch.minimum(begins[:, None] + lanes[:room], ends[:, None] - 1)
    kept[slots] = hidden[rows]
    first[slots] = buffers.seq_lens - (ends - begins)
