"""What a server counts about itself: hooks that cost next to nothing, and their Prometheus form.

`Metrics` counts in plain Python and makes samples only when it is scraped. No label ever holds an id or a user's text,
and every set of label values is bounded.

Names are the peer's wherever the meaning is the same, under a prefix of our own: with the prefix "vllm" its dashboards
and alert rules work. Knows nothing of HTTP and of the engine; the server calls the hooks.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.contracts.output import StepStats
from quire.contracts.request import FinishReason
from quire.contracts.sampling import SamplingParams
from quire.observe import series
from quire.observe.process import read_usage
from quire.observe.series import OTHER, Histogram, Tally, one_two_five

DEFAULT_CONTEXT = 131_072  # for bucket bounds, until the engine has said how long a context is
PHASES = ("prefill", "decode")
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "")  # "": it never came to one
Sample = float | Histogram
ENGINE = "0"  # the peer's label for the data-parallel rank


@dataclass(frozen=True, kw_only=True)
class StatsLine:
    """The state now, and rates since the last line. `hit_rate`: None when no prompt was looked up meanwhile."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    hit_rate: float | None = None
    prompt_tokens_per_s: float = 0.0
    generation_tokens_per_s: float = 0.0


class Metrics(Collector):
    """Counts into plain numbers; `render` turns them into the text format through a registry of its own.

    Seconds are durations; every hook may be called from one thread only.
    """

    def __init__(self, prefix: str = "quire", model_name: str = "") -> None:
        self._prefix, self._labels = prefix, {"model_name": model_name, "engine": ENGINE}
        self._stats = StepStats()
        self._num_blocks = 0
        self._cache_info: dict[str, str] = {}
        self._pids = {"http": os.getpid()}
        self._busy_since: float | None = None  # the last sign of life while there is work
        self._num_steps = self._generated = self._delivered = 0
        self._phase_tokens = dict.fromkeys(PHASES, 0)
        self._first, self._gap = Histogram(series.FIRST_TOKEN_SECONDS), Histogram(series.TOKEN_SECONDS)
        self._iteration, self._lag = Histogram(series.STEP_TOKENS), Histogram(series.LAG_SECONDS)
        self._parts = {part: Histogram(series.STEP_SECONDS) for part in ("schedule", "execute", "finish")}
        self._per_token, self._num_completions = Histogram(series.TOKEN_SECONDS), Histogram(series.COMPLETIONS)
        self._request_times = {part: Histogram(series.REQUEST_SECONDS)
                               for part in ("e2e_request_latency", "request_queue_time", "request_inference_time",
                                            "request_prefill_time", "request_decode_time")}
        self._lengths: dict[str, Histogram] = {}
        self._size_lengths(DEFAULT_CONTEXT)
        self._finished = Tally(*((reason.value,) for reason in FinishReason), limit=8)
        self._aborts, self._rejections = Tally(limit=16), Tally(limit=16)
        self._http = Tally(limit=256)
        self._last_line = (time.monotonic(), 0, 0, 0, 0)  # time, prompt and generated tokens, queries, hits
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    # --- hooks --------------------------------------------------------------------------------------------------

    def engine_ready(self, *, num_blocks: int, block_size: int, max_model_len: int, cache_dtype: str = "auto",
                     enable_prefix_caching: bool = True, core_pid: int | None = None) -> None:
        """The core is loaded, with these sizes, as process `core_pid` (None: in this process)."""
        self._num_blocks = num_blocks
        self._size_lengths(max_model_len)
        self._cache_info = {"block_size": str(block_size), "num_gpu_blocks": str(num_blocks),
                            "cache_dtype": cache_dtype, "enable_prefix_caching": str(enable_prefix_caching)}
        if core_pid is not None:
            self._pids["core"] = core_pid

    def step(self, stats: StepStats, num_tokens: int) -> None:
        """Outputs have come from the core: its statistics, and how many tokens it generated. Once per step."""
        self._stats = stats
        self._busy_since = time.monotonic() if stats.num_running or stats.num_waiting else None
        if stats.step < 0:  # outputs without a step: only the state is new
            return
        self._num_steps += 1
        self._generated += num_tokens
        phases = self._phase_tokens
        phases["prefill"] += stats.num_prefill_tokens
        phases["decode"] += stats.num_tokens - stats.num_prefill_tokens
        self._iteration.observe(stats.num_tokens)
        parts = self._parts
        parts["schedule"].observe(stats.schedule_s)
        parts["execute"].observe(stats.execute_s)
        parts["finish"].observe(stats.finish_s)

    def tokens(self, count: int) -> None:
        """`count` tokens were handed to those who wait for them (not those generated after a stop string)."""
        self._delivered += count

    def request_started(self, num_prompt: int, params: SamplingParams) -> None:
        """A prompt of so many tokens went to the core."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        self._num_completions.observe(params.n)
        if params.max_tokens is not None:
            self._lengths["request_params_max_tokens"].observe(params.max_tokens)

    def first_token(self, seconds: float) -> None:
        """A request got its first token, so long after it came."""
        self._first.observe(seconds)

    def inter_token(self, seconds: float, count: int = 1) -> None:
        """`count` requests got a token, so long after their one before."""
        self._gap.observe(seconds, count)

    def request_finished(self, reason: str, *, num_prompt: int, num_output: int, queue_s: float | None,
                         prefill_s: float | None, decode_s: float | None, e2e_s: float, num_cached: int = 0,
                         token_s: Iterable[float] = ()) -> None:
        self._finished.add(reason)
        lengths = self._lengths
        lengths["request_prompt_tokens"].observe(num_prompt)
        lengths["request_generation_tokens"].observe(num_output)
        lengths["request_prefill_kv_computed_tokens"].observe(num_prompt - num_cached)
        inference_s = None if prefill_s is None else prefill_s + (decode_s or 0.0)
        times = (e2e_s, queue_s, inference_s, prefill_s, decode_s)
        for histogram, seconds in zip(self._request_times.values(), times, strict=True):
            if seconds is not None:
                histogram.observe(seconds)
        for seconds in token_s:
            self._per_token.observe(seconds)

    def aborted(self, cause: str) -> None:
        """A running request was aborted by us: "disconnect", "stop_string", "timeout", "shutdown"..."""
        self._aborts.add(cause)

    def rejected(self, reason: str) -> None:
        """A request was not taken: the reason as a short fixed word."""
        self._rejections.add(reason)

    def http(self, route: str, status: int, method: str = "POST") -> None:
        """An HTTP request was answered. `route` is the pattern that matched, never the path that was asked for."""
        self._http.add(route, method if method in METHODS else OTHER, str(status))  # a client may invent methods

    def loop_lag(self, seconds: float) -> None:
        """The event loop ran so much late; see `process.watch_event_loop`."""
        self._lag.observe(seconds)

    # --- what is told -------------------------------------------------------------------------------------------

    def snapshot(self) -> StatsLine:
        """What the periodic line shows; rates count from the last call."""
        stats = self._stats
        now = (time.monotonic(), self._num_prompt_tokens, self._generated, stats.prefix_queries, stats.prefix_hits)
        seconds, prompt, generated, queries, hits = (a - b for a, b in zip(now, self._last_line, strict=True))
        self._last_line = now
        seconds = max(seconds, 1e-9)
        return StatsLine(num_running=stats.num_running, num_waiting=stats.num_waiting, kv_usage=self._kv_usage,
                         hit_rate=hits / queries if queries else None, prompt_tokens_per_s=prompt / seconds,
                         generation_tokens_per_s=generated / seconds)

    def render(self) -> tuple[bytes, str]:
        """The body and content type of a scrape."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Every family, as it stands now."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    # --- samples ------------------------------------------------------------------------------------------------

    @property
    def _kv_usage(self) -> float:
        return 1.0 - self._stats.num_free_blocks / self._num_blocks if self._num_blocks and self._num_steps else 0.0

    @property
    def _num_prompt_tokens(self) -> int:
        return self._phase_tokens["prefill"] + self._stats.prefix_hits

    def _size_lengths(self, max_model_len: int) -> None:
        names = ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens",
                 "request_prefill_kv_computed_tokens")
        self._lengths = {name: Histogram(one_two_five(max_model_len)) for name in names}

    def _gauges(self) -> Iterator[Metric]:
        s, gauge = self._stats, partial(self._family, GaugeMetricFamily)
        used = self._num_blocks - s.num_free_blocks if self._num_steps else 0
        blocks = {"used": used, "cached": s.num_cached_blocks, "free": self._num_blocks - used - s.num_cached_blocks}
        yield gauge("num_requests_running", "Requests that hold a slot.", s.num_running)
        yield gauge("num_requests_waiting", "Requests that wait for a slot.", s.num_waiting)
        yield gauge("num_requests_waiting_by_reason",
                    "Waiting requests: for capacity, or deferred behind another request's prompt.",
                    by={"capacity": s.num_waiting - s.num_blocked, "deferred": s.num_blocked}, label="reason")
        yield gauge("kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1.", self._kv_usage)
        yield gauge("kv_blocks", "KV blocks: used by requests, free with a reusable content (cached), or free.",
                    by=blocks, label="state")
        yield gauge("step_requests", "Requests in the last step.", label="phase",
                    by={"prefill": s.num_prefills, "decode": s.num_scheduled - s.num_prefills})
        age = 0.0 if self._busy_since is None else time.monotonic() - self._busy_since
        yield gauge("last_step_age_seconds", "Seconds since the core last answered while it has work.", age)
        usages = [(role, usage) for role, pid in self._pids.items() if (usage := read_usage(pid)) is not None]
        yield gauge("process_resident_bytes", "Memory of the server's processes.", label="process",
                    by={role: usage.resident_bytes for role, usage in usages})
        if self._cache_info:
            info = {"engine": ENGINE, **self._cache_info}
            family = GaugeMetricFamily(f"{self._prefix}:cache_config_info", "The KV cache, as labels.", labels=[*info])
            family.add_metric([*info.values()], 1.0)
            yield family

    def _counters(self) -> Iterator[Metric]:
        s, phases, counter = self._stats, self._phase_tokens, partial(self._family, CounterMetricFamily)
        yield counter("prompt_tokens", "Prompt tokens, computed or found in the cache.", self._num_prompt_tokens)
        yield counter("prompt_tokens_by_source", "Prompt tokens by where their KV came from.", label="source",
                      by={"local_compute": phases["prefill"], "local_cache_hit": s.prefix_hits})
        yield counter("prompt_tokens_cached", "Prompt tokens found in the cache.", s.prefix_hits)
        yield counter("generation_tokens", "Tokens generated.", self._generated)
        yield counter("delivered_tokens", "Generated tokens that were handed on.", self._delivered)
        yield counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", s.prefix_queries)
        yield counter("prefix_cache_hits", "Prompt tokens found in the cache at admission.", s.prefix_hits)
        yield counter("num_preemptions", "Requests sent back to the queue to free blocks.", s.num_preempted)
        yield counter("steps", "Steps of the engine.", self._num_steps)
        yield counter("step_tokens", "Tokens computed in steps, by phase.", label="phase", by=phases)
        for name, help, tally, label in (
            ("request_success", "Requests that ended, by finish reason.", self._finished, "finished_reason"),
            ("request_aborts", "Requests that were aborted, by cause.", self._aborts, "cause"),
            ("admission_rejections", "Requests that were not taken, by reason.", self._rejections, "reason"),
            ("http_requests", "HTTP requests answered.", self._http, "route method status"),
        ):
            yield counter(name, help, by=tally.counts, label=label)

    def _histograms(self) -> Iterator[Metric]:
        histogram = partial(self._family, HistogramMetricFamily)
        yield histogram("time_to_first_token_seconds", "From arrival to the first token.", self._first)
        yield histogram("inter_token_latency_seconds", "Between two tokens of a request.", self._gap)
        yield histogram("request_time_per_output_token_seconds",
                      "Mean time per token after the first, one value per completion.", self._per_token)
        for part, times in self._request_times.items():
            yield histogram(f"{part}_seconds", "Time of a request, whole or in one phase.", times)
        for name, lengths in self._lengths.items():
            yield histogram(name, "Tokens of a request.", lengths)
        yield histogram("request_params_n", "Completions asked for.", self._num_completions)
        yield histogram("iteration_tokens_total", "Tokens computed in one step.", self._iteration)
        yield histogram("step_time_seconds", "Time of a step in the core, by part.", by=self._parts, label="part")
        yield histogram("event_loop_lag_seconds", "How late the server's event loop runs.", self._lag)

    def _family(self, kind: Any, name: str, help: str, value: Sample = 0.0, *, by: Mapping[Any, Sample] | None = None,
                label: str = "") -> Any:
        """A family of one value, or of one for each value of `label` (several labels: for each tuple of them)."""
        labels = label.split()
        family = kind(f"{self._prefix}:{name}", help, labels=[*self._labels, *labels])
        for key, each in ({(): value} if by is None else by).items():
            numbers = (each.buckets(), each.total) if isinstance(each, Histogram) else (each,)
            family.add_metric([*self._labels.values(), *((key,) if isinstance(key, str) else key)], *numbers)
        return family
