"""Families of metrics: rows of a table in a text file, and their values in the form of Prometheus' client."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from quire.observe.series import Histogram

KINDS: dict[str, Any] = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


class MetricFamily(NamedTuple):
    """Definition of a metric, a row of `metrics.txt`.

    kind     "gauge", "counter" or "histogram", then the names of the labels, separated by spaces
    values   of a histogram: bounds of its buckets, separated by spaces; "lengths": 1, 2, 5, 10, ... up to the context
             length. Of a counter: values of its labels that have a sample from the start, "core rank / killed exited"
    """

    name: str
    kind: str
    help: str
    values: str = ""

    @property
    def bounds(self) -> str:
        """Bounds of a histogram's buckets, else ""."""
        return self.values if self.kind.startswith("histogram") else ""

    def zeros(self) -> dict[Any, float]:
        """Return the counts of a counter before its first event. Without them `increase()` misses this event."""
        known = self.values if self.kind.startswith("counter") else ""
        return dict.fromkeys(product(*(words.split() for words in known.split(" / "))), 0.0) if known else {}


def filled(
    families: Iterable[MetricFamily], values: Mapping[str, Any], prefix: str, given: Mapping[str, str]
) -> Iterator[Metric]:
    """Yield every family with its values, in the form of Prometheus' client.

    values   by name of the family: a number or a histogram; with labels, a dict of these by the values of the labels
    given    labels of every family, before its own
    """
    for family in families:
        value = values[family.name]
        kind, *labels = family.kind.split()
        metric = KINDS[kind](f"{prefix}:{family.name}", family.help, labels=[*given, *labels])
        for key, each in (family.zeros() | value if isinstance(value, dict) else {(): value}).items():
            numbers = (each.buckets(), each.total) if isinstance(each, Histogram) else (each,)
            metric.add_metric([*given.values(), *((key,) if isinstance(key, str) else key)], *numbers)
        yield metric
