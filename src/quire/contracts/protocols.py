"""What the engine core needs of whatever runs its plans."""

from typing import Protocol

import msgspec

from quire.contracts.step import I32, StepPlan, StepResult


class ExecutorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an executor can do, fixed for its life.

    depth         steps that may be submitted and not yet collected
    decode_lag    in-flight steps a decoding slot may have (1: wait for each token; 2: one step ahead)
    num_slots     requests that can hold a slot;  num_blocks  usable KV blocks, the reserved block 0 not counted
    num_drafts    drafts that a decode may verify at most (k); 0: every decode advances by one token
    prompt_chunk  prompt tokens that about double the time of a step of few answers; 0: steps are not kept short
    plans         resolved choices by name (attention, linear, memory, ...), each a printable value
    """

    depth: int
    decode_lag: int
    num_slots: int
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    num_drafts: int = 0
    prompt_chunk: int = 0
    plans: dict[str, object] = msgspec.field(default_factory=dict)


class Executor(Protocol):
    """Runs plans in order. The engine cannot tell a real one from the mock."""

    def submit(self, plan: StepPlan) -> None:
        """Queue one step; at most `facts().depth` may be uncollected."""

    def release(self, step: int, late: I32) -> None:
        """Let the sampling of `step` go on, before the next step is submitted.

        late   [G, ceil(V / 32)] int32, one row for each slot of `StepPlan.grammar`: bit i % 32 of word i // 32 says
               whether token i may come; empty when the step has no such slot
        """

    def collect(self) -> StepResult:
        """Wait for the oldest uncollected step."""

    def facts(self) -> ExecutorFacts:
        """What this executor can do."""

    def shutdown(self) -> None:
        """Free everything; idempotent."""
