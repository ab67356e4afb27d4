"""A request inside the engine: what was asked (`NewRequest`) and where it stands (`Request`).

There is no prefill and no decode: a request has computed and total tokens and catches up.
"""

from array import array
from enum import Enum, StrEnum

import msgspec

from quire.contracts.prefix import PrefixReport
from quire.contracts.sampling import SamplerSpec


class RequestState(Enum):
    """Where a request stands; `Request.to` knows the allowed moves."""

    WAITING = "waiting"
    BLOCKED = "blocked"
    RUNNING = "running"
    FINISHED = "finished"


class BlockReason(StrEnum):
    """What a BLOCKED request waits for."""

    PARENT = "parent"  # the first of n completions computes the prompt
    GRAMMAR = "grammar"  # the form of its output is being compiled


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


TRANSITIONS = {
    RequestState.WAITING: {RequestState.RUNNING, RequestState.BLOCKED, RequestState.FINISHED},
    RequestState.BLOCKED: {RequestState.WAITING, RequestState.FINISHED},
    RequestState.RUNNING: {RequestState.WAITING, RequestState.FINISHED},
    RequestState.FINISHED: set[RequestState](),
}


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, ready for the core: no text, every default resolved.

    handle       the front end's number for it; unique among live requests
    token_ids    the prompt, packed little-endian uint32
    max_tokens   0 = only score the prompt; prompt + max_tokens fits the context
    stop_ids     end-of-sequence and stop token ids; effective after the first `min_tokens` outputs
    parent       handle of the first of n completions, whose prompt this one shares
    deadline     seconds on the monotonic clock after which the request fails
    cache_salt   blocks are shared only among requests with the same salt
    tenant       the same for the owner of the request, who sets a salt but never a tenant; "" for the only one
    grammar      the form of the output, as `StructuredOutputsParams.spec` writes it
    pool         "mean", "last" or "cls": it ends with a vector of hidden states (max_tokens is 0); "": with text
    """

    handle: int
    request_id: str
    token_ids: bytes
    max_tokens: int
    sampler: SamplerSpec
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    priority: int = 0
    parent: int | None = None
    deadline: float | None = None
    cache_salt: str = ""
    tenant: str = ""
    read_prefix_cache: bool = True
    grammar: str | None = None
    pool: str = ""


class Request:
    """The engine's record of one sequence. Counters of a running request live in the engine's table, by slot."""

    __slots__ = (
        "arrival",
        "blocked_on",
        "end",
        "in_flight",
        "new",
        "num_cached",
        "num_preemptions",
        "num_prompt",
        "prefix",
        "prompt_scored",
        "slot",
        "state",
        "stop_ids",
        "tokens",
    )

    def __init__(self, new: NewRequest, arrival: int) -> None:
        self.new = new
        self.arrival = arrival
        self.state = RequestState.WAITING
        self.blocked_on: BlockReason | None = None
        self.tokens = array("I", new.token_ids)  # prompt and confirmed outputs
        self.num_prompt = len(self.tokens)
        self.end = self.num_prompt + new.max_tokens  # total length at which it is finished
        self.stop_ids = frozenset(new.stop_ids)
        self.slot = -1
        self.in_flight = 0  # results still to come after a preemption
        self.num_cached = -1  # prompt tokens found in the prefix cache at the first admission
        self.prefix: PrefixReport | None = None  # why it was not the whole prompt
        self.num_preemptions = 0
        self.prompt_scored = 0  # prompt-logprob rows collected

    def to(self, state: RequestState, blocked_on: BlockReason | None = None) -> None:
        """Move to `state`; the only place that assigns it."""
        assert state in TRANSITIONS[self.state], f"{self.new.request_id}: {self.state} -> {state}"
        self.state = state
        self.blocked_on = blocked_on
