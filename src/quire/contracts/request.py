"""A request inside the engine: its input (`NewRequest`) and its progress (`Request`).

A request has no prefill or decode state. It has computed tokens and total tokens, and steps compute the difference.
"""

from array import array
from enum import Enum, StrEnum

import msgspec

from quire.contracts.adapters import Adapter
from quire.contracts.errors import InvalidParameter
from quire.contracts.prefix import PrefixReport
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import Fetched


class RequestState(Enum):
    """State of a request; `Request.to` checks the transitions."""

    WAITING = "waiting"
    BLOCKED = "blocked"
    RUNNING = "running"
    FINISHED = "finished"


class BlockReason(StrEnum):
    """Reason why a request is BLOCKED."""

    PARENT = "parent"  # the first of n completions computes the prompt
    GRAMMAR = "grammar"  # the grammar of its output is being compiled
    REMOTE_KV = "remote_kv"  # KV blocks come from another tier
    ADAPTER = "adapter"  # its adapter is not on the device


PAUSED = "paused"  # cause of a request that `pause` has ended


class FinishReason(StrEnum):
    """Reason why a request ended."""

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


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """KV blocks of a prompt that one engine computes for another one.

    name        of the lease, by which the prefill node keeps the blocks until the decode node has them
    address     HOST:PORT of the prefill node; "": this engine is the prefill node
    num_tokens  tokens of the prompt whose blocks the prefill node has; 0 in the prefill node itself
    private     first block that depends on texts of other positions: who knows `name` alone finds it and those behind
                it; -1: there is none
    """

    name: str
    address: str = ""
    num_tokens: int = 0
    private: int = -1


class MovedTokens(msgspec.Struct, frozen=True):
    """Tokens first .. last - 1 of a prompt whose KV exists `shift` positions earlier, in a text cached alone.

    blocks   KV blocks of that text, of each KV group, from its beginning; those of other tokens may be NULL_BLOCK
    """

    first: int
    last: int
    shift: int
    blocks: tuple[tuple[int, ...], ...]


class ReusedParts(msgspec.Struct, frozen=True):
    """Parts of a prompt that reuse KV of the same tokens cached alone (CacheBlend).

    parts   (first token, end) of each, in order
    ratio   share of the reused tokens that is computed again in all layers, 0 to 1
    """

    parts: tuple[tuple[int, int], ...] = ()
    ratio: float = 0.0


class Account(msgspec.Struct, frozen=True):
    """The API key of a request, as the engine sees it. Callers may set none of this.

    tenant   blocks are shared only within a tenant. "": there is only one tenant
    line     requests of a line wait behind each other; lines are served in turn, by tokens. "": there is only one line
    weight   share of the line beside other lines
    """

    tenant: str = ""
    line: str = ""
    weight: float = 1.0


NO_ACCOUNT = Account()


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A completion to generate, as the engine core gets it: token ids instead of text, every default resolved.

    handle       number that the front end gives the completion; unique among unfinished ones
    token_ids    the prompt, packed little-endian uint32
    max_tokens   0 = only score the prompt; prompt + max_tokens fits the context
    stop_ids     end-of-sequence and stop token ids; effective from `sampler.min_length` tokens on
    parent       with n > 1: handle of completion 0, which computes the prompt for all; None for completion 0 itself
    deadline     seconds on the monotonic clock after which the request fails
    cache_salt   blocks are shared only among requests with the same salt
    account      API key of the request
    grammar      the structured output, as `StructuredOutputsParams.spec` writes it
    num_drafts   maximum number of drafts that a step verifies for the request; None: as many as the engine drafts
    transfer     the blocks of the prompt go to another engine, or come from one; None: neither
    pool         "mean", "last" or "cls": the request ends with a pooled hidden state (max_tokens is 0); "": with text
    reused       parts of the prompt that reuse KV of other positions
    adapter      the adapter of the request; None: the base model
    embeds       [prompt, hidden] float32, the input of the first layer, in place of that of `token_ids`; b"": none
    """

    handle: int
    request_id: str
    token_ids: bytes
    max_tokens: int
    sampler: SamplerSpec
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    parent: int | None = None
    deadline: float | None = None
    cache_salt: str = ""
    account: Account = NO_ACCOUNT
    read_prefix_cache: bool = True
    grammar: str | None = None
    num_drafts: int | None = None
    transfer: Transfer | None = None
    pool: str = ""
    reused: ReusedParts = ReusedParts()
    adapter: Adapter | None = None
    embeds: bytes = b""


def check_fits(places: int, bound: int, num_slots: int, param: str) -> None:
    """Raise `InvalidParameter` about `param` when a request for `places` completions can never fit.

    bound       maximum number of completions that wait
    num_slots   maximum number of completions that run
    """
    if places > bound + num_slots:
        raise InvalidParameter(
            f"{places} completions in one request never fit: at most {bound + num_slots} do (max_num_seqs={num_slots} "
            f"and max_waiting={bound}); ask for fewer at once, or start the engine with a higher max_waiting.",
            param=param,
        )


class Request:
    """The engine's record of a sequence. Counters of a running request are in `RunningTable`, by slot."""

    def __init__(self, new: NewRequest, arrival: int) -> None:
        self.new = new
        self.arrival = arrival
        self.state = RequestState.WAITING
        self.blocked_on: BlockReason | None = None
        self.tokens = array("I", new.token_ids)  # prompt and confirmed outputs
        self.num_prompt = len(self.tokens)
        self.end = self.num_prompt + new.max_tokens  # total length at which the request is finished
        self.stop_ids = frozenset(new.stop_ids)
        self.slot = -1
        self.drafts: tuple[int, ...] = ()  # as in `Finish`, until the last preemption or the end
        self.in_flight = 0  # results still to come after a preemption
        self.num_served = 0  # tokens that its line has paid for
        self.num_cached = -1  # prompt tokens found in the prefix cache at the first admission
        self.prefix: PrefixReport | None = None  # report on the blocks that were not found
        self.num_preemptions = 0
        self.num_fetches = 0  # times that it waited for KV blocks of other tiers, since its last preemption
        self.origins: dict[int, Fetched] = {}  # block -> its origin in another tier; others were on the device
        self.moved: tuple[MovedTokens, ...] = ()  # of the last admission, in order
        self.prompt_scored = 0  # prompt-logprob rows collected

    def to(self, state: RequestState, blocked_on: BlockReason | None = None) -> None:
        """Move the request to `state`. No other code assigns the state."""
        assert state in TRANSITIONS[self.state], f"{self.new.request_id}: {self.state} -> {state}"
        self.state = state
        self.blocked_on = blocked_on
