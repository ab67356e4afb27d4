"""Outputs: columns per step from the engine core, and the objects that users of `LLM` get."""

from typing import Any

import msgspec
import numpy as np

from quire.contracts.adapters import AdapterStats
from quire.contracts.prefix import PrefixReport
from quire.contracts.request import FinishReason
from quire.contracts.step import F32, I32, Fetched, RowLogprobs, Tier


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request. `stop_id` is the token that stopped it; `error` is a code when the reason is ERROR.

    message  details of the error, for the caller
    vector   [hidden] float32, the pooled hidden state of a request with `NewRequest.pool`
    drafts   numbers of drafts: made, accepted as first of a step, as second, ...; (): no speculation
    """

    handle: int
    reason: FinishReason
    stop_id: int | None = None
    error: str | None = None
    message: str | None = None
    vector: F32 | None = None
    drafts: tuple[int, ...] = ()


class TierStats(msgspec.Struct, kw_only=True, array_like=True):
    """Counters of a tier of KV blocks below the device, since the start, and its size now.

    num_blocks    blocks that the tier can hold; 0: its size is counted in bytes, by the ranks
    num_used      of these, blocks with a content
    num_loaded, loaded_bytes, loaded_seconds   blocks that came from the tier, over all ranks
    num_stored, stored_bytes, stored_seconds   blocks that went to the tier
    num_failed    blocks whose copy to or from the tier failed
    num_dropped   blocks that left the tier above without a copy here
    """

    num_blocks: int = 0
    num_used: int = 0
    num_loaded: int = 0
    loaded_bytes: int = 0
    loaded_seconds: float = 0.0
    num_stored: int = 0
    stored_bytes: int = 0
    stored_seconds: float = 0.0
    num_failed: int = 0
    num_dropped: int = 0


class StateStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Checkpoints of states of recurrent layers. All are 0 for a model without such layers.

    hits     prompt tokens, since the start, that were not computed because a request went on at a checkpoint
    cut      prompt tokens, since the start, that were computed although their KV blocks were found: no checkpoint stood
             there
    taken    checkpoints that requests have left since the start
    num_checkpoints, num_used   checkpoints that there can be on the device, and those that can be found there now
    tiers    tier of checkpoints below the device -> its counters; {}: there is none
    """

    hits: int = 0
    cut: int = 0
    taken: int = 0
    num_checkpoints: int = 0
    num_used: int = 0
    tiers: dict[Tier, TierStats] = msgspec.field(default_factory=dict)


class PrefixStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Use of the prefix cache since the start: prompt tokens that were looked up, and those of them that were found."""

    queries: int = 0
    hits: int = 0
    states: StateStats = StateStats()


class StepStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Counters of a step and the engine's state after the step, for metrics and logs.

    step                 number of the step; -1: no step (a request was aborted), only the engine's state is set
    num_waiting          requests without a slot in the running batch
    num_blocked          of these, requests that wait for a grammar or, with n > 1, for the prompt of completion 0
    num_tokens           tokens computed in the step, drafts included
    num_prefill_tokens   of these, tokens of prompts, or recomputed tokens of preempted requests
    num_scheduled        requests in the step
    num_prefills         of these, requests that computed a chunk of prompt or recomputed tokens
    num_preempted        preemptions since the start
    num_free_blocks      KV blocks that no request holds
    num_cached_blocks    of these, blocks that the prefix cache can still reuse
    prefix               use of the prefix cache, and of checkpoints of states
    schedule_s           seconds to plan the step, grammar masks included
    execute_s            seconds in calls of the executor, which include the wait for the result
    finish_s             seconds to apply the result to the requests
    balancedness         mean over maximum of the tokens that ranks compute with their experts, when last looked at; 0:
                         experts are not balanced, or nothing is known yet
    num_blocks           KV blocks in all
    num_elsewhere        tokens of the step that are not in these outputs, but in those of other front ends
    tiers                tier of KV blocks below the device -> its counters; {}: there is none
    drafts               numbers since the start: runs of drafts (a decode in a step), drafts, and of these accepted as
                         the first of a run, as second, ...; (): no speculation
    replicas             number of a replica of attention that lives -> its `num_running`; {}: there are no replicas
    """

    step: int = -1
    num_running: int = 0
    num_waiting: int = 0
    num_blocked: int = 0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_scheduled: int = 0
    num_prefills: int = 0
    num_preempted: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    prefix: PrefixStats = PrefixStats()
    schedule_s: float = 0.0
    execute_s: float = 0.0
    finish_s: float = 0.0
    balancedness: float = 0.0
    num_blocks: int = 0
    num_elsewhere: int = 0
    drafts: tuple[int, ...] = ()
    replicas: dict[int, int] = msgspec.field(default_factory=dict)
    tiers: dict[Tier, TierStats] = msgspec.field(default_factory=dict)


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a step, in columns: request `handles[i]` got `tokens[i]`.

    A request with several new tokens has several entries, one after the other.

    preempted    handles of requests that were preempted since the last outputs
    cached       handle -> prompt tokens found in the prefix cache; only when a request first gets a slot
    prefixes     handle -> report on prompt blocks that were not reused, if any; only when a request first gets a slot
    origins      handle -> {block of the prompt: its origin in another tier}; other reused blocks were on the device
    homes        handle -> number of its replica, if there are several; only when a request first gets a slot
    logprobs     handle -> log-probabilities, a row for each new token
    prompt_logprobs   handle -> log-probabilities of the prompt, a row for each token scored in this step
    adapters     those of the engine; None: it serves none
    """

    handles: I32
    tokens: I32
    finished: tuple[Finish, ...] = ()
    preempted: tuple[int, ...] = ()
    cached: dict[int, int] = msgspec.field(default_factory=dict)
    prefixes: dict[int, PrefixReport] = msgspec.field(default_factory=dict)
    origins: dict[int, dict[int, Fetched]] = msgspec.field(default_factory=dict)
    homes: dict[int, int] = msgspec.field(default_factory=dict)
    logprobs: dict[int, RowLogprobs] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, RowLogprobs] = msgspec.field(default_factory=dict)
    stats: StepStats = StepStats()
    adapters: AdapterStats | None = None

    def __post_init__(self) -> None:
        if self.handles.shape != self.tokens.shape:
            raise ValueError(f"handles {self.handles.shape} and tokens {self.tokens.shape} must have the same shape")


# fields of `StepOutputs` by handle
BY_HANDLE = ("cached", "prefixes", "origins", "homes", "logprobs", "prompt_logprobs")
NO_TOKENS: I32 = np.empty(0, np.int32)


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability, rank (1 = most likely) and text of a token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsByToken = dict[int, Logprob]


class CompletionOutput(msgspec.Struct, kw_only=True):
    """A completion of a prompt. When `finish_reason` is "error", `stop_reason` is a code and `error` may say more.

    drafts   as in `Finish`, once the core has ended the completion: (), too, for one that a stop string ended
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsByToken] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    drafts: tuple[int, ...] = ()

    def finished(self) -> bool:
        """True when this completion has ended."""
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Times of a request in seconds on the monotonic clock, and the report on its prefix cache misses.

    origins   block of the prompt -> its origin in another tier than the device
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    prefix: PrefixReport | None = None
    origins: dict[int, Fetched] = {}


class RequestOutput(msgspec.Struct, kw_only=True):
    """The state of one prompt: its completions so far. `kv_transfer_params`: of a prefill node for the decode node."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[LogprobsByToken | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
    kv_transfer_params: dict[str, Any] | None = None


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """An embedding vector. It is empty when the request failed; `error` then holds "nan_hidden" or another code."""

    embedding: list[float]
    error: str | None = None


class EmbeddingRequestOutput(msgspec.Struct, kw_only=True):
    """The embedding of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int | None = None


class PoolingOutput(msgspec.Struct, kw_only=True):
    """The vector of a prompt, [hidden] float32. A failed request has an empty one, and a code in `error`."""

    data: F32
    error: str | None = None


class PoolingRequestOutput(msgspec.Struct, kw_only=True):
    """The pooled output of one prompt, of `LLM.encode`."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True
    num_cached_tokens: int | None = None


class ScoringOutput(msgspec.Struct, kw_only=True):
    """Similarity of two texts, in [-1, 1]."""

    score: float


class ScoringRequestOutput(msgspec.Struct, kw_only=True):
    """The score of a pair of texts. `prompt_token_ids` holds the ids of the first text, then of the second."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """A hypothesis of a beam search; `tokens` includes the prompt."""

    tokens: list[int]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


class BeamSearchOutput(msgspec.Struct, kw_only=True):
    """The best hypotheses, best first."""

    sequences: list[BeamSearchSequence]
