"""The n-gram drafter: no weights, no state; drafts come from the request's own tokens."""

from types import ModuleType

from torch import Tensor

from quire.contracts.step import Admission
from quire.kernels.step import StepBuffers, StepWords, Tables
from quire.layers.context import StepContext
from quire.spec.drafter import Changes


class NgramDrafter:
    """Guesses that a text goes on as it did where its last tokens came before. A `Drafter`.

    operations          an implementation of `quire.kernels.ngram`
    shortest, longest   numbers of tokens that must occur before
    """

    def __init__(self, operations: ModuleType, shortest: int, longest: int) -> None:
        self._operations, self._shortest, self._longest = operations, shortest, longest

    def admit(self, admitted: tuple[Admission, ...]) -> Changes:
        """Return no changes. See `Drafter`."""
        return []

    def draft(self, step: StepWords, tables: Tables, seqs: int, count: int) -> None:
        """Launch the drafts of a step's decodes. See `Drafter`."""
        if count:
            self._operations.propose(step, tables, self._shortest, self._longest)

    def follow(self, step: StepWords, buffers: StepBuffers, hidden: Tensor, ctx: StepContext, *, decode: bool) -> None:
        """Do nothing. See `Drafter`."""
