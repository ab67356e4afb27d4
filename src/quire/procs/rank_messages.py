"""Messages between the engine core and its ranks, the processes that run each step together; see `wire.py`.

    to a rank     RankStart, RankSize, then RankStep, RankMasks, RankControl in the order of the calls; Stop
    from a rank   Loading*, RankBuilt, RankReady, then RankResult, RankReply; always RankReceived, RankBeat, RankFailed

What the payloads mean is between the engine's assembly and its ranks.
"""

from typing import Any

import msgspec

from quire.contracts.step import I32, StepPlan, StepResult
from quire.procs.messages import Failed, Loading, Stop


class RankStart(msgspec.Struct, frozen=True, tag="start"):
    """First message: what to build. Only the rank that leads sends results.

    payload   a line of JSON;  beat  seconds between two signs of life
    """

    payload: bytes
    lead: bool
    beat: float


class RankSize(msgspec.Struct, frozen=True, tag="size"):
    """Sizes that were decided from the `RankBuilt` of all ranks."""

    payload: bytes


class RankStep(msgspec.Struct, frozen=True, tag="step"):
    """Launch a step."""

    plan: StepPlan


class RankMasks(msgspec.Struct, frozen=True, tag="masks"):
    """Grammar masks of `step`, which is the last launched step; see `Executor.release`."""

    step: int
    masks: I32


class RankControl(msgspec.Struct, frozen=True, tag="control"):
    """Run a named operation between two steps; see `Executor.control`. The `RankReply` has the same id."""

    id: int
    name: str
    args: dict[str, Any] = {}


class RankBuilt(msgspec.Struct, frozen=True, tag="built"):
    """The rank is built but for what depends on `RankSize`."""

    payload: bytes


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """The rank can run steps."""

    payload: bytes


class RankReceived(msgspec.Struct, frozen=True, tag="received"):
    """The plan of `step` has arrived. Sent at once, also while an earlier step runs."""

    step: int


class RankBeat(msgspec.Struct, frozen=True, tag="beat"):
    """The process lives."""


class RankResult(msgspec.Struct, frozen=True, tag="result"):
    """Result of the oldest step without a result."""

    result: StepResult


class RankReply(msgspec.Struct, frozen=True, tag="reply"):
    """Answer to a `RankControl`: its value, or the error that the caller made."""

    id: int
    value: Any = None
    error: Failed | None = None


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Last message of a rank that cannot go on; `at` is the time of `time.monotonic`, which all processes share."""

    failed: Failed
    at: float


ToRank = RankStart | RankSize | RankStep | RankMasks | RankControl | Stop
FromRank = Loading | RankBuilt | RankReady | RankReceived | RankBeat | RankResult | RankReply | RankFailed
