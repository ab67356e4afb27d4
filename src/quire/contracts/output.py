"""What comes out: columns per step from the engine core, and the objects that users of `LLM` see."""

from typing import Any

import msgspec
import numpy as np

from quire.contracts.prefix import PrefixReport
from quire.contracts.request import FinishReason
from quire.contracts.step import F32, I32, RowLogprobs


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one request. `stop_id` is the token that stopped it; `error` a code when the reason is ERROR.

    message  more of the error, in words for the caller
    vector   [hidden] float32, what was pooled for a request that asked for it
    """

    handle: int
    reason: FinishReason
    stop_id: int | None = None
    error: str | None = None
    message: str | None = None
    vector: F32 | None = None


class StepStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one step did and how things stand after it, for metrics and logs.

    step             -1: these outputs come without a step (a request was aborted); only the state is told then
    num_waiting      requests without a slot; num_blocked of them wait for another's prompt or their grammar, the rest
                     for room
    num_tokens       computed in the step, drafts included; num_prefill_tokens of them for prompts (or a resumed
                     request's past)
    num_scheduled    requests in the step, num_prefills of them not yet past their prompt
    num_free_blocks  KV blocks that nobody holds; num_cached_blocks of them keep a content that can be hit
    num_preempted    since the start, and so are prefix_queries and prefix_hits (prompt tokens looked up and found)
    schedule_s       seconds to plan the step, masks included; execute_s spent in the executor; finish_s to confirm it
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
    prefix_queries: int = 0
    prefix_hits: int = 0
    schedule_s: float = 0.0
    execute_s: float = 0.0
    finish_s: float = 0.0


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one step, in columns: request `handles[i]` got `tokens[i]`. A request that got several has as many
    entries, one after the other.

    preempted    handles of requests that lost their place since the outputs before
    cached       handle -> prompt tokens found in the prefix cache, once, with the first admission
    prefixes     handle -> why those were not more, likewise, where there is anything to say
    logprobs     handle -> a row for each of its tokens;  prompt_logprobs  handle -> rows of this step's chunk
    """

    handles: I32
    tokens: I32
    finished: tuple[Finish, ...] = ()
    preempted: tuple[int, ...] = ()
    cached: dict[int, int] = msgspec.field(default_factory=dict)
    prefixes: dict[int, PrefixReport] = msgspec.field(default_factory=dict)
    logprobs: dict[int, RowLogprobs] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, RowLogprobs] = msgspec.field(default_factory=dict)
    stats: StepStats = StepStats()

    def __post_init__(self) -> None:
        if self.handles.shape != self.tokens.shape:
            raise ValueError(f"{self.handles.shape} handles with {self.tokens.shape} tokens")


NO_TOKENS: I32 = np.empty(0, np.int32)


class Logprob(msgspec.Struct, frozen=True):
    """One alternative: its log-probability, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsByToken = dict[int, Logprob]


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One completion of a prompt. When `finish_reason` is "error", `stop_reason` is a code and `error` may say more."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsByToken] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Times of one request, seconds on the monotonic clock, and why its prompt was not reused whole."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    prefix: PrefixReport | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """The state of one prompt: its completions so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[LogprobsByToken | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """A vector; empty where the request failed by itself, with `error` "nan_hidden" or another code."""

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


class ScoringOutput(msgspec.Struct, kw_only=True):
    """How near two texts are, in [-1, 1]."""

    score: float


class ScoringRequestOutput(msgspec.Struct, kw_only=True):
    """The score of one pair; the token ids of its first text, then of its second."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """One hypothesis of a beam search: `tokens` includes the prompt."""

    tokens: list[int]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


class BeamSearchOutput(msgspec.Struct, kw_only=True):
    """The best hypotheses, best first."""

    sequences: list[BeamSearchSequence]
