"""States of recurrent layers in a step."""

from dataclasses import replace

from quire.kernels.states import StateMeta
from quire.kernels.step import StepBuffers, StepWords
from quire.layers.context import StepContext
from quire.worker.features import StepFeature
from quire.worker.recorder import StepShape


class RequestStates(StepFeature):
    """Tells layers where the states of the step's requests are: in the rows of their slots."""

    def __init__(self, step: StepWords, buffers: StepBuffers) -> None:
        self._step, self._buffers = step, buffers

    def context(self, ctx: StepContext, shape: StepShape) -> StepContext:
        """Return the context with the metadata of states. See `StepFeature`."""
        attention = ctx.attention[0]
        assert attention.max_query_len is not None, "a step knows the most rows of a sequence"
        states = StateMeta(
            query_start=self._step.starts[: shape.seqs + 1],
            seq_lens=self._buffers.seq_lens[: shape.seqs],
            slots=self._step.slots[: shape.seqs],
            max_rows=attention.max_query_len,
            decode_rows=attention.decode_len,
        )
        return replace(ctx, states=states)
