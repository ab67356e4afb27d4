"""A prompt and its completions while they are generated: tokens come in, text and outputs go out."""

import sys
import time
from dataclasses import dataclass, field
from typing import Any

from quire.contracts.output import CompletionOutput, Finish, Logprob, LogprobsByToken, RequestMetrics, RequestOutput
from quire.contracts.request import PAUSED, FinishReason, Transfer
from quire.contracts.sampling import OutputKind, SamplingParams
from quire.contracts.step import F32, RowLogprobs
from quire.text.sequence import SequenceText
from quire.text.tokenizer import Tokenizer


@dataclass(kw_only=True)
class Completion:
    """A completion of a prompt, the `index`-th of n.

    streamed     True = an output holds only the new text (`new_text`) and the tokens from `num_sent` on
    num_read     number of tokens decoded into `text`. With stop strings, every token is decoded when it comes; else
                 tokens are decoded when an output is made
    first_token_time, last_token_time   monotonic times of the first and the newest token
    vector       pooled hidden states, for a request that returns a vector instead of text
    """

    handle: int
    index: int
    text: SequenceText | None
    eos_ids: frozenset[int]
    streamed: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsByToken] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_sent: int = 0
    num_read: int = 0
    new_text: str = ""
    first_token_time: float | None = None
    last_token_time: float | None = None
    vector: F32 | None = None
    drafts: tuple[int, ...] = ()  # as in `Finish`

    @property
    def mean_token_time(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two tokens."""
        if self.first_token_time is None or self.last_token_time is None or len(self.token_ids) < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (len(self.token_ids) - 1)

    def push(self, token: int, finish: Finish | None) -> bool:
        """Append a token; `finish` comes with the last token. Return True when a stop string ended the completion: the
        caller must then abort it in the core."""
        self.token_ids.append(token)
        if finish is None and (self.text is None or not self.text.stepwise):
            return False  # nearly every call
        stopped = self._read(finished=finish is not None, by_token=finish is not None and finish.stop_id is not None)
        if stopped is not None:
            self.finish_reason, self.stop_reason = "stop", stopped
            return finish is None
        if finish is not None:
            self.end(finish)
        return False

    def end(self, finish: Finish) -> None:
        """Finish the completion with the core's finish reason, unless the completion has finished already."""
        if self.finish_reason is not None:
            return
        self.finish_reason, self.vector, self.drafts = finish.reason.value, finish.vector, finish.drafts
        self._read(finished=True)
        if finish.reason is FinishReason.ERROR:
            self.stop_reason, self.error = finish.error, finish.message
        elif finish.reason is FinishReason.ABORT and finish.error == PAUSED:
            self.stop_reason = PAUSED
        elif finish.stop_id is not None and finish.stop_id not in self.eos_ids:
            self.stop_reason = finish.stop_id

    def fail(self, code: str) -> None:
        """Finish the completion with an error. Its text and logprobs are dropped, since they may be wrong."""
        self.finish_reason, self.stop_reason = FinishReason.ERROR.value, code
        self.text = self.logprobs = None
        self.new_text = ""

    def output(self) -> CompletionOutput:
        """Return the completion so far or, when streamed, its new part since the last call."""
        if self.num_read < len(self.token_ids):
            self._read()
        logprobs, sent = self.logprobs, 0
        if self.streamed:
            text, self.new_text = self.new_text, ""
            sent, self.num_sent = self.num_sent, len(self.token_ids)
        else:
            text = "" if self.text is None else self.text.text
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[sent:],
            logprobs=None if logprobs is None else logprobs[sent:],
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            drafts=self.drafts,
        )

    def ending(self, cause: str) -> tuple[str, str]:
        """Return the finish reason and its cause, such as ("aborted", "queue_timeout"); cause "": there is none.
        cause: cause for which the request was aborted, if it was; it counts when this completion had not finished"""
        if self.finish_reason is None:
            return "aborted", cause
        failed = self.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
        return self.finish_reason, str(self.stop_reason or "") if failed else ""

    def _read(self, *, finished: bool = False, by_token: bool = False) -> str | None:
        """Decode the unread tokens. Return the stop string that was found, or None."""
        unread, self.num_read = self.token_ids[self.num_read :], len(self.token_ids)
        if self.text is None:
            return None
        new, stopped = self.text.push(unread, finished, ended_by_token=by_token)
        if self.streamed:
            self.new_text += new
        return stopped


@dataclass(kw_only=True, eq=False)
class Generation:
    """A prompt and its n completions.

    began             monotonic time when a step first scheduled the prompt, if known
    num_preemptions   preemptions of all its completions
    transfer          blocks for another engine, or from one
    for_decode        `kv_transfer_params` of a prefill node's answer
    due               tokens that a completion must have before the next output is made; 0 = an output at each token
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    completions: list[Completion]
    tokenizer: Tokenizer | None
    prompt_logprobs: list[LogprobsByToken | None] | None = None
    num_cached: int | None = None
    began: float | None = None
    num_preemptions: int = 0
    due: int = 0
    tenant: str = ""
    transfer: Transfer | None = None
    for_decode: dict[str, Any] | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_time=time.monotonic()))

    def __post_init__(self) -> None:
        if self.params.output_kind == OutputKind.FINAL_ONLY:
            self.due = sys.maxsize
        elif self.params.stream_interval is not None and self.params.stream_interval > 1:
            self.due = 1

    def wait_on(self, num_tokens: int) -> None:
        """After an output at `num_tokens` tokens of a completion, set `due` to the next multiple of stream_interval."""
        if self.due and self.params.stream_interval is not None:
            self.due = num_tokens - num_tokens % self.params.stream_interval + self.params.stream_interval

    @property
    def wanted(self) -> bool:
        """True when an output is due: all completions have ended, or one has reached `due` tokens."""
        return self.finished or self.due <= max(len(c.token_ids) for c in self.completions)

    @property
    def finished(self) -> bool:
        """True when every completion has ended."""
        for completion in self.completions:  # not all(...): this runs for every request in every step
            if completion.finish_reason is None:
                return False
        return True

    def ending(self) -> tuple[str, str]:
        """Return the finish reason of the first completion, and the cause of the first that failed; "": none did."""
        ends = [completion.ending("") for completion in self.completions]
        return ends[0][0], next((cause for _, cause in ends if cause), "")

    def add_logprobs(self, completion: Completion, rows: RowLogprobs, row: int) -> None:
        """Keep the logprobs of a completion's next token and its alternatives. They are row `row` of `rows`."""
        if completion.logprobs is None:
            completion.logprobs, completion.cumulative_logprob = [], 0.0
        assert completion.cumulative_logprob is not None
        completion.logprobs.append(self._named(rows, row))
        completion.cumulative_logprob += float(rows.logprobs[row, 0])

    def add_prompt_logprobs(self, rows: RowLogprobs) -> None:
        """Keep the logprobs of the next prompt tokens, one row per token. The first prompt token has none."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs.extend(self._named(rows, i) for i in range(len(rows.ranks)))

    def output(self) -> RequestOutput:
        """Return the output for the user: each completion so far or, when streamed, its new part."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[c.output() for c in self.completions],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached,
            metrics=self.metrics,
            kv_transfer_params=self.for_decode if self.finished else None,
        )

    def _named(self, rows: RowLogprobs, row: int) -> LogprobsByToken:
        named: LogprobsByToken = {}
        by_rank = not self.params.logprob_token_ids  # else the columns are the requested ids, not the best ones
        for i, (token, logprob) in enumerate(zip(rows.ids[row].tolist(), rows.logprobs[row].tolist(), strict=True)):
            if token not in named:
                text = None if self.tokenizer is None else self.tokenizer.decode([token], skip_special_tokens=False)
                rank = int(rows.ranks[row]) if i == 0 else i if by_rank else None
                named[token] = Logprob(logprob=logprob, rank=rank, decoded_token=text)
        return named
