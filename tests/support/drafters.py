"""Constructed drafters for tests: they know the answers, and guess right, wrong, or as chance will have it."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels.step import StepWords, Tables

NO_DRAFT = -1


class KnownAnswers:
    """A `Drafter` that knows the text of every request.

    texts    seed of a request -> its tokens, prompt and output, as plain decoding made them
    params   [slots, words] int32, `SamplingTable.rows`, in which the seed of a slot is
    kind     "right": every draft is the next token; "wrong": none is; "random": right, any token or no draft by chance
    """

    def __init__(self, texts: Mapping[int, Sequence[int]], params: Tensor, kind: str, vocab: int) -> None:
        self._texts, self._params, self._kind, self._vocab = texts, params, kind, vocab
        self._random = np.random.default_rng(0)

    def draft(self, step: StepWords, tables: Tables) -> None:
        """Write the drafts of a step's decodes. See `Drafter`."""
        starts = step.starts[: step.num_decodes + 1].tolist()
        for i, slot in enumerate(step.slots[: step.num_decodes].tolist()):
            known, count = int(tables.computed[slot]) + 1, starts[i + 1] - starts[i] - 1
            seed = int(self._params[slot].view(torch.int64)[2])
            right = [*self._texts[seed][known : known + count], *[0] * count][:count]
            drafts = [self._draft(token) for token in right]
            tables.history[slot, known : known + count] = torch.tensor(drafts, dtype=torch.int32)

    def _draft(self, token: int) -> int:
        chance = self._random.random()
        if self._kind == "right" or self._kind == "random" and chance < 0.6:
            return token
        return (token + 1) % self._vocab if self._kind == "wrong" or chance < 0.9 else NO_DRAFT
