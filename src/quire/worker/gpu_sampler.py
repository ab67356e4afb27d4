"""The sampler of a CUDA device: which kernels a batch needs is known on the host, everything else stays on the device.

Knows slots and rows; a slot's parameters are a row of words that the worker sends with the step. Rows beyond the live
ones are padding: they belong to a slot whose row is all zeros, and are sampled greedily for nothing.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from quire.contracts.sampling import COLDEST, SamplerSpec
from quire.contracts.step import I32, RowLogprobs
from quire.kernels.sampling import triton as kernels
from quire.kernels.sampling.triton_edits import EDITS_HEADER
from quire.kernels.sampling.triton_rows import ROW_WORDS
from quire.worker.sampling_table import Needs, needs_of
from quire.worker.scoring import score_samples

_NO_LIMIT = 2**31 - 1
Change = tuple[int, I32]  # a device address, and the words that belong there


class Mode(IntEnum):
    """What a batch has to go through; each does what those before it do."""

    GREEDY = 0
    PLAIN = 1
    FILTERED = 2
    FULL = 3


class GpuSampler:
    """Samples rows by slot parameters on the device, into `tokens` [R] int64 and `codes` [R] uint8, R = max_rows.

    A token whose code is not 0 is 0: 1 stands for NaN or +inf in the raw logits, 2 for nothing left to sample.

    table    [num_slots, ROW_WORDS] int32;  history  [num_slots, L] int32, read below a row's position
    row_slots, row_positions   [max_rows] int: static tensors that say whose row it is and where its token will be

    Edits of a slot (masks, bias) lie in a tensor of their own, whose address is in the slot's row: no pool can be too
    small, and memory goes back to PyTorch's allocator. It may be given to the next slot while a launched step still
    reads it, which is sound as long as that slot's words are written by the same stream.
    """

    modes = tuple(Mode)

    def __init__(self, row_slots: Tensor, row_positions: Tensor, history: Tensor, *, vocab_size: int) -> None:
        device, num_slots, max_rows = history.device, history.shape[0], row_slots.shape[0]
        self.table = torch.zeros((num_slots, ROW_WORDS), dtype=torch.int32, device=device)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.codes = torch.zeros(max_rows, dtype=torch.uint8, device=device)
        self._vocab_size, width = vocab_size, -(-vocab_size // 32)
        self._masks = torch.full((max_rows * (1 + width),), -1, dtype=torch.int32, device=device)  # places, then words
        self._rows = kernels.Rows(row_slots, row_positions, self.table, history, self._masks[:max_rows],
                                  self._masks[max_rows:].view(max_rows, width))  # fmt: skip
        self._scratch = kernels.Scratch.make(max_rows, vocab_size, device)
        self._needs = np.zeros(num_slots, np.uint8)
        self._edits: dict[int, Tensor] = {}
        self._scored: dict[int, SamplerSpec] = {}

    def admit(self, slot: int, spec: SamplerSpec) -> list[Change]:
        """A request takes `slot`; what has to be written on the device before its first row is sampled."""
        self.release(slot)
        needs = needs_of(spec)
        self._needs[slot] = needs
        if spec.num_logprobs is not None or spec.logprob_ids:
            self._scored[slot] = spec
        changes: list[Change] = []
        address = 0
        if needs & Needs.EDITS:
            words = encode_edits(spec, self._vocab_size)
            self._edits[slot] = torch.empty(len(words), dtype=torch.int32, device=self.table.device)
            address = self._edits[slot].data_ptr()
            changes.append((address, words))
        row = self.table.data_ptr() + 4 * ROW_WORDS * slot
        return [*changes, (row, encode_row(spec, address))]

    def release(self, slot: int) -> None:
        """The request leaves; its row on the device is stale until the next one comes."""
        self._needs[slot] = 0
        self._edits.pop(slot, None)
        self._scored.pop(slot, None)

    def mode(self, slots: I32) -> Mode:
        """The least that serves rows of these slots."""
        needs = int(np.bitwise_or.reduce(self._needs[slots], initial=0))
        if needs >= Needs.EDITS:
            return Mode.FULL
        return Mode.FILTERED if needs >= Needs.FILTERS else Mode(needs)  # of NOISE alone, PLAIN

    def sample(self, logits: Tensor, mode: Mode) -> None:
        """Draw one token for each row of logits [r <= R, V] (float32, or what the head computes in; not modified)."""
        out = (self._scratch, self.tokens, self.codes)
        if mode >= Mode.FILTERED:
            if mode == Mode.FULL:
                kernels.rewrite(logits, self._rows, self._scratch)
            kernels.filtered(logits, self._rows, *out, rewritten=mode == Mode.FULL)
        else:
            kernels.pick(logits, self._rows, *out, noise=mode == Mode.PLAIN)

    def take_masks(self, slots: I32, masked: I32, masks: I32) -> None:
        """What `sample` is to leave of the rows of slots [r]: masks [m, ceil(V / 32)] of those of `masked` [m], in
        their order. Sent without waiting; PyTorch keeps the pinned buffer until it was read."""
        places, device = len(self._rows.places), self._masks.device
        # Filled by NumPy: PyTorch would wake all its threads, which go on spinning where masks are to be computed.
        host = torch.empty(places + masks.size, dtype=torch.int32, pin_memory=device.type == "cuda")
        host.numpy()[:places] = -1
        host.numpy()[np.flatnonzero(np.isin(slots, masked))] = np.arange(len(masked), dtype=np.int32)
        host.numpy()[places:] = masks.ravel()
        self._masks[: len(host)].copy_(host, non_blocking=True)

    def logprobs(self, logits: Tensor, slots: I32) -> Callable[[], dict[int, RowLogprobs]] | None:
        """As `score_samples`, of the tokens that `sample` drew for the rows of slots [r]."""
        return score_samples(logits, slots.tolist(), self._scored, self.tokens)


def encode_row(spec: SamplerSpec, edits_address: int) -> I32:
    """A slot's parameters as [ROW_WORDS] int32, laid out as triton_rows.py says."""
    row = np.zeros(ROW_WORDS, np.int32)
    row[0], row[2], row[3] = needs_of(spec), min(max(spec.top_k, 0), _NO_LIMIT), spec.num_prompt
    row[1:2].view(np.float32)[0] = max(spec.temperature, COLDEST)
    row[4:6].view(np.uint64)[0] = spec.seed
    row[6:10].view(np.float64)[:] = spec.top_p, spec.min_p
    row[10:13].view(np.float32)[:] = spec.repetition_penalty, spec.frequency_penalty, spec.presence_penalty
    row[13] = min(spec.min_length, _NO_LIMIT)
    row[14:16].view(np.int64)[0] = edits_address
    return row


def encode_edits(spec: SamplerSpec, vocab_size: int) -> I32:
    """A slot's masks and bias as int32 words, laid out as triton_edits.py says; ids outside the vocabulary left out."""

    def inside(ids: Sequence[int]) -> I32:
        array = np.array(ids, np.int64)
        return array[(array >= 0) & (array < vocab_size)].astype(np.int32)

    allowed, stops = inside(spec.allowed_ids), inside(spec.stop_ids)
    bias = {token: value for token, value in spec.logit_bias if 0 <= token < vocab_size}
    words = [word for word in spec.bad_words if word and 0 <= word[-1] < vocab_size]
    lengths = [len(word) for word in words]
    header = np.zeros(EDITS_HEADER, np.int32)
    num_allowed = len(allowed) if spec.allowed_ids else -1
    header[:5] = num_allowed, len(stops), len(bias), len(words), max(lengths, default=0)
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    biases = np.array(list(bias.values()), np.float32).view(np.int32)
    tokens = np.array([min(token, _NO_LIMIT) for word in words for token in word], np.int32)
    return np.concatenate((header, allowed, stops, np.array(list(bias), np.int32), biases, starts, tokens))
