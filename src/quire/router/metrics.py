"""Metrics of a router: numbers that are counted as requests pass, and made into samples when they are scraped."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.contracts.text_table import read_rows
from quire.observe.families import MetricFamily, filled
from quire.observe.series import Histogram, Tally
from quire.router.addresses import MOST_MEMBERS
from quire.router.backends import Backend

PREFIX = "quire_router"
FAMILIES = tuple(MetricFamily(*cells) for cells in read_rows(Path(__file__).with_suffix(".txt")))
COUNTS = ("requests", "refusals", "retries", "broken_answers", "prefills", "hedges", "trace_spans", "reloads")
OF_BACKENDS = ("requests", "broken_answers")  # counters whose first label is a backend
MOST_SERIES = 8 * MOST_MEMBERS  # of a counter: a backend has a few statuses
MOST_KEYS = 4_096  # series of a metric of API keys


class RouterMetrics(Collector):
    """Counters of a router. `count` adds to a counter with labels; the others are attributes.

    backends   all backends of now; the list changes
    more       returns counts that others keep, by name of the metric
    reloads    of files, by file and result; `certificate_end`: seconds since the epoch, None without TLS
    key_...    by name of the API key; `entry/http/access/limits.py` counts here
    """

    def __init__(self, backends: Sequence[Backend], more: Callable[[], Mapping[str, Any]]) -> None:
        self._backends, self._more = backends, more
        self._counts = {name: Tally(limit=MOST_SERIES) for name in COUNTS}
        self.trace_spans, self.reloads = self._counts["trace_spans"], self._counts["reloads"]
        self.certificate_end: Callable[[], float | None] = lambda: None
        self.key_requests, self.key_tokens, self.key_refusals = (Tally(limit=MOST_KEYS) for _ in range(3))
        self._seen = {f.name: Histogram(map(float, f.bounds.split())) for f in FAMILIES if f.bounds}
        self.choice, self.piece = self._seen["choice_seconds"], self._seen["piece_seconds"]
        self.disconnects = self.prompt_tokens = self.prefix_hit_tokens = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def count(self, name: str, *labels: str) -> None:
        """Count one event in the counter `name`."""
        self._counts[name].add(*labels)

    def forget_gone(self) -> None:
        """Drop the series of backends that were left out: addresses of pods come and go for months."""
        names = {backend.name for backend in self._backends}
        for name in OF_BACKENDS:
            counts = self._counts[name].counts
            for labels in [labels for labels in counts if labels[0] not in names]:
                del counts[labels]

    def render(self) -> tuple[bytes, str]:
        """Return the body and the content type of a scrape."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Return every family with its current values."""
        values = self._values() | {name: tally.counts for name, tally in self._counts.items()} | self._seen
        return filled(FAMILIES, values, PREFIX, {})

    def _values(self) -> dict[str, Any]:
        backends = self._backends
        indexes = {backend.name: backend.index for backend in backends if backend.index is not None}
        return {
            "disconnects": self.disconnects,
            "certificate_end_time_seconds": {} if (end := self.certificate_end()) is None else end,
            "backends": len(backends),
            "backend_up": {backend.name: int(backend.up) for backend in backends},
            "backend_draining": {backend.name: int(backend.leaves) for backend in backends},
            "backend_circuit": {backend.name: backend.breaker.state.value for backend in backends},
            "backend_weight": {backend.name: backend.weight for backend in backends},
            "circuit_opens": {backend.name: backend.breaker.opened for backend in backends},
            "in_flight": {backend.name: backend.in_flight for backend in backends},
            "prompt_tokens": self.prompt_tokens,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "indexed_blocks": {name: len(index) for name, index in indexes.items()},
            "lost_event_batches": {name: index.lost for name, index in indexes.items()},
            "key_requests": self.key_requests.counts,
            "key_tokens": self.key_tokens.counts,
            "key_refusals": self.key_refusals.counts,
            **self._more(),
        }
