"""Dashboards for Grafana 10 and later, made from the registries of metrics (`metrics.txt` of a server and of a router).

    PYTHONPATH=src python tools/dashboards.py [FOLDER] [--prefix vllm]     writes a file for each; into deploy/grafana

`dashboards.txt` says which metrics a panel shows. Kind, labels and help come from the registry, so a panel cannot name
a metric that does not exist. `--prefix` is the `--metrics-prefix` of the servers.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quire.contracts.text_table import read_rows
from quire.observe import metrics
from quire.router import metrics as router_metrics

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "grafana"
ROUTER = "router"  # the dashboard that shows a router's metrics
NO_PANEL = "-"
TITLES = {
    "overview": "overview",
    "latency": "latency",
    "kv": "KV cache and prefixes",
    "scheduler": "scheduler and steps",
    "drafts": "drafts",
    "experts": "experts",
    "keys": "keys and adapters",
    ROUTER: "router",
}
QUANTILES = (0.5, 0.95, 0.99)
SCHEMA = 38  # of Grafana 10.0; later versions raise it when they import the file
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 12, 8  # of a panel; a row is 24 wide


class Panel(NamedTuple):
    """A row of `dashboards.txt`. `queries` are separated by commas."""

    dashboard: str
    title: str
    unit: str
    queries: str


class Registry(NamedTuple):
    """Metrics of a process, and the names that they have in Prometheus.

    prefix     what stands before ":" in their names
    selector   labels by which a dashboard chooses among several processes: label of a series -> name of the variable
    """

    families: Mapping[str, metrics.MetricFamily]
    prefix: str
    selector: Mapping[str, str]

    def series(self, name: str, suffix: str = "") -> str:
        """Return the selector of the series of a metric."""
        chosen = ",".join(f'{label}=~"${variable}"' for label, variable in self.selector.items())
        return f"{self.prefix}:{name}{suffix}{{{chosen}}}"

    def rate(self, name: str, suffix: str, labels: Iterable[str]) -> str:
        """Return the rate of a counter per second, summed by labels."""
        return summed(f"rate({self.series(name, suffix)}[$__rate_interval])", labels)


PANELS = tuple(Panel(*cells) for cells in read_rows(Path(__file__).with_suffix(".txt")))


def main() -> None:
    """Write the dashboards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--prefix", default="quire", help="--metrics-prefix of the servers")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, text in dashboards(args.prefix).items():
        (args.folder / name).write_text(text)


def dashboards(prefix: str = "quire") -> dict[str, str]:
    """Return the text of each file."""
    return {f"{name}.json": json.dumps(dashboard(name, prefix), indent=1) + "\n" for name in TITLES}


def registry_of(name: str, prefix: str) -> Registry:
    """Return the registry whose metrics a dashboard shows."""
    if name == ROUTER:
        found, prefix, selector = router_metrics.FAMILIES, router_metrics.PREFIX, {"instance": "instance"}
    else:
        found, selector = metrics.FAMILIES, {"model_name": "model", "instance": "instance"}
    return Registry({family.name: family for family in found}, prefix, selector)


def dashboard(name: str, prefix: str) -> dict[str, Any]:
    """Return a dashboard in Grafana's form."""
    registry = registry_of(name, prefix)
    rows = [panel for panel in PANELS if panel.dashboard == name]
    always = next(one.name for one in registry.families.values() if one.kind.startswith("gauge"))
    variables = [
        {"name": variable, "label": variable, "type": "query", "datasource": SOURCE, "refresh": 2}
        | {"query": f"label_values({registry.prefix}:{always}, {label})", "includeAll": True, "multi": True}
        | {"allValue": ".*", "current": {"text": "All", "value": "$__all"}}
        for label, variable in registry.selector.items()
    ]
    return {
        "uid": f"quire-{name}",
        "title": f"Quire: {TITLES[name]}",
        "tags": ["quire"],
        "schemaVersion": SCHEMA,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"}]
            + variables
        },
        "links": [{"type": "dashboards", "title": "Quire", "tags": ["quire"], "asDropdown": True, "keepTime": True}],
        "panels": [drawn(panel, number, registry) for number, panel in enumerate(rows)],
    }


def drawn(panel: Panel, number: int, registry: Registry) -> dict[str, Any]:
    """Return panel `number` of a dashboard in Grafana's form."""
    words = [query.strip() for query in panel.queries.split(",")]
    targets = [target for query in words for target in asked(query, registry, alone=len(words) == 1)]
    helps = dict.fromkeys(registry.families[name].help for query in words for name in named(query))
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": " ".join(helps),
        "datasource": SOURCE,
        "gridPos": {"x": number % 2 * WIDTH, "y": number // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 5}}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": f"Q{place}", "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(targets)
        ],
    }


def named(query: str) -> list[str]:
    """Return the names of the metrics in a query."""
    words = query.partition(" by ")[0].split()
    return [word for word in words if word not in ("max", "mean", "/")]


def asked(query: str, registry: Registry, alone: bool) -> list[tuple[str, str]]:
    """Return the PromQL expressions of a query, each with the legend of its series. `alone`: the panel has no other."""
    first, *others = named(query)
    kind, *own = registry.families[first].kind.split()
    labels = query.partition(" by ")[2].split() or own
    how = query.split()[0]
    legend = " ".join([*([] if alone and labels else [first]), *(f"{{{{{label}}}}}" for label in labels)])
    if others:
        return [(" / ".join(registry.rate(name, "_total", ()) for name in (first, *others)), "share")]
    if how == "mean":
        whole, count = (registry.rate(first, suffix, labels) for suffix in ("_sum", "_count"))
        return [(f"{whole} / {count}", f"mean {legend}")]
    if kind == "gauge":
        return [(summed(registry.series(first), labels, "max" if how == "max" else "sum"), legend)]
    if kind == "counter":
        return [(registry.rate(first, "_total", labels), legend)]
    buckets = registry.rate(first, "_bucket", ("le", *labels))
    ends = "".join(f" {{{{{label}}}}}" for label in labels)
    return [(f"histogram_quantile({share}, {buckets})", f"p{share * 100:.0f}{ends}") for share in QUANTILES]


def summed(expression: str, labels: Iterable[str], how: str = "sum") -> str:
    """Return the sum of an expression by labels."""
    by = ", ".join(labels)
    return f"{how} by ({by}) ({expression})" if by else f"{how}({expression})"


if __name__ == "__main__":
    main()
