"""The n-gram drafter: no weights, no state; drafts come from the request's own tokens."""

from types import ModuleType

from quire.kernels.step import StepWords, Tables


class NgramDrafter:
    """Guesses that a text goes on as it did where its last tokens came before. A `Drafter`.

    operations          an implementation of `quire.kernels.ngram`
    shortest, longest   numbers of tokens that must occur before
    """

    def __init__(self, operations: ModuleType, shortest: int, longest: int) -> None:
        self._operations, self._shortest, self._longest = operations, shortest, longest

    def draft(self, step: StepWords, tables: Tables) -> None:
        """Launch the drafts of a step's decodes. See `Drafter`."""
        self._operations.propose(step, tables, self._shortest, self._longest)
