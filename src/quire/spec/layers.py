"""The drafter with layers: a prediction layer of the model's checkpoint (MTP), or a draft model (`draft_passes.py`).

The layers have a KV cache in the page of the model's layers. The entry at position i is made of token i and, by a
prediction layer, of the model's hidden state at i - 1. So a block depends on its own tokens alone, as the blocks of the
model do. The first entry behind a reused prefix lacks that state, which only the step that computed the prefix had: it
is made of zeros.

    step N      model          rows  t5 d6 d7        hidden states h5 h6 h7 are kept
                samples        t6 = d6 is accepted, t7 is not d7
    step N + 1  first pass     (h5, t6) (h6, t7)     entries 6 and 7; the output of the last row gives draft d8
                second pass    (o7, d8)              entry 8, of the layer's own output; gives d9
                model          rows  t7 d8 d9        ...

The first pass of a step computes the entries of the tokens that the step before has accepted, over those that were
made of the layer's own output. A step with prompts computes the entries of all its rows at its end.

A small step of decodes without drafts makes no entries: it keeps the states of its rows behind the others. A catch-up
pass makes their entries at once: before a block of a decode is complete, when there is no room for another state, and
before the next step of another kind, which may draft. A pass takes the time of its weights and launches.
All sizes are the host's: nothing here waits for a GPU, and all of it can be captured.
"""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import Admission
from quire.kernels.attention import AttentionMeta
from quire.kernels.sampling import Rows, SamplerOperations
from quire.kernels.sampling.rows import Mode, Needs
from quire.kernels.step import (
    NUM_DECODES,
    NUM_SEQS,
    NUM_TOKENS,
    StepBuffers,
    StepWords,
    Tables,
    fixed_words,
)
from quire.layers.context import StepContext
from quire.spec.draft_passes import Pass
from quire.spec.drafter import Changes
from quire.spec.joint_passes import JointPasses
from quire.spec.late_rows import LateRows
from quire.spec.pass_states import PassStates
from quire.spec.step_choice import StepChoice

TOKENS = slice(NUM_TOKENS, NUM_TOKENS + 1)


KEPT = 16  # rows of a decode whose entries a catch-up pass makes, at most: they need room, and padding is computed


class LayerDrafter:
    """Drafts a token with each pass, drawn from the pass's logits as plain decoding draws that position's token. So the
    model, with the same noise, most often draws the same. A `Drafter`.

    sampling    sampler operations, which no mask reaches, and `rows`, the parameters of all slots
    most        maximum number of drafts of a decode. A prediction layer makes each but the first of its own output
    operations  step operations, which build the inputs of a pass
    exact       True: the operations are PyTorch's and take a pass's sizes from the host; else they take upper bounds
    late        most decodes of a step without drafts that leaves its entries to a catch-up pass; 0: none does
    room        most rows of a decode whose states are kept
    states      [num_slots, room, hidden] hidden states of the model, after the final norm: of a decode's rows, of a
                prompt's last row alone
    first       [num_slots] int64: position of the first of these rows
    on_logits   callback for tests, called with slots [D], positions [D] and logits [D, V] of each draft of the decodes
    """

    def __init__(
        self,
        passes: Pass,
        dtype: torch.dtype,
        operations: ModuleType,
        tables: Tables,
        *,
        sampling: tuple[SamplerOperations, Rows],
        most: int,
        exact: bool,
        late: int = 0,
    ) -> None:
        self._pass, self._operations, self._exact, self._width = passes, operations, exact, 1 + most
        self._sampling, self._rows = sampling
        self.on_logits: Callable[[Tensor, Tensor, Tensor], None] | None = None
        self.write_prompts: Callable[[Tensor], None] | None = None  # see `Drafter`
        slots, device = len(tables.computed), tables.computed.device
        # Other replicas would have to join a catch-up pass, and a recurrent layer has no room for its pending rows.
        late = 0 if passes.shared or passes.recurrent else min(late, slots - 1)
        self.room = max(self._width, min(KEPT, *tables.block_sizes)) if late else self._width
        self.late = LateRows(slots, late, self._width, self.room) if late else None
        self.states = torch.zeros(slots, self.room, passes.width, dtype=dtype, device=device)
        self.first = torch.zeros_like(tables.computed)
        self._past = torch.zeros_like(tables.computed)
        self._tables = replace(tables, computed=self._past)
        self._step = StepWords.view(torch.zeros(fixed_words(slots - 1), dtype=torch.int32, device=device), slots - 1)
        tokens = max((slots - 1) * self._width, late * self.room)
        rows = torch.zeros(0, dtype=torch.int64, device=device)
        self._buffers = StepBuffers(
            token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(tokens, dtype=torch.int64, device=device),
            kv_slots=torch.zeros(len(tables.block_tables), tokens, dtype=torch.int64, device=device),
            live=torch.zeros(tokens, dtype=torch.bool, device=device),
            seq_lens=torch.zeros(slots - 1, dtype=torch.int32, device=device),
            sample_rows=rows,
            sample_slots=rows,
            sample_positions=rows,
            drafts=rows.int(),
        )
        self._lanes = torch.arange(max(tokens, slots), device=device)
        self._recurrent = PassStates(slots, device) if passes.recurrent else None
        self.joint = JointPasses(passes, slots - 1, self._width, device) if passes.shared else None

    def admit(self, admitted: tuple[Admission, ...]) -> Changes:
        """Return the changes of `first`: the states before the first computed token are unknown. See `Drafter`."""
        return [(self.first, 2 * one.slot, np.array([one.num_computed], np.int64).view(np.int32)) for one in admitted]

    def draft(self, step: StepWords, tables: Tables, seqs: int, count: int) -> None:
        """Launch the passes of a step's decodes. See `Drafter`."""
        if self.joint is not None:
            count = self.joint.count
        if not seqs:
            if self.joint is not None:
                self.joint.join_drafts()
            return
        slots, live = step.slots[:seqs].long(), self._lanes[:seqs] < step.words[NUM_DECODES]
        known = tables.computed[slots]  # position of each decode's last token
        decodes, rows = step.words[NUM_DECODES], torch.where(live, known - self.first[slots], 0).clamp_(0, self._width)
        choice = self._pass.choice() if count > 1 else None
        starts, out = self._first_pass(slots, decodes, rows, self._width, choice)
        if not count:
            return
        state = self._pass.state(out[(starts[1:].long() - 1).clamp_(min=0)])
        planned = torch.where(live, step.starts[1 : seqs + 1] - step.starts[:seqs], 0)  # tokens of each in the step
        planned = torch.where(tables.hosted[slots] == 0, planned, planned.clamp(max=1))  # other drafts are there
        noise = not self._exact or bool((self._rows.table[slots, 0] & Needs.NOISE).any())
        for ahead in range(1, count + 1):
            logits, wanted = self._pass.logits(state), planned > ahead
            if self.on_logits is not None:
                self.on_logits(slots[wanted], (known + ahead)[wanted], logits[wanted])
            drawn = replace(self._rows, slots=slots, positions=known + ahead)
            self._sampling.sample(logits, drawn, Mode.UNFILTERED if noise else Mode.GREEDY)
            tables.history[
                torch.where(wanted, slots, len(tables.computed) - 1), torch.where(wanted, known + ahead, 0)
            ] = self._sampling.tokens[:seqs].int()
            if ahead == count:
                continue
            if self._recurrent is not None:
                self._past[slots] = known
                again = torch.where(planned > ahead + 1, ahead + 1, live.long())  # of others the last true token
                starts, tokens = self._cut(decodes, again, ahead + 1)
                out = self._run(state, seqs, tokens, ahead + 1)
                state = self._pass.state(out[(starts[1:].long() - 1).clamp(min=0)])
                continue
            self._past[slots] = known + torch.minimum(planned - 1, torch.full_like(planned, ahead)).clamp_(min=0)
            _, tokens = self._cut(decodes, live.long(), 1)
            state = self._pass.state(self._run(state, seqs, tokens, 1, wanted, choice))

    def follow(self, step: StepWords, buffers: StepBuffers, hidden: Tensor, ctx: StepContext, *, decode: bool) -> None:
        """Keep the last hidden states of each sequence; make the entries of a step with prompts. See `Drafter`."""
        states, seqs, joint = self._pass.keep(hidden, ctx), len(buffers.seq_lens), self.joint
        prompts = not decode if joint is None else joint.own_prompts  # decodes may run as a step with prompts
        slots = step.slots[:seqs].long()
        if prompts:
            bounds = step.starts[: seqs + 1].long().clamp(max=len(states))  # a rehearsal finds those of a larger step
            starts, ends = bounds[:-1], bounds[1:]
            before = buffers.seq_lens - (ends - starts) - 1 - self.first[slots]  # place of the state to go on from
            carried = self.states[slots, before.clamp(0, self.room - 1)]
            carried = torch.where((before >= 0)[:, None], carried, 0)  # a former request's may be NaN
            moved = states.new_empty(len(states) + 1, states.shape[1])
            moved[1:] = states
            moved[starts] = carried
            own = ctx if joint is None else replace(ctx, replicas=joint.prompts(step.words[TOKENS]))
            self._pass.run(buffers.token_ids, moved[:-1], own, write=self.write_prompts)
        self._operations.keep_states(step, buffers, states, self.states, self.first, False)
        if self._recurrent is not None:
            assert ctx.states is not None, "the runner tells where states are"
            self._recurrent.follow(slots, ctx.states)

    def keep(self, step: StepWords, buffers: StepBuffers, hidden: Tensor, ctx: StepContext) -> None:
        """Keep the hidden states of decodes behind those of earlier steps. See `Drafter`."""
        states = self._pass.keep(hidden, ctx)
        self._operations.keep_states(step, buffers, states, self.states, self.first, True)

    def catch_up(self, step: StepWords, tables: Tables, begin: int, seqs: int) -> None:
        """Make the entries of the rows that steps without drafts have left. See `Drafter`."""
        slots, some = step.slots[begin : begin + seqs].long(), self._lanes[begin : begin + seqs]
        decodes = step.words[NUM_DECODES]
        left = (step.words[NUM_TOKENS] != decodes).long()  # a step that may draft needs the output of the last row
        rows = tables.computed[slots] - left - self.first[slots]
        rows = torch.where(some < decodes, rows, 0).clamp_(0, self.room)
        self._first_pass(slots, (decodes - begin).clamp(0, seqs), rows, self.room)
        self.states[slots, 0] = self.states[slots, rows.clamp(max=self.room - 1)]
        self.first[slots] += rows

    def _first_pass(
        self, slots: Tensor, decodes: Tensor, rows: Tensor, most: int, choice: StepChoice | None = None
    ) -> tuple[Tensor, Tensor]:
        """Make the entries behind the first states of slots [seqs], of `rows` [seqs] rows. Return starts and output.

        decodes   number of the sequences without padding
        choice    see `_run`
        """
        seqs = len(slots)
        self._step.slots[:seqs] = slots
        torch.add(self.first, 1, out=self._past)
        if self._recurrent is not None:
            self._recurrent.first(slots, self._past[slots], rows)
        starts, tokens = self._cut(decodes, rows, most)
        owner = torch.searchsorted(starts[1:].long(), self._lanes[:tokens], right=True).clamp_(max=seqs - 1)
        places = slots[owner] * self.room + (self._lanes[:tokens] - starts[owner]).clamp_(0, most - 1)
        return starts, self._run(self.states.flatten(0, 1)[places], seqs, tokens, most, choice=choice)

    def _cut(self, decodes: Tensor, rows: Tensor, most: int) -> tuple[Tensor, int]:
        """Give each sequence of the next pass `rows` [seqs] rows, at most `most`. Return starts and a pass's rows.

        decodes   number of the sequences without padding
        """
        own, seqs = self._step, len(rows)
        own.words[NUM_SEQS] = decodes
        starts = own.starts[: seqs + 1]
        starts[1:] = rows.cumsum(0)
        own.words[NUM_TOKENS] = starts[-1]
        tokens = int(starts[-1]) if self._exact else seqs * most
        own.num_seqs, own.num_tokens = seqs, tokens
        return starts, tokens

    def _run(
        self,
        states: Tensor,
        seqs: int,
        tokens: int,
        query: int,
        keep: Tensor | None = None,
        choice: StepChoice | None = None,
    ) -> Tensor:
        """Run the layer for the rows of `_cut`: states [tokens, hidden] -> [tokens, hidden].

        query   most rows of a sequence
        keep    [seqs] False: the entry of the sequence's only row is not written, and no expert computes it; None: all
        choice  of the step's passes; None: the layers choose tokens anew, if they choose any
        """
        buffers, blocks = self._buffers.cut(tokens, seqs, 0), self._tables.block_tables
        self._operations.build_inputs(self._step, self._tables, buffers)
        if keep is not None:
            buffers.kv_slots.mul_(keep)
            buffers.live.logical_and_(keep)
        metas: dict[int, AttentionMeta] = {}
        for group in self._pass.groups:
            table, table_rows = self._operations.gather_blocks(self._step, self._tables, group, seqs, blocks.shape[2])
            metas[group] = AttentionMeta(
                query_start=self._step.starts[: seqs + 1],
                seq_lens=buffers.seq_lens,
                block_tables=table,
                kv_slots=buffers.kv_slots[group],
                table_rows=table_rows,
                max_query_len=query,
                decode_len=min(query, self._width),  # kernels of decodes have tiles for so many rows
                prompts=(),
                kv_group=group,
            )
        own = metas[self._pass.groups[0]]  # in the place of groups whose layers draft nothing
        attention = tuple(metas.get(group, own) for group in range(len(blocks)))
        kept = None
        if self._recurrent is not None:
            slots = self._step.slots[:seqs]
            kept = self._recurrent.meta(own.query_start, own.seq_lens, slots, query)
        replicas = None if self.joint is None else self.joint.rows(query, self._step.words[TOKENS])
        ctx = StepContext(buffers.positions, attention, [], replicas, live=buffers.live, states=kept)
        if choice is None:
            return self._pass.run(buffers.token_ids, states, ctx)
        ctx = choice.before(ctx)
        out = self._pass.run(buffers.token_ids, states, ctx)
        choice.after(ctx)
        return out
