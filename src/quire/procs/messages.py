"""Messages between the HTTP process and the core process. Each message is a tagged msgpack map; see `wire.py`.

to the core      Add, Abort, Control, NextFrame, Gone, Back, Stop
from the core    Loading*, then Ready or Failed; then Outputs, Rejected, Reply, Watched; at a fault Failed; Dropped
for the core     Lost, from the first front end to the others
"""

from typing import Annotated, Any

import msgspec

from quire.config.engine import EngineConfig
from quire.contracts.live import LiveFrame
from quire.contracts.output import StepOutputs
from quire.contracts.request import NewRequest
from quire.procs.front_ends import FrontPlace


class CoreStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of an engine core: a line (`start_line`) on the standard input of its process.

    places      the front ends, in order; they name the sockets
    hang_timeout   seconds after which the core logs where a step hangs, and tells the front ends
    log_format   "text" or "json"
    """

    config: EngineConfig
    places: tuple[FrontPlace, ...]
    hang_timeout: float = 60.0
    log_format: str = "text"


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Add all requests of a prompt (`n` of them). The core accepts all, or accepts none and answers `Rejected`."""

    requests: Annotated[tuple[NewRequest, ...], msgspec.Meta(min_length=1)]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End the requests with these handles, waiting or running; unknown handles are ignored.
    cause: a word for the live view, such as "disconnect"; "" for none"""

    handles: tuple[int, ...]
    cause: str = ""


class Control(msgspec.Struct, frozen=True, tag="control"):
    """Run a named operation between two steps. The `Reply` has the same id and this value:

    reset_prefix_cache   True when no request was running
    blocks               `BlockMap` as JSON
    check                True when the records of requests and KV blocks are consistent; else an error names the fault
    check_adapter        the reason why an adapter does not fit the model, or ""
    trace_request        `TracedRequest` as JSON, of the next request; or, in `refused`, why there is none
    profile              `StepProfiled` as JSON, once it is complete; or, in `refused`, why there is none
    pause, sleep, ...    see `Life.operations`
    plan                 `PlanReport.describe()` and the state of the model runner, as JSON; null without a model

    Other names are operations of the executor; see `Executor.control`. `args` are its keyword arguments.
    """

    id: int
    name: str
    args: dict[str, Any] = {}


class NextFrame(msgspec.Struct, frozen=True, tag="next_frame"):
    """Send the next frame of the live view to the front end with this number. Steps are recorded from now on."""

    place: int


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """The front end at this place has ended: end its requests, and send it nothing more."""

    place: FrontPlace


class Back(msgspec.Struct, frozen=True, tag="back"):
    """Another front end starts at a place whose front end has ended. It gets the core's `Ready`."""

    place: FrontPlace


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process; running requests are dropped."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of a start-up phase, before `Ready`: `done` of `total` (0: unknown), in `unit` ("B": bytes)."""

    phase: str
    done: int = 0
    total: int = 0
    unit: str = ""


FEATURES = (
    "drafts",
    "KV tiers",
    "sharing",
    "adapters",
    "host weights",
)  # keys of `Ready.plans`: lines about what options turn on, or leave off


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine is loaded and takes requests.

    depth    maximum number of steps in flight
    num_drafts   most drafts that a step verifies for a request
    blends   prompts may reuse KV of other positions
    plans    resolved choices by name (attention, linear, memory, ...), each a printable line
    phases   seconds that each phase of the start took, by name
    notes    lines to show the user
    """

    max_model_len: int
    vocab_size: int
    num_slots: int
    num_blocks: int
    block_size: int
    depth: int
    dtype: str
    device: str
    weight_bytes: int
    kv_bytes: int
    num_drafts: int = 0
    blends: bool = False
    plans: dict[str, str] = {}
    phases: dict[str, float] = {}
    notes: tuple[str, ...] = ()


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Outputs of a step. The core sends empty outputs, too: they show that it is alive."""

    step: StepOutputs


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The core refused the requests of an `Add`. `kind` is the name of an error class in contracts/errors.py."""

    handles: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    kind: str
    message: str
    param: str | None = None


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """Answer to a `Control`; `error` is set when the operation failed."""

    id: int
    value: bool | int | str | None = None
    error: str | None = None


class Watched(msgspec.Struct, frozen=True, tag="watched"):
    """A frame of the live view, for the front ends with these numbers."""

    places: tuple[int, ...]
    frame: LiveFrame


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A process cannot start or go on. `kind` is the name of an error class, `details` a traceback for logs."""

    kind: str
    message: str
    details: str = ""


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """Bytes that are no message arrived on the socket `direction` ("to_core", "from_core"), for the `num`th time."""

    direction: str
    num: int


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """The engine core is dead.

    reason   sentence for people
    core     number of the next core (`FrontPlace.core`); 0: there is none
    """

    reason: str
    core: int = 0


ToCore = Add | Abort | Control | NextFrame | Gone | Back | Stop
FromCore = Loading | Ready | Outputs | Rejected | Reply | Watched | Failed | Dropped | Lost
