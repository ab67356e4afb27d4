"""Records of the live view: what an engine does, step by step. They are made only while somebody watches.

`LiveFrame` crosses from the core to the HTTP processes, and as JSON to watchers. `docs/live.md` draws it.
"""

from enum import StrEnum

import msgspec

from quire.contracts.step import Tier


class LiveStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose result was applied. Parts of its time overlap with those of its neighbours.

    at        seconds since 1970 when the result had been applied
    chunks    (handle, first token, tokens, ends) of each chunk of a prompt in the step. ends: 1 if the step samples
              behind the chunk, else 0
    decodes   requests that decoded
    drafts    drafts that were made, and those of them that were right
    tokens    tokens that were computed, drafts included
    sampled   new tokens of requests
    plan_s    seconds to plan the step, grammar masks included
    launch_s  seconds in `Executor.submit` and `release`
    device_s  seconds from the begin of the launch, or from the result before if that came later, to the result
    collect_s   seconds of waiting for the result
    finish_s  seconds to apply the result
    """

    step: int
    at: float
    chunks: tuple[tuple[int, int, int, int], ...] = ()
    decodes: int = 0
    drafts: tuple[int, int] = (0, 0)
    tokens: int = 0
    sampled: int = 0
    plan_s: float = 0.0
    launch_s: float = 0.0
    device_s: float = 0.0
    collect_s: float = 0.0
    finish_s: float = 0.0


class LiveSums(msgspec.Struct, kw_only=True):
    """Sums over all steps since the frame before, those without a `LiveStep` included. `LiveStep` has the meanings."""

    steps: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    sampled: int = 0
    drafts: int = 0
    accepted: int = 0
    plan_s: float = 0.0
    launch_s: float = 0.0
    device_s: float = 0.0
    collect_s: float = 0.0
    finish_s: float = 0.0


class LiveQueue(msgspec.Struct, frozen=True, kw_only=True):
    """Live requests by state.

    waiting      requests that wait for a slot, for blocks or for the token budget
    preempted    of these, requests that have run before
    waits_for    what the first waiting request lacks: "slots", "blocks", "budget" or "result" (of its
                 step); "" if none waits. Requests behind it wait for it
    blocked      reason -> requests that wait for it
    adapters     name of an adapter -> live requests for it, the most first, at most 64 names
    num_preemptions   preemptions since the start
    """

    running: int
    waiting: int
    preempted: int
    waits_for: str = ""
    blocked: dict[str, int]
    adapters: dict[str, int] = {}
    num_preemptions: int
    slots: int


class LiveGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that running requests hold in a KV group. own: of one request; shared: of several. window: `KVGroup`."""

    window: int | None
    block_size: int
    own: int
    shared: int


class LiveBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """KV blocks of the device by kind. total = own + shared + moving + cached + free.

    own, shared   blocks that running requests hold: one request, or several
    moving        blocks that no running request holds, and that copies or waiting requests do
    cached        blocks that nobody holds, and that the prefix cache can find
    free          blocks without content
    """

    total: int
    own: int
    shared: int
    moving: int
    cached: int
    free: int
    groups: tuple[LiveGroup, ...]


class LiveTier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier of KV blocks below the device: its size now, and what moved since the start, over all ranks.

    blocks, used   blocks that it can hold, and those with a content; 0: its size is counted in bytes, by the ranks
    loaded   blocks that came from the tier;  stored: blocks that went there;  failed: blocks whose copy failed
    dropped  blocks that left the tier above without a copy here
    """

    blocks: int
    used: int
    loaded: int
    loaded_bytes: int
    loaded_s: float
    stored: int
    stored_bytes: int
    stored_s: float
    failed: int
    dropped: int


class LiveStates(msgspec.Struct, frozen=True, kw_only=True):
    """States of recurrent layers: rows of running requests, and checkpoints on the device. See `StateStats`.

    total, used   checkpoints that there can be, and those that can be found now
    taken, hits, cut   since the start: checkpoints; tokens of prompts not computed, and computed, because of them
    tiers   tier below the device -> checkpoints there
    """

    rows: int
    total: int
    used: int
    taken: int
    hits: int
    cut: int
    tiers: dict[Tier, LiveTier] = {}


class LiveMiss(msgspec.Struct, kw_only=True):
    """Prompts that missed the prefix cache for a reason, since watching began: their number, and blocks not reused."""

    requests: int = 0
    blocks: int = 0


class LivePrefix(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the prefix cache.

    queries, hits   prompt tokens since the start: looked up, and found
    misses          reason (`Miss`) -> prompts since watching began
    states          checkpoints of states; None: no layer keeps states
    """

    queries: int
    hits: int
    misses: dict[str, LiveMiss]
    states: LiveStates | None = None


class LiveRequests(msgspec.Struct, kw_only=True):
    """Live requests in columns: running ones in the order of service, then waiting and blocked ones.

    id        request id; None: of another API key than the watcher's
    state     "running", "waiting", "preempted" (it waits again), or the reason for which it is blocked
    slot      -1: none
    prompt, tokens   tokens of the prompt; and of prompt and output, as far as confirmed
    computed  tokens whose KV is computed or planned
    cached    tokens of the prompt that were reused; -1: not admitted yet
    blocks    entries of its block tables, blocks behind a window left out
    more      live requests that the columns leave out
    """

    handle: list[int] = []
    id: list[str | None] = []
    state: list[str] = []
    slot: list[int] = []
    prompt: list[int] = []
    tokens: list[int] = []
    computed: list[int] = []
    cached: list[int] = []
    blocks: list[int] = []
    preemptions: list[int] = []
    more: int = 0


class LiveEventKind(StrEnum):
    """Events in the life of a request. `LiveEvent.count` and `detail` of each:"""

    ARRIVED = "arrived"  # tokens of the prompt
    BLOCKED = "blocked"  # -; `BlockReason`
    QUEUED = "queued"  # -; it waits for a slot, after it was blocked
    ADMITTED = "admitted"  # tokens reused from the device's prefix cache; reason why no more were, "" for none
    FETCHED = "fetched"  # blocks that came from another tier; the tier
    CHUNK = "chunk"  # tokens of the prompt computed in a step; "ends" if the step samples behind them
    PREEMPTED = "preempted"  # tokens of prompt and output so far; the reason
    FINISHED = "finished"  # tokens of the output; `FinishReason`, and its cause: "abort: disconnect"


class LiveEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event in the life of a request. step: number of the step; -1: of none. first: of a chunk's tokens."""

    at: float
    handle: int
    what: LiveEventKind
    step: int = -1
    first: int = 0
    count: int = 0
    detail: str = ""


class LiveEngine(msgspec.Struct, kw_only=True):
    """An engine core, or a replica of one, since the frame before.

    skipped       steps that `steps` leaves out; `sums` has them
    lost_events   events that `events` leaves out
    tiers         tiers of KV blocks below the device
    """

    replica: int
    steps: list[LiveStep]
    skipped: int
    sums: LiveSums
    queue: LiveQueue
    blocks: LiveBlocks
    prefix: LivePrefix
    tiers: dict[Tier, LiveTier]
    requests: LiveRequests
    events: list[LiveEvent]
    lost_events: int


class LiveExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that experts were given, as last counted for their balancing (EPLB).

    loads         [layers][ranks]
    balancedness  mean over maximum of the loads of the ranks
    """

    loads: list[list[int]]
    balancedness: float


class LiveFrame(msgspec.Struct, kw_only=True):
    """State of a whole engine now, and what it did since the frame before.

    frame     number of the frame, from 1 on, since watching began
    at        seconds since 1970
    seconds   time since the frame before; of the first frame: since watching began
    cost_s    seconds that the core took to make the frame before this one
    experts   None: experts are not balanced, or not counted yet, so nobody counts their tokens
    tenants   handle -> tenant, of requests of callers with several API keys; never sent to watchers
    """

    frame: int
    at: float
    seconds: float
    cost_s: float
    engines: list[LiveEngine]
    experts: LiveExperts | None = None
    tenants: dict[int, str] = {}


class MappedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A KV group of a map of blocks. window: see `KVGroup`."""

    window: int | None
    block_size: int


class BlockOwner(msgspec.Struct, kw_only=True):
    """A running request, and the blocks of its tables by KV group, in order; 0 where a window has passed.

    id        None: of another API key than the caller's
    tenant    of the request; never sent to callers
    """

    handle: int
    id: str | None
    slot: int
    tokens: int
    tables: list[list[int]]
    tenant: str = ""


class EngineBlocks(msgspec.Struct, kw_only=True):
    """The blocks of an engine core, or of a replica. A text has a letter for each block, see `kv.census.pool_map`.

    host, states   of host memory, and of checkpoints of states; None: there is none
    """

    replica: int
    block_size: int
    groups: list[MappedGroup]
    device: str
    host: str | None
    states: str | None
    owners: list[BlockOwner]


class BlockMap(msgspec.Struct, kw_only=True):
    """The KV blocks of a whole engine. cost_s: seconds that the core took to make it, encoding left out."""

    at: float
    cost_s: float
    engines: list[EngineBlocks]
