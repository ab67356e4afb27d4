"""Metrics of a router: numbers that are counted as requests pass, and made into samples when they are scraped."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.contracts.text_table import read_rows
from quire.observe.metrics import MetricFamily, filled
from quire.observe.series import Histogram, Tally
from quire.router.backends import Backend
from quire.router.events import KVIndex

PREFIX = "quire_router"
FAMILIES = tuple(MetricFamily(*cells) for cells in read_rows(Path(__file__).with_suffix(".txt")))
COUNTS = ("requests", "refusals", "retries", "broken_answers", "prefills", "trace_spans")


class RouterMetrics(Collector):
    """Counters of a router. `count` adds to a counter with labels; the others are attributes.

    indexes   backend number -> its KV blocks
    """

    def __init__(self, backends: Sequence[Backend], indexes: Mapping[int, KVIndex]) -> None:
        self._backends, self._indexes = backends, indexes
        self._counts = {name: Tally(limit=1_024) for name in COUNTS}
        self.trace_spans = self._counts["trace_spans"]
        self._seen = {f.name: Histogram(map(float, f.bounds.split())) for f in FAMILIES if f.bounds}
        self.choice, self.piece = self._seen["choice_seconds"], self._seen["piece_seconds"]
        self.disconnects = self.prompt_tokens = self.prefix_hit_tokens = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def count(self, name: str, *labels: str) -> None:
        """Count one event in the counter `name`."""
        self._counts[name].add(*labels)

    def render(self) -> tuple[bytes, str]:
        """Return the body and the content type of a scrape."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Return every family with its current values."""
        values = self._values() | {name: tally.counts for name, tally in self._counts.items()} | self._seen
        return filled(FAMILIES, values, PREFIX, {})

    def _values(self) -> dict[str, Any]:
        backends = self._backends
        indexes = {backends[number].name: index for number, index in self._indexes.items()}
        return {
            "disconnects": self.disconnects,
            "backend_up": {backend.name: int(backend.up) for backend in backends},
            "backend_draining": {backend.name: int(backend.leaves) for backend in backends},
            "in_flight": {backend.name: backend.in_flight for backend in backends},
            "prompt_tokens": self.prompt_tokens,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "indexed_blocks": {name: len(index) for name, index in indexes.items()},
            "lost_event_batches": {name: index.lost for name, index in indexes.items()},
        }
