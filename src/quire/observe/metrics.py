"""Metrics of a server: cheap hooks that count, and the output in Prometheus' text format.

`Metrics` counts in Python numbers and makes samples only when it is scraped. No label holds an id or a user's text, and
every set of label values is bounded. Names, helps and buckets are in `metrics.txt`.

Knows nothing of HTTP and of the engine; the server calls the hooks.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.contracts.adapters import AdapterStats
from quire.contracts.output import StateStats, StepStats, TierStats
from quire.contracts.request import FinishReason
from quire.contracts.sampling import SamplingParams
from quire.contracts.step import Tier
from quire.contracts.text_table import read_rows
from quire.observe.families import MetricFamily, filled
from quire.observe.process import resident_bytes
from quire.observe.restarts import RestartTally
from quire.observe.series import OTHER, Histogram, Tally, one_two_five

DEFAULT_CONTEXT = 131_072  # for bucket bounds, until the engine reports its context length
STEP_PARTS = ("schedule", "execute", "finish")
REQUEST_TIMES = tuple(
    f"{name}_seconds"
    for name in (
        "e2e_request_latency",
        "request_queue_time",
        "request_inference_time",
        "request_prefill_time",
        "request_decode_time",
    )
)
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "")  # "": no method was read
MOST_KEYS = 4096  # series of a metric of API keys; further ones are counted as "other"
ENGINE = "0"  # vLLM's label for the data-parallel rank
COPIED = {
    "copied_blocks": ("num_loaded", "num_stored"),
    "copied_bytes": ("loaded_bytes", "stored_bytes"),
    "copy_seconds": ("loaded_seconds", "stored_seconds"),
}  # metric of a tier -> fields of `TierStats`
FAMILIES = tuple(MetricFamily(*cells) for cells in read_rows(Path(__file__).with_suffix(".txt")))


@dataclass(frozen=True, kw_only=True)
class StatsLine:
    """Statistics of now, with rates since the last line. `hit_rate` of the prefix cache is None without a lookup.

    acceptance   share of the runs of drafts whose first, second, ... draft was right; (): there were none
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_cached_blocks: int = 0
    hit_rate: float | None = None
    prompt_tokens_per_s: float = 0.0
    generation_tokens_per_s: float = 0.0
    acceptance: tuple[float, ...] = ()


class Metrics(Collector):
    """Counters of a server. `render` turns them into Prometheus' text format, through a registry of its own.

    The counting methods may be called from one thread only. Their `seconds` are durations, not times.
    """

    def __init__(self, prefix: str = "quire", model_name: str = "") -> None:
        self._prefix, self._labels = prefix, {"model_name": model_name, "engine": ENGINE}
        self._stats = StepStats()
        self._held: Callable[[], int] | None = None  # see `engine_lost`; None: there is an engine, or none was lost
        self._adapters = AdapterStats()
        self._num_blocks = self._num_slots = 0
        self._cache_info: dict[str, str] = {}
        self._pids = {"http": os.getpid()}
        self._busy_since: float | None = None  # time of the core's last message while there is work
        self._num_steps = self._generated = self._delivered = 0
        self._phase_tokens = {"prefill": 0, "decode": 0}
        self._seen = {
            f.name: Histogram(map(float, f.bounds.split())) for f in FAMILIES if f.bounds not in ("", "lengths")
        }
        self._parts = {part: Histogram(self._seen["step_time_seconds"].bounds) for part in STEP_PARTS}
        self._size_lengths(DEFAULT_CONTEXT)
        self._finished = Tally(*((reason.value,) for reason in FinishReason), limit=8)
        self._aborts, self._rejections = Tally(limit=32), Tally(limit=16)
        self._http = Tally(limit=256)
        self.dropped = Tally(("to_core",), ("from_core",), limit=2)  # bytes between processes that were not a message
        # By name of the API key; the server counts here. `key_refusals`: with the limit that was reached.
        self.key_requests, self.key_tokens, self.key_refusals = (Tally(limit=MOST_KEYS) for _ in range(3))
        self.trace_spans = Tally(limit=3)  # by what became of them
        self.restarts = RestartTally(limit=16)
        self.reloads = Tally(limit=8)
        self.is_ready: Callable[[], bool] = lambda: False  # what /ready says
        self.certificate_end: Callable[[], float | None] = lambda: None  # seconds since the epoch; None: no TLS
        self._last_line = (time.monotonic(), 0, 0, 0, 0)  # time, prompt and generated tokens, queries, hits
        self._last_drafts: tuple[int, ...] = ()  # `StepStats.drafts` of that line
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    # --- hooks --------------------------------------------------------------------------------------------------

    def engine_ready(
        self,
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        cache_dtype: str = "auto",
        enable_prefix_caching: bool = True,
        core_pid: int | None = None,
    ) -> None:
        """Record that the core is loaded, with these sizes, in process `core_pid` (None: this process)."""
        self._stats = StepStats(num_waiting=self._num_held(), num_free_blocks=num_blocks)
        self._busy_since = time.monotonic() if self._stats.num_waiting else None
        self._held = None
        self._num_slots, self._num_blocks = num_slots, num_blocks
        self._size_lengths(max_model_len)
        self._cache_info = {
            "block_size": str(block_size),
            "num_gpu_blocks": str(num_blocks),
            "cache_dtype": cache_dtype,
            "enable_prefix_caching": str(enable_prefix_caching),
        }
        if core_pid is not None:
            self._pids["core"] = core_pid
        if (seconds := self.restarts.served()) is not None:
            self._seen["restart_seconds"].observe(seconds)

    def engine_lost(self, held: Callable[[], int]) -> None:
        """Record that the core is dead and that another one follows.
        held: returns how many requests of this process wait for it"""
        self._held = held
        self._stats, self._busy_since, self._num_blocks = StepStats(), None, 0

    def _num_held(self) -> int:
        """Return how many requests of this process wait for the next core."""
        return 0 if self._held is None else self._held()

    def step(self, stats: StepStats, num_tokens: int, adapters: AdapterStats | None = None) -> None:
        """Count the outputs of a step: the core's statistics and the number of generated tokens. Once per step."""
        self._adapters = adapters or self._adapters
        self._stats, self._num_blocks = stats, stats.num_blocks or self._num_blocks
        self._busy_since = time.monotonic() if stats.num_running or stats.num_waiting else None
        if stats.step < 0:  # outputs without a step: only the state is new
            return
        self._num_steps += 1
        self._generated += num_tokens
        phases = self._phase_tokens
        phases["prefill"] += stats.num_prefill_tokens
        phases["decode"] += stats.num_tokens - stats.num_prefill_tokens
        # As vLLM counts: prompt and output tokens. The last token of an output is generated, but never computed.
        self._seen["iteration_tokens_total"].observe(stats.num_prefill_tokens + num_tokens)
        parts = self._parts
        parts["schedule"].observe(stats.schedule_s)
        parts["execute"].observe(stats.execute_s)
        parts["finish"].observe(stats.finish_s)

    def tokens(self, count: int) -> None:
        """Count tokens that were delivered to clients (without tokens generated after a stop string)."""
        self._delivered += count

    def request_started(self, params: SamplingParams) -> None:
        """Count a prompt that was sent to the core."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        self._seen["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            self._seen["request_params_max_tokens"].observe(params.max_tokens)

    def first_token(self, seconds: float) -> None:
        """Count the first token of a request, `seconds` after the request's arrival."""
        self._seen["time_to_first_token_seconds"].observe(seconds)

    def inter_token(self, seconds: float, count: int = 1) -> None:
        """Count a token of each of `count` requests, `seconds` after the token before."""
        self._seen["inter_token_latency_seconds"].observe(seconds, count)

    def request_finished(
        self,
        reason: str,
        *,
        num_prompt: int,
        num_outputs: Sequence[int],
        queue_s: float | None,
        prefill_s: float | None,
        decode_s: float | None,
        e2e_s: float,
        num_cached: int = 0,
        num_preemptions: int = 0,
        token_s: Iterable[float] = (),
    ) -> None:
        """Count a prompt that has ended. num_outputs: tokens of each of its completions"""
        self._finished.add(reason)
        seen = self._seen
        seen["request_prompt_tokens"].observe(num_prompt)
        seen["request_generation_tokens"].observe(sum(num_outputs))
        seen["request_max_num_generation_tokens"].observe(max(num_outputs, default=0))
        seen["request_num_preemptions"].observe(num_preemptions)
        seen["request_prefill_kv_computed_tokens"].observe(num_prompt - num_cached)
        inference_s = None if prefill_s is None else prefill_s + (decode_s or 0.0)
        times = (e2e_s, queue_s, inference_s, prefill_s, decode_s)
        for name, seconds in zip(REQUEST_TIMES, times, strict=True):
            if seconds is not None:
                seen[name].observe(seconds)
        for seconds in token_s:
            seen["request_time_per_output_token_seconds"].observe(seconds)

    def aborted(self, cause: str) -> None:
        """Count a running request that the server aborted: "disconnect", "stop_string", "timeout", "shutdown"..."""
        self._aborts.add(cause)

    def rejected(self, reason: str) -> None:
        """Count a request that was refused; the reason is a short fixed word."""
        self._rejections.add(reason)

    def http(self, route: str, status: int, method: str = "POST") -> None:
        """Count an answered HTTP request. `route` is the pattern that matched, never the path of the request."""
        self._http.add(route, method if method in METHODS else OTHER, str(status))  # a client may invent methods

    def loop_lag(self, seconds: float) -> None:
        """Count a delay of the event loop; see `process.watch_event_loop`."""
        self._seen["event_loop_lag_seconds"].observe(seconds)

    # --- output -------------------------------------------------------------------------------------------------

    def snapshot(self) -> StatsLine:
        """Return the next periodic line of statistics, with rates since the last call."""
        stats = self._stats
        now = (time.monotonic(), self._num_prompt_tokens, self._generated, stats.prefix.queries, stats.prefix.hits)
        seconds, prompt, generated, queries, hits = (max(a - b, 0) for a, b in zip(now, self._last_line, strict=True))
        self._last_line = now
        seconds = max(seconds, 1e-9)
        earlier, self._last_drafts = self._last_drafts or (0,) * len(stats.drafts), stats.drafts
        runs, _, *right = [new - old for new, old in zip(stats.drafts, earlier, strict=True)] or (0, 0)
        return StatsLine(
            num_running=stats.num_running,
            num_waiting=self._num_waiting,
            kv_usage=self._kv_usage,
            num_cached_blocks=stats.num_cached_blocks,
            hit_rate=hits / queries if queries else None,
            prompt_tokens_per_s=prompt / seconds,
            generation_tokens_per_s=generated / seconds,
            acceptance=tuple(count / runs for count in right) if runs else (),
        )

    def render(self) -> tuple[bytes, str]:
        """Return the body and the content type of a scrape."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Yield every family with its current values."""
        values = self._values() | self._seen | {"step_time_seconds": self._parts}
        yield from filled(FAMILIES, values, self._prefix, self._labels)
        if self._cache_info:
            info = {"engine": ENGINE, **self._cache_info}
            metric = GaugeMetricFamily(f"{self._prefix}:cache_config_info", "The KV cache, as labels.", labels=[*info])
            metric.add_metric([*info.values()], 1.0)
            yield metric

    # --- samples ------------------------------------------------------------------------------------------------

    @property
    def _kv_usage(self) -> float:
        return 1.0 - self._stats.num_free_blocks / self._num_blocks if self._num_blocks else 0.0

    @property
    def _num_waiting(self) -> int:
        return self._stats.num_waiting + self._num_held()

    @property
    def _load(self) -> float:
        """Return how many engines of this size the requests would fill.

        - by slots: (running + waiting) / slots
        - by KV blocks: share of them that requests hold * (running + waiting) / running

        The larger one counts. The second one takes a waiting request for as large as those that run.
        """
        running, slots = self._stats.num_running, self._num_slots
        wanted = running + self._num_waiting
        return max(wanted / slots if slots else 0.0, self._kv_usage * wanted / running if running else 0.0)

    @property
    def _num_prompt_tokens(self) -> int:
        return self._phase_tokens["prefill"] + self._stats.prefix.hits

    def _size_lengths(self, max_model_len: int) -> None:
        self._seen |= {f.name: Histogram(one_two_five(max_model_len)) for f in FAMILIES if f.bounds == "lengths"}

    def _values(self) -> dict[str, Any]:
        """Return the values of gauges and counters: a number, or a number for each value of the label."""
        s, phases = self._stats, self._phase_tokens
        runs, drafts, *accepted = s.drafts or (0, 0)
        used = self._num_blocks - s.num_free_blocks
        return {
            "engine_load": self._load,
            "num_requests_running": s.num_running,
            "num_requests_running_by_replica": {str(number): count for number, count in s.replicas.items()},
            "num_requests_waiting": self._num_waiting,
            "num_requests_waiting_by_reason": {
                "capacity": s.num_waiting - s.num_blocked,
                "deferred": s.num_blocked,
                "restart": self._num_held(),
            },
            "kv_cache_usage_perc": self._kv_usage,
            "kv_blocks": {
                "used": used,
                "cached": s.num_cached_blocks,
                "free": self._num_blocks - used - s.num_cached_blocks,
            },
            "step_requests": {"prefill": s.num_prefills, "decode": s.num_scheduled - s.num_prefills},
            "expert_balancedness": s.balancedness,
            **_tier_values(s.tiers),
            **_adapter_values(self._adapters),
            "ready": int(self.is_ready()),
            "certificate_end_time_seconds": {} if (end := self.certificate_end()) is None else end,
            "last_step_age_seconds": 0.0 if self._busy_since is None else time.monotonic() - self._busy_since,
            "process_resident_bytes": {
                role: held for role, pid in self._pids.items() if (held := resident_bytes(pid)) is not None
            },
            "prompt_tokens": self._num_prompt_tokens,
            "prompt_tokens_by_source": {"local_compute": phases["prefill"], "local_cache_hit": s.prefix.hits},
            "prompt_tokens_cached": s.prefix.hits,
            "generation_tokens": self._generated,
            "delivered_tokens": self._delivered,
            "prefix_cache_queries": s.prefix.queries,
            "prefix_cache_hits": s.prefix.hits,
            **_state_values(s.prefix.states),
            "num_preemptions": s.num_preempted,
            "spec_decode_num_drafts": runs,
            "spec_decode_num_draft_tokens": drafts,
            "spec_decode_num_accepted_tokens": sum(accepted),
            "spec_decode_num_accepted_tokens_per_pos": {str(place): count for place, count in enumerate(accepted)},
            "steps": self._num_steps,
            "step_tokens": phases,
            "request_success": self._finished.counts,
            "request_aborts": self._aborts.counts,
            "admission_rejections": self._rejections.counts,
            "http_requests": self._http.counts,
            "restarts": self.restarts.counts,
            "reloads": self.reloads.counts,
            "internal_messages_dropped": self.dropped.counts,
            "trace_spans": self.trace_spans.counts,
            "key_requests": self.key_requests.counts,
            "key_tokens": self.key_tokens.counts,
            "key_refusals": self.key_refusals.counts,
        }


def _state_values(states: StateStats) -> dict[str, Any]:
    """Return the values of the metrics of checkpoints."""
    return {
        "state_checkpoints": {"all": states.num_checkpoints, "used": states.num_used},
        "state_checkpoints_taken": states.taken,
        "prefix_cache_state_hits": states.hits,
        "prefix_cache_state_cut": states.cut,
        "state_tier_checkpoints": _tier_sizes(states.tiers),
        "state_tier_copied_checkpoints": {
            (tier.value, direction): count
            for tier, stats in states.tiers.items()
            for direction, count in (("load", stats.num_loaded), ("store", stats.num_stored))
        },
        "state_tier_failed_checkpoints": {tier.value: stats.num_failed for tier, stats in states.tiers.items()},
    }


def _adapter_values(adapters: AdapterStats) -> dict[str, Any]:
    """Return the values of the metrics of adapters."""
    held = sum(map(bool, adapters.resident.values()))
    sizes = {"all": adapters.slots, "used": len(adapters.resident), "held": held}
    return {
        "adapter_slots": sizes if adapters.slots else {},
        "adapter_requests": adapters.resident,
        "adapter_requests_waiting": adapters.waiting,
        "adapter_loads": {"files": adapters.reads, "host": adapters.loads - adapters.reads},
        "adapter_load_failures": adapters.failed,
    }


def _tier_sizes(tiers: Mapping[Tier, TierStats]) -> dict[Any, float]:
    """Return the sizes of tiers that are counted in blocks. Ranks count those of files, and of peers, in bytes."""
    return {
        (tier.value, state): count
        for tier, stats in tiers.items()
        if stats.num_blocks
        for state, count in (("all", stats.num_blocks), ("used", stats.num_used))
    }


def _tier_values(tiers: Mapping[Tier, TierStats]) -> dict[str, dict[Any, float]]:
    """Return the values of the metrics of tiers, by their labels."""
    names = ("blocks", "failed_blocks", "dropped_blocks", *COPIED)
    found: dict[str, dict[Any, float]] = {f"kv_tier_{name}": {} for name in names}
    found["kv_tier_blocks"] = _tier_sizes(tiers)
    for tier, stats in tiers.items():
        found["kv_tier_failed_blocks"][tier.value] = stats.num_failed
        found["kv_tier_dropped_blocks"][tier.value] = stats.num_dropped
        for name, (loaded, stored) in COPIED.items():
            found[f"kv_tier_{name}"] |= {
                (tier.value, "load"): getattr(stats, loaded),
                (tier.value, "store"): getattr(stats, stored),
            }
    return found
