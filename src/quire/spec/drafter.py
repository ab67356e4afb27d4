"""The interface of drafters, and the choice of one."""

import importlib
from typing import Protocol

from quire.contracts.speculation import Speculation
from quire.kernels.step import StepWords, Tables


class Drafter(Protocol):
    """Guesses the next tokens of the decodes of a step."""

    def draft(self, step: StepWords, tables: Tables) -> None:
        """Launch the drafts of a step's decodes, without waiting for the device.

        Each decode with n tokens in the step gets n - 1 drafts, in the token history behind its known tokens, of which
        there are `Tables.computed` + 1. A draft of -1 is never accepted. The runner calls this before `build_inputs`,
        in a step with drafts.
        """


def make_drafter(speculation: Speculation | None, implementation: str) -> Drafter | None:
    """Return the drafter of an engine; None without speculation.

    implementation   "ref" or "triton", as of the step operations
    """
    if speculation is None:
        return None
    from quire.spec.ngram import NgramDrafter

    operations = importlib.import_module(f"quire.kernels.ngram.{implementation}")
    return NgramDrafter(operations, speculation.shortest, speculation.longest)
