"""Logits processors: masks, bias and penalties of a request, applied in place before a token is drawn.

Order: grammar mask, allowed ids, bad words, stop ids before the minimum length, bias; then penalties. All but the mask
follow from the token history and the position, never from a running state, so a resumed request needs no state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import I32
from quire.kernels.sampling.rows import EDITS_HEADER


@dataclass(frozen=True)
class RowEdits:
    """Masks and bias of a request; all ids lie within the vocabulary.

    allowed          [A] int64, the only ids that may be sampled; None: all ids
    bad_words        token sequences; the last token of each may not follow its other tokens
    stop_ids         [S] int64, masked while the sequence is shorter than the request's minimum length
    bias_ids, bias   [B] int64 different ids, and the [B] float32 numbers that are added to their logits
    """

    allowed: Tensor | None
    bad_words: tuple[tuple[int, ...], ...]
    stop_ids: Tensor
    bias_ids: Tensor
    bias: Tensor

    @staticmethod
    def decode(words: Tensor) -> "RowEdits":
        """Return the edits that `encode_edits` of rows.py wrote as int32 words.

        The tensors of the result are on the device of `words`. The host waits for the device.
        """
        num_allowed, num_stops, num_biases, num_words, *_ = words[:EDITS_HEADER].tolist()
        sizes = [EDITS_HEADER, max(num_allowed, 0), num_stops, num_biases, num_biases, num_words + 1]
        _, allowed, stops, biased, bias, starts, tokens = words.split([*sizes, len(words) - sum(sizes)])
        known, spans = tokens.tolist(), starts.tolist()
        return RowEdits(
            allowed=allowed.long() if num_allowed >= 0 else None,
            bad_words=tuple(tuple(known[first:last]) for first, last in pairwise(spans)),
            stop_ids=stops.long(),
            bias_ids=biased.long(),
            bias=bias.view(torch.float32),
        )


@dataclass(frozen=True)
class Penalties:
    """Penalties by row, [R] float32 each: repetition > 0 (prompt and output), frequency and presence (output only)."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def mask_row(logits: Tensor, mask: I32) -> None:
    """Set the logits [V] float32 that a grammar mask forbids to -inf, in place.

    mask   [ceil(V / 32)] int32: bit i % 32 of word i // 32 is 1 when id i is allowed
    """
    bits = np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little")
    logits.masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)


def edit_row(logits: Tensor, edits: RowEdits, history: Tensor, position: int, min_length: int) -> None:
    """Apply the masks and the bias of `edits` to the logits [V] float32 of a row, in place.

    history      [L] token ids of the sequence, of which the first `position` are known
    min_length   `stop_ids` are masked while prompt and output have fewer tokens than this
    """
    if edits.allowed is not None:
        survivors = logits[edits.allowed]
        logits.fill_(-torch.inf)
        logits[edits.allowed] = survivors
    if edits.bad_words:
        forbidden = completed_words(edits.bad_words, history, position)
        if forbidden:
            logits[torch.tensor(forbidden, device=logits.device)] = -torch.inf
    if position < min_length and edits.stop_ids.numel():
        logits[edits.stop_ids] = -torch.inf
    if edits.bias_ids.numel():
        logits[edits.bias_ids] += edits.bias


def completed_words(bad_words: Sequence[tuple[int, ...]], history: Tensor, position: int) -> list[int]:
    """Return the tokens that would complete a bad word: the last token of each word whose other tokens end the history.

    position   known tokens of the history (prompt and output)
    """
    longest = max(len(word) for word in bad_words) - 1
    recent = tuple(history[max(0, position - longest) : position].tolist())
    return [word[-1] for word in bad_words if _ends_with(recent, word[:-1])]


def _ends_with(tokens: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return len(end) <= len(tokens) and tokens[len(tokens) - len(end) :] == end


def penalize(logits: Tensor, penalties: Penalties, history: Tensor, positions: Tensor, num_prompt: Tensor) -> None:
    """Apply repetition, frequency and presence penalties to logits [R, V] float32, in place.

    history      [R, L] int32 token ids of each row's sequence
    positions    [R]: number of known tokens of the history (prompt and output)
    num_prompt   [R]: number of prompt tokens

    For every id in prompt or output: l > 0 ? l / repetition : l * repetition (Keskar et al. 2019, CTRL). Then
    l - c * frequency - [c > 0] * presence, with c occurrences in the output (OpenAI API reference). Ids of the history
    outside the vocabulary are ignored. Only logits of ids in the history are read and written.
    """
    rows, vocab = logits.shape
    tokens = history[:, : int(positions.max())].to(torch.int64)
    place = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    known = (place < positions.unsqueeze(1)) & (tokens >= 0) & (tokens < vocab)
    generated = known & (place >= num_prompt.unsqueeze(1))
    ids = tokens.masked_fill_(~known, 0)
    tally = torch.zeros((rows, vocab), dtype=torch.int32, device=logits.device)
    seen = tally.scatter_add_(1, ids, known.to(torch.int32)).gather(1, ids) > 0
    tally.scatter_(1, ids, 0)
    count = tally.scatter_add_(1, ids, generated.to(torch.int32)).gather(1, ids)
    value = logits.gather(1, ids)
    repetition = torch.where(seen, penalties.repetition.unsqueeze(1), 1.0)
    value = torch.where(value > 0, value / repetition, value * repetition)
    value -= count * penalties.frequency.unsqueeze(1)
    value -= (count > 0) * penalties.presence.unsqueeze(1)
    logits.scatter_(1, ids, value)  # an id that comes several times is written the same value each time
