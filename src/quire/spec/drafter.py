"""The interface of drafters."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from quire.contracts.step import I32, Admission
from quire.kernels.step import StepBuffers, StepWords, Tables
from quire.layers.context import StepContext
from quire.spec.joint_passes import JointPasses
from quire.spec.late_rows import LateRows

Changes = list[tuple[Tensor, int, I32]]  # table, offset, words; see `quire.kernels.step.upload.Change`


class Drafter(Protocol):
    """Guesses the next tokens of the decodes of a step. Nothing here waits for the device, where that can be.

    joint   passes of replicas in lock-step that share experts of the drafter's layers; None: there are none
    late    counts the rows of small steps without drafts, which call `keep` in place of `draft` and `follow`; None: all
            steps call these
    write_prompts   writes the rows of prompts that are given as embeddings over those of the step's tokens [T, hidden];
            a drafter that reads the model's embedding calls it
    """

    write_prompts: Callable[[Tensor], None] | None = None
    joint: JointPasses | None = None
    late: LateRows | None = None

    def admit(self, admitted: tuple[Admission, ...]) -> Changes:
        """Return the table changes to write before the step that admits these requests."""
        return []

    def draft(self, step: StepWords, tables: Tables, seqs: int, count: int) -> None:
        """Launch the drafts of a step's decodes. The runner calls this before `build_inputs`, in most steps.

        Each decode with n tokens in the step gets n - 1 drafts, in the token history behind its known tokens, of which
        there are `Tables.computed` + 1. A draft of -1 is never accepted.

        seqs    number of the step's decodes, or an upper bound
        count   most drafts of a decode, or an upper bound; 0: the step has no drafts
        """

    def follow(self, step: StepWords, buffers: StepBuffers, hidden: Tensor, ctx: StepContext, *, decode: bool) -> None:
        """Launch what the drafter makes of the output of the model's layers. The runner calls this in most steps.

        buffers   inputs of the step; `hidden` [T, hidden] is the output of the layers for them, before the final norm
        decode    True: all sequences are decodes
        """

    def keep(self, step: StepWords, buffers: StepBuffers, hidden: Tensor, ctx: StepContext) -> None:
        """Keep the output of the model's layers for `catch_up`. All sequences are decodes without drafts."""

    def catch_up(self, step: StepWords, tables: Tables, begin: int, seqs: int) -> None:
        """Launch what `keep` has put off, for `seqs` sequences of a step from sequence `begin` on.

        Before a step of decodes without drafts nothing is put off afterwards, before another step one row.
        """
