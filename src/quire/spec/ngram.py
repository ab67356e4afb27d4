"""The n-gram drafter: a text goes on as it did where its last tokens came before."""

from types import ModuleType

from quire.kernels.step import StepWords, Tables
from quire.spec.drafter import Drafter


class NgramDrafter(Drafter):
    """Guesses that a text goes on as it did where its last tokens came before. It has no weights and no state.

    operations          an implementation of `quire.kernels.ngram`
    shortest, longest   numbers of tokens that must occur before
    """

    def __init__(self, operations: ModuleType, shortest: int, longest: int) -> None:
        self._operations, self._shortest, self._longest = operations, shortest, longest

    def draft(self, step: StepWords, tables: Tables, seqs: int, count: int) -> None:
        if count:
            self._operations.propose(step, tables, self._shortest, self._longest)
