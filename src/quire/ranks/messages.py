"""Messages between the engine core and its ranks, the processes that run each step together; see `procs/wire.py`.

    to a rank     RankStart, RankSize, then RankStep, RankMasks, RankControl in the order of the calls; Stop
    from a rank   Loading*, RankBuilt, RankReady, then RankResult or RankCopied, RankReply; always RankReceived,
                  RankBeat, RankFailed

What the payloads mean is between the engine's assembly and its ranks.
"""

from typing import Any

import msgspec

from quire.contracts.adapters import AdapterLoaded
from quire.contracts.step import I32, FileNews, FinishedCopy, StepPlan, StepResult
from quire.procs.messages import Failed, Loading, Stop
from quire.procs.wire import Messages


class RankStart(msgspec.Struct, frozen=True, tag="start"):
    """First message to a rank: it tells the rank to load the model.

    payload   parameters of the rank, encoded
    lead      True for the only rank that sends step results
    beat      seconds between two `RankBeat` messages
    name      of the rank in messages
    hang      seconds after which the rank logs where a step hangs
    """

    payload: bytes
    lead: bool
    beat: float
    name: str
    hang: float


class RankSize(msgspec.Struct, frozen=True, tag="size"):
    """Memory sizes for a rank (KV cache and others), encoded. Chosen after the `RankBuilt` of all ranks."""

    payload: bytes


class RankStep(msgspec.Struct, frozen=True, tag="step"):
    """Tells a rank to launch a step."""

    plan: StepPlan


class RankMasks(msgspec.Struct, frozen=True, tag="masks"):
    """Grammar masks of `step`, the last step that was launched; see `Executor.release`."""

    step: int
    masks: I32


class RankControl(msgspec.Struct, frozen=True, tag="control"):
    """Run a named operation between two steps; see `Executor.control`. The `RankReply` has the same id."""

    id: int
    name: str
    args: dict[str, Any] = {}


class RankBuilt(msgspec.Struct, frozen=True, tag="built"):
    """The rank has loaded its weights. `payload`: its device's memory, encoded. It now waits for `RankSize`."""

    payload: bytes


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """The rank can run steps. `payload`: its depth, resolved choices and notes, encoded."""

    payload: bytes


class RankReceived(msgspec.Struct, frozen=True, tag="received"):
    """Acknowledges the plan of `step`. A rank sends it when the plan arrives, even while an earlier step runs."""

    step: int


class RankBeat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat of a rank's process, every `RankStart.beat` seconds."""


class RankResult(msgspec.Struct, frozen=True, tag="result"):
    """Result of a step; results come in the order of the steps."""

    result: StepResult


class RankCopied(msgspec.Struct, frozen=True, tag="copied"):
    """Copy jobs and loads of adapters that have ended on this rank, which does not send results, and its files.

    A job has ended when all ranks say so. For `files` see `StepResult`.
    """

    copied: tuple[FinishedCopy, ...]
    loaded: tuple[AdapterLoaded, ...] = ()
    files: tuple[FileNews, ...] = ()


class RankReply(msgspec.Struct, frozen=True, tag="reply"):
    """Answer to the `RankControl` with the same id: the value of the operation, or an error that the caller can fix."""

    id: int
    value: Any = None
    error: Failed | None = None


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Last message of a rank that cannot go on. `at`: the time by `time.monotonic`, which all processes share."""

    failed: Failed
    at: float


ToRank = RankStart | RankSize | RankStep | RankMasks | RankControl | Stop
FromRank = Loading | RankBuilt | RankReady | RankReceived | RankBeat | RankResult | RankCopied | RankReply | RankFailed

TO_RANK = Messages[ToRank](ToRank)
FROM_RANK = Messages[FromRank](FromRank)
