"""The protocol between the engine core and the executor that runs its plans."""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from quire.contracts.step import I32, StepPlan, StepResult

# Waits for the value of an operation, at most so many seconds (None: for ever). Raises `TimeoutError` with the names of
# the processes that have not answered.
Wait = Callable[[float | None], object]


class ExecutorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of an executor, fixed for its life.

    depth         maximum number of steps in flight: submitted and not yet collected
    decode_lag    maximum number of steps in flight for a decoding request (1: wait for each token; 2: one step ahead)
    num_slots     maximum number of running requests
    num_blocks    usable KV blocks, the reserved block 0 not counted
    num_drafts    maximum number of draft tokens that a decode verifies (k); 0: every decode advances by one token
    drafts_by_batch   (decoding requests, k), ascending: from so many requests on, at most k drafts; (): always
                  `num_drafts`
    drafts_cached   True: the drafter has KV in the blocks; that of a step's new tokens comes with the next step
    auto_drafts   numbers of drafts, ascending, among which the scheduler chooses by measured gain; (): it does not
    blends        True: prompts may reuse KV of other positions (CacheBlend)
    num_host_blocks   blocks of the host tier; 0: there is no tier below the device
    draft_lookup  shortest and longest n-gram that is looked up for drafts; (0, 0): none is
    num_stages    stages of pipeline parallelism; each works on another step at the same time
    prompt_chunk  prompt tokens that about double the time of a step with few decodes. The scheduler keeps chunks beside
                  decodes this short; 0: it does not
    plans         choices that the engine made at start, by name ("kernels", "memory", ...), as printable values
    """

    depth: int
    decode_lag: int
    num_slots: int
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    num_drafts: int = 0
    drafts_by_batch: tuple[tuple[int, int], ...] = ()
    drafts_cached: bool = False
    auto_drafts: tuple[int, ...] = ()
    draft_lookup: tuple[int, int] = (0, 0)
    blends: bool = False
    num_stages: int = 1
    num_host_blocks: int = 0
    prompt_chunk: int = 0
    plans: dict[str, object] = msgspec.field(default_factory=dict)


class Executor(Protocol):
    """Runs step plans in order, on a device or on its simulation (`MockExecutor`).

    `ready`, `ask` and `check_alive` are those of an executor in this process; others override them.
    """

    def submit(self, plan: StepPlan) -> None:
        """Queue a step. At most `facts().depth` steps may be uncollected."""

    def release(self, step: int, masks: I32) -> None:
        """Let `step` sample, with its grammar masks. Call this before the next step is submitted.

        masks   [G, ceil(V / 32)] int32, a row for each sampled row of the slots of `StepPlan.grammar`; empty when there
                is no such slot. Bit i % 32 of word i // 32 is 1 when token i is allowed
        """

    def collect(self) -> StepResult:
        """Wait for the oldest uncollected step and return its result."""

    def ready(self) -> bool:
        """True when `collect` need not wait for another process. For a core that serves several executors."""
        return True

    def control(self, name: str, args: dict[str, Any]) -> object:
        """Run a named operation of the executor between two steps, and return its value.

        Raises `ConfigError` for a name that the executor does not know.
        """

    def ask(self, name: str, args: dict[str, Any]) -> Wait:
        """Start a named operation. Return a function that waits for its value, or runs it; see `control`."""
        return lambda seconds: self.control(name, args)

    def check_alive(self) -> None:
        """Raise `EngineDead` when the executor can run no more steps. An idle core calls this: it submits no step."""
        return

    def facts(self) -> ExecutorFacts:
        """Return the capabilities of this executor."""

    def shutdown(self, *, wait: bool = True) -> None:
        """Free all resources; idempotent. wait  False: other processes are told to end, and may end later."""
