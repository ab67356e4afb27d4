"""Step operations: build the inputs of a forward pass from plan and slot tables, and write its results to the tables.

A step reaches the device as int32 words (`upload.py` writes them):

    header    [HEADER] num_runs, index of the first run, num_seqs, num_tokens, num_samples, num_decodes, num_rows
    slots     [max_seqs]      slot of each sequence, in order; the dummy slot past the last
    starts    [max_seqs + 1]  first token of each sequence; the number of tokens past the last
    samples   [max_seqs]      indices of the sequences that sample a token, decodes first
    shared    [words]         shared prefixes, in the layout of the attention kernels (`attention.SharedBlocks`)
    runs      [num_runs, 4]   table changes: device address (low and high word), length, index of the words in `words`
    ...       the words that the runs copy

Sampled rows: first every token of every decode (its last token and its drafts), then the last token of each prompt that
samples. Drafts are in the token history, behind the last token of their sequence, before `build_inputs`. A draft of -1
stands for no draft: it is computed as token 0 without experts, and no sampled token is equal to it.

build_inputs(step, tables, buffers)
    Fills `buffers`, each as long as the step needs it or longer. Padding past the last token: id 0, position 0, KV slot
    0 (in block 0), not live. Past the last sequence: length 0. Past the last row: row 0, the dummy slot, position 0,
    draft -1.
gather_blocks(step, tables, group, seqs, most) -> (block_tables [., blocks] int32, table_rows [seqs] int32 or None)
    Returns these fields of `AttentionMeta` for a KV group and the first `seqs` sequences. No sequence has more than
    `most` blocks.
finish_step(step, tables, buffers, tokens, codes, out)
    Accepts the step: writes the sampled `tokens` [R] int64 to the history, and advances each sequence: a prompt by its
    chunk, a decode by its accepted rows. These are its first row, and every row behind an accepted row whose token is
    equal to the draft, as long as the row's code is 0. The history keeps the tokens of accepted rows. Writes (token,
    code, draft) of every row to out [3, max_rows] int32; drafts only in a step that has some. codes [R] uint8. A token
    past the end of the history is not written to it.

keep_states(step, buffers, hidden, kept, first, behind)
    Keeps hidden states of a step's rows by slot, for a drafter. hidden [T, width]; kept [num_slots, room, width]; first
    [num_slots] int64, position of the first state that is kept of a slot. Of a prompt its last row's state is kept. Of
    a decode the states of all its rows are kept; with `behind` True a decode has one row, whose state comes behind
    those that are kept already.

`ref.py` takes the sizes of a step from the host (`StepWords`). The kernels of `triton.py` can be captured: their grids
depend on the sizes of buffers alone, and they read the sizes of the step from the header. There table changes come in
the same buffer, as runs; apply_runs(words) copies each run to its address.
"""

from dataclasses import dataclass

from torch import Tensor

HEADER = 8
NUM_RUNS, RUNS_AT, NUM_SEQS, NUM_TOKENS, NUM_SAMPLES, NUM_DECODES, NUM_ROWS = range(7)
RUN_WORDS = 1024  # words of a run, at most: a longer change is split, so that several programs copy it


@dataclass(kw_only=True)
class StepWords:
    """Inputs of a step (slots, starts, ...) as int32 words on the device, and the step's sizes on the host.

    words                               [W] int32, in the layout that `quire.kernels.step` describes
    slots, starts, samples, shared      views of parts of `words`
    num_seqs, num_tokens, num_samples   sequences, tokens and sampled sequences of the step sent last
    num_decodes, num_rows               its decodes and its sampled rows
    """

    words: Tensor
    slots: Tensor
    starts: Tensor
    samples: Tensor
    shared: Tensor
    num_seqs: int = 0
    num_tokens: int = 0
    num_samples: int = 0
    num_decodes: int = 0
    num_rows: int = 0

    @staticmethod
    def view(words: Tensor, max_seqs: int, shared_words: int = 0) -> "StepWords":
        """Return a `StepWords` whose parts are views of `words`, which has at least `fixed_words(...)` words."""
        sizes = [max_seqs, max_seqs + 1, max_seqs, shared_words]
        slots, starts, samples, shared = words[HEADER : fixed_words(max_seqs, shared_words)].split(sizes)
        return StepWords(words=words, slots=slots, starts=starts, samples=samples, shared=shared)

    @property
    def num_verified(self) -> int:
        """Number of tokens of the decodes, all of which are sampled rows: their last tokens and their drafts."""
        return self.num_rows - (self.num_samples - self.num_decodes)

    @property
    def max_seqs(self) -> int:
        """Largest number of sequences of a step in this layout."""
        return len(self.slots)


def fixed_words(max_seqs: int, shared_words: int = 0) -> int:
    """Return the number of words that every step has: header, slots, starts, samples and shared prefixes.

    shared_words   words of the shared prefixes. The table changes of a step come after all these words
    """
    return HEADER + 3 * max_seqs + 1 + shared_words


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Tables by slot, on the device; the last slot is a dummy for padding.

    block_tables   [groups, num_slots, max_blocks] int32, by KV group; a group with larger blocks uses fewer entries
    block_sizes    tokens of a block, by KV group
    computed       [num_slots] int64: tokens whose KV is written
    history        [num_slots, max_model_len] int32: token ids by position
    hosted         [num_slots] int32: 1 if the slot's drafts come from the host, which writes them to `history`
    """

    block_tables: Tensor
    computed: Tensor
    history: Tensor
    hosted: Tensor
    block_sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepBuffers:
    """Inputs of a forward pass and of its sampling, at addresses that never change.

    token_ids, positions   [tokens] int64
    kv_slots               [groups, tokens] int64: block * block size of the group + offset
    live                   [tokens] bool: False for padding and for drafts of -1, which need no experts
    seq_lens               [seqs] int32: context length, this step included
    sample_rows            [rows] int64: index of the token whose logits are sampled
    sample_slots           [rows] int64: slot of the request that the row belongs to
    sample_positions       [rows] int64: position of the new token
    drafts                 [rows] int32: draft of the new token; -1: none. Only in a step with drafts
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    live: Tensor
    seq_lens: Tensor
    sample_rows: Tensor
    sample_slots: Tensor
    sample_positions: Tensor
    drafts: Tensor

    def cut(self, tokens: int, seqs: int, rows: int) -> "StepBuffers":
        """Return views of the first elements of all buffers, for a step of these sizes."""
        return StepBuffers(
            token_ids=self.token_ids[:tokens],
            positions=self.positions[:tokens],
            kv_slots=self.kv_slots[:, :tokens],
            live=self.live[:tokens],
            seq_lens=self.seq_lens[:seqs],
            sample_rows=self.sample_rows[:rows],
            sample_slots=self.sample_slots[:rows],
            sample_positions=self.sample_positions[:rows],
            drafts=self.drafts[:rows],
        )
