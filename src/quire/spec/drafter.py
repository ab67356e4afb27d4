"""The interface of drafters, the n-gram drafter, and the choice of a drafter."""

import importlib
from types import ModuleType
from typing import Protocol

from torch import Tensor

from quire.contracts.speculation import Speculation
from quire.contracts.step import I32, Admission
from quire.kernels.attention import KVView
from quire.kernels.sampling import Rows, SamplerOperations
from quire.kernels.step import StepBuffers, StepWords, Tables
from quire.layers.context import StepContext
from quire.layers.stack import Model

Changes = list[tuple[Tensor, int, I32]]  # table, offset, words; see `quire.kernels.step.upload.Change`


class Drafter(Protocol):
    """Guesses the next tokens of the decodes of a step. Nothing here waits for the device, where that can be."""

    def admit(self, admitted: tuple[Admission, ...]) -> Changes:
        """Return the table changes to write before the step that admits these requests."""
        return []

    def draft(self, step: StepWords, tables: Tables, seqs: int, count: int) -> None:
        """Launch the drafts of a step's decodes. The runner calls this before `build_inputs`, in every step.

        Each decode with n tokens in the step gets n - 1 drafts, in the token history behind its known tokens, of which
        there are `Tables.computed` + 1. A draft of -1 is never accepted.

        seqs    number of the step's decodes, or an upper bound
        count   most drafts of a decode, or an upper bound; 0: the step has no drafts
        """

    def follow(self, step: StepWords, buffers: StepBuffers, hidden: Tensor, ctx: StepContext, *, decode: bool) -> None:
        """Launch what the drafter makes of the output of the model's layers. The runner calls this in every step.

        buffers   inputs of the step; `hidden` [T, hidden] is the output of the layers for them, before the final norm
        decode    True: all sequences are decodes
        """


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


def make_drafter(
    speculation: Speculation | None,
    implementation: str,
    *,
    model: Model,
    kv: list[KVView],
    operations: ModuleType,
    tables: Tables,
    sampling: tuple[SamplerOperations, Rows],
) -> Drafter | None:
    """Return the drafter of an engine; None without speculation.

    implementation   "ref" or "triton", as of the step operations, `operations`
    model, kv        the model, and the KV caches of its layers, then of its prediction layer, draft model or EAGLE head
    sampling         sampler operations, and the parameters of all slots
    """
    if speculation is None:
        return None
    if speculation.layered:
        from quire.spec.layers import LayerDrafter
        from quire.spec.passes import HeadPass, ModelPass, Pass, PredictionPass

        own, draft = kv[len(model.layers) :], model.draft
        passes: Pass = PredictionPass(model, own) if draft is None else ModelPass(draft, own)
        if draft is not None and speculation.head:
            passes = HeadPass(model, draft, own)
        return LayerDrafter(
            passes,
            model.dtype,
            operations,
            tables,
            sampling=sampling,
            most=speculation.num_drafts,
            exact=implementation == "ref",
        )
    ngram = importlib.import_module(f"quire.kernels.ngram.{implementation}")
    return NgramDrafter(ngram, speculation.shortest, speculation.longest)
