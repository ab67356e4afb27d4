"""Dashboards show every registered metric, ask for series that a scrape has, and are those of deploy/grafana."""

import json
import re
from typing import Any

import pytest

from dashboards import FOLDER, NO_PANEL, PANELS, ROUTER, TITLES, dashboards, named, registry_of
from quire.observe.metrics import Metrics
from quire.router.metrics import RouterMetrics

FORMS = (  # PromQL, from the inside out: V is a vector, R a vector of ranges
    (r'[a-z_]+:[a-z_0-9]+\{\w+=~"\$\w+"(,\w+=~"\$\w+")*\}', "V"),
    (r"V\[\$__rate_interval\]", "R"),
    (r"rate\(R\)", "V"),
    (r"(sum|max)( by \(\w+(, \w+)*\) )?\(V\)", "V"),
    (r"histogram_quantile\(0\.\d+, V\)", "V"),
    (r"^V / V$", "V"),
)
KEPT_ELSEWHERE = {"retries_denied": 0, "overflows": 0, "discovery_failures": {}}  # counts of a router
SERIES = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}  # the name of a counter has _total


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_the_files_are_current() -> None:
    found = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert found == dashboards(), "PYTHONPATH=src python tools/dashboards.py"


@pytest.mark.parametrize("router", [False, True], ids=["server", "router"])
def test_every_metric_is_on_a_panel_or_has_a_reason(router: bool) -> None:
    """A panel that names an unknown metric fails where the files are made."""
    rows = [panel for panel in PANELS if (panel.dashboard == ROUTER) == router]
    shown = {name for panel in rows if panel.dashboard != NO_PANEL for name in named_in(panel.queries)}
    left = {name for panel in rows if panel.dashboard == NO_PANEL for name in named_in(panel.queries)}
    registered = set(registry_of(ROUTER if router else "overview", "quire").families)
    assert {panel.dashboard for panel in PANELS} == {*TITLES, NO_PANEL}
    assert not shown & left and shown | left == registered, "add the metric to tools/dashboards.txt"


def named_in(queries: str) -> list[str]:
    return [name for query in queries.split(",") for name in named(query.strip())]


@pytest.mark.parametrize("name", TITLES)
def test_queries_are_prom_ql_over_series_of_a_scrape(name: str) -> None:
    prefix = "vllm"
    board = json.loads(dashboards(prefix)[f"{name}.json"])
    body, _ = RouterMetrics([], lambda: KEPT_ELSEWHERE).render() if name == ROUTER else Metrics(prefix, "m").render()
    types = re.findall(r"^# TYPE (\S+) (\w+)$", body.decode(), re.M)
    series = {f"{known}{end}" for known, kind in types for end in SERIES[kind]}
    families = registry_of(name, prefix).families
    for text in expressions(board):
        asked = re.findall(r"([\w:]+)\{", text)
        assert asked and set(asked) <= series, text
        (family,) = {families[re.sub("^.*:|_(bucket|sum|count|total)$", "", one)] for one in asked[:1]}
        labels = {label for group in re.findall(r"by \(([^)]+)\)", text) for label in group.split(", ")}
        assert labels <= {*family.kind.split()[1:], "le", "instance"}, text
        for form, stands in FORMS:
            text = re.sub(form, stands, text)
        assert text == "V"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 0
