"""Constructed drafters for tests: they know the answers, and guess right, wrong, or as chance will have it.

A `Drafter` for the device, and `guess` for the drafts that the host makes under a grammar.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.contracts.request import Request
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
            if tables.hosted[slot]:
                continue
            seed = int(self._params[slot].view(torch.int64)[2]) % 2**64
            drafts = torch.tensor(self._drafts(seed, known, count), dtype=torch.int32)
            tables.history[slot, known : known + count] = drafts

    def guess(self, request: Request, skip: int, count: int, lookup: tuple[int, int]) -> list[int]:
        """Return drafts of a request with a grammar. See `Scheduler.guess`."""
        drafts = self._drafts(request.new.sampler.seed, len(request.tokens) + skip, count)
        return drafts[: drafts.index(NO_DRAFT)] if NO_DRAFT in drafts else drafts

    def _drafts(self, seed: int, known: int, count: int) -> list[int]:
        right = [*self._texts[seed][known : known + count], *[0] * count][:count]
        return [self._draft(token) for token in right]

    def _draft(self, token: int) -> int:
        chance = self._random.random()
        if self._kind == "right" or self._kind == "random" and chance < 0.6:
            return token
        return (token + 1) % self._vocab if self._kind == "wrong" or chance < 0.9 else NO_DRAFT
