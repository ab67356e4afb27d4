"""Around the forward pass on a device: inputs built from a plan and the slot tables, results written back to them.

A step reaches the device as int32 words (`worker/upload.py` writes them):

    header    [HEADER] num_runs, where the runs start, num_seqs, num_tokens, num_samples
    slots     [max_seqs]      slot of each sequence, in order; the dummy slot past the last
    starts    [max_seqs + 1]  first token of each sequence; the number of tokens past the last
    samples   [max_seqs]      which sequences sample a token
    shared    [words]         what attention wants to know of shared prefixes, as it likes
    runs      [num_runs, 4]   device address (low and high word), length, where in the buffer the words start
    words     what the runs copy

build_inputs(step, tables, buffers)
    Fill `buffers`, each as long as the step needs it or longer. Past the last token: id 0, position 0, slot 0 of block
    0; past the last sequence: length 0; past the last row: row 0, the dummy slot, position 0.
gather_blocks(step, tables, group, seqs, most) -> (block_tables [., blocks] int32, table_rows [seqs] int32 or None)
    What `AttentionMeta` calls so in a KV group, for the first `seqs` sequences, of which none has more than `most`
    blocks.
finish_step(step, tables, buffers, tokens, codes, out)
    Accept and remember: write the sampled `tokens` [R] int64 to the history, advance the sequences by what is accepted
    (without drafts every token that was computed), and write (token, code) of every row to out [2, max_rows] int32;
    codes [R] uint8. A position past the end of the history is remembered nowhere.

`ref.py` takes the sizes of a step from the host (`StepWords`). The kernels of `triton.py` have grids that depend on the
sizes of buffers alone, and learn from the header how much of it there is to do, so that they can be captured; changes
of the tables come in the same words, as runs, which apply_runs(words) copies to their addresses.
"""

from dataclasses import dataclass

from torch import Tensor

HEADER = 8
NUM_RUNS, RUNS_AT, NUM_SEQS, NUM_TOKENS, NUM_SAMPLES = range(5)
RUN_WORDS = 1024  # of a run at most: longer ones are split, so that programs share them


@dataclass(kw_only=True)
class StepWords:
    """A step on the device, and its sizes on the host.

    words                            [W] int32, all of the above
    slots, starts, samples, shared   its parts
    num_seqs, num_tokens, num_samples   of the step that was sent last
    """

    words: Tensor
    slots: Tensor
    starts: Tensor
    samples: Tensor
    shared: Tensor
    num_seqs: int = 0
    num_tokens: int = 0
    num_samples: int = 0

    @staticmethod
    def view(words: Tensor, max_seqs: int, shared_words: int = 0) -> "StepWords":
        """The parts of `words`, at least `fixed_words` of them."""
        sizes = [max_seqs, max_seqs + 1, max_seqs, shared_words]
        slots, starts, samples, shared = words[HEADER : fixed_words(max_seqs, shared_words)].split(sizes)
        return StepWords(words=words, slots=slots, starts=starts, samples=samples, shared=shared)

    @property
    def max_seqs(self) -> int:
        """Sequences that the layout has room for."""
        return len(self.slots)


def fixed_words(max_seqs: int, shared_words: int = 0) -> int:
    """Words in front of the runs."""
    return HEADER + 3 * max_seqs + 1 + shared_words


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The device's tables by slot; the last slot is a dummy for padding.

    block_tables [groups, num_slots, max_blocks] int32, by KV group;  computed [num_slots] int64 tokens whose KV is
                 written
    history     [num_slots, max_model_len] int32 token ids by position
    """

    block_tables: Tensor
    computed: Tensor
    history: Tensor
    block_size: int


@dataclass(frozen=True, kw_only=True)
class StepBuffers:
    """What a forward pass and its sampling read, at addresses that never change.

    token_ids, positions             [tokens] int64
    kv_slots                         [groups, tokens] int64
    seq_lens                         [seqs] int32 context with this step
    sample_rows, sample_slots, sample_positions   [rows] int64: the token row whose logits are sampled, its slot, and
                                     the position of the new token
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    seq_lens: Tensor
    sample_rows: Tensor
    sample_slots: Tensor
    sample_positions: Tensor

    def cut(self, tokens: int, seqs: int, rows: int) -> "StepBuffers":
        """The beginnings of all, for a step of these sizes."""
        return StepBuffers(
            token_ids=self.token_ids[:tokens], positions=self.positions[:tokens], kv_slots=self.kv_slots[:, :tokens],
            seq_lens=self.seq_lens[:seqs], sample_rows=self.sample_rows[:rows], sample_slots=self.sample_slots[:rows],
            sample_positions=self.sample_positions[:rows],
        )  # fmt: skip
