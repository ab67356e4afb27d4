"""The layout of a slot's sampling parameters: int32 words, which travel inside any int32 buffer. No PyTorch.

    word  0   needs: bits of `Needs`                                   8-9    min_p, float64
          1   temperature, float32                                     10-12  repetition, frequency, presence, float32
          2   top_k (0: off)        3   length of the prompt           13     min_length
          4-5 seed, low word first  6-7 top_p, float64                 14-15  address of the slot's edits, int64

A row of zeros is greedy on raw logits. Tables are aligned to 64 bytes, so every field is aligned to its size. The edits
of a slot are words of their own:

    header             number of allowed ids (-1: all), of stop ids, of biases, of bad words, length of the longest bad
                       word, 0, 0, 0
    allowed ids
    stop ids
    biased ids         then their biases, float32
    starts             begin of each bad word among the tokens below, and the end of the last one
    tokens             of the bad words, one word after the other
"""

import struct
from collections.abc import Sequence
from enum import IntEnum, IntFlag

import numpy as np

from quire.contracts.sampling import COLDEST, GREEDY_BELOW, SamplerSpec
from quire.contracts.step import I32

ROW_WORDS, EDITS_HEADER = 16, 8
_ROW = struct.Struct("<IfiiQddfffiq")  # the fields in order
_NO_LIMIT = 2**31 - 1


class Needs(IntFlag):
    """Operations that the sampling of a slot's rows needs, as bits. No bit: greedy sampling of raw logits."""

    NOISE = 1
    FILTERS = 2
    EDITS = 4
    PENALTIES = 8
    GRAMMAR = 16


class Mode(IntEnum):
    """Sampling mode of a batch of rows; each mode includes those before it.

    GREEDY       largest logit only
    UNFILTERED   also random draws, without filters
    FILTERED     also min-p, top-k and top-p
    FULL         also logits processors: masks, bias, penalties
    """

    GREEDY = 0
    UNFILTERED = 1
    FILTERED = 2
    FULL = 3


def needs_of(spec: SamplerSpec) -> Needs:
    """Return the operations that sampling with the parameters `spec` needs."""
    needs = Needs(0)
    if spec.temperature >= GREEDY_BELOW:
        needs |= Needs.NOISE
        if spec.top_k > 0 or spec.top_p < 1.0 or spec.min_p > 0.0:
            needs |= Needs.FILTERS
    if spec.logit_bias or spec.allowed_ids or spec.bad_words or (spec.stop_ids and spec.min_length > spec.num_prompt):
        needs |= Needs.EDITS
    if spec.repetition_penalty != 1.0 or spec.frequency_penalty or spec.presence_penalty:
        needs |= Needs.PENALTIES
    return needs | Needs.GRAMMAR if spec.grammar else needs


def mode_of(needs: int) -> Mode:
    """Return the cheapest mode that can sample rows with the bits `needs` (of `Needs`)."""
    if needs >= Needs.EDITS:
        return Mode.FULL
    return Mode.FILTERED if needs >= Needs.FILTERS else Mode(needs)  # NOISE alone is UNFILTERED


def encode_row(spec: SamplerSpec, edits_address: int) -> I32:
    """Return a request's sampling parameters as a row [ROW_WORDS] int32 of the table of slots (`Rows.table`).

    edits_address   address of the request's edits on the device; 0: no edits
    """
    return np.frombuffer(
        _ROW.pack(
            needs_of(spec),
            max(spec.temperature, COLDEST),
            min(max(spec.top_k, 0), _NO_LIMIT),
            spec.num_prompt,
            spec.seed,
            spec.top_p,
            spec.min_p,
            spec.repetition_penalty,
            spec.frequency_penalty,
            spec.presence_penalty,
            min(spec.min_length, _NO_LIMIT),
            edits_address,
        ),
        np.int32,
    ).copy()


def encode_edits(spec: SamplerSpec, vocab_size: int) -> I32:
    """Return a request's masks and bias as int32 words (see `RowEdits.decode`), without ids outside the vocabulary."""

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
