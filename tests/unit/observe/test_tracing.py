"""Spans without a server: what waits, what is dropped, whose trace it is, and what an engine without the extra says."""

import sys

import pytest

import quire.observe
from quire.config.serve import ServerConfig, TracingConfig
from quire.contracts.errors import ConfigError
from quire.observe.series import Tally
from quire.observe.tracing import Tracer, open_tracer

from ...support.span_collector import Collector, collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def tracer_of(collector: Collector, counts: Tally, rate: float | None = None) -> Tracer:
    tracer = open_tracer(
        TracingConfig(otlp_traces_endpoint=collector.url, otlp_traces_sample_rate=rate), counts, "quire-test"
    )
    assert tracer is not None
    return tracer


def told(counts: Tally) -> dict[str, float]:
    return {labels[0]: count for labels, count in counts.counts.items()}


def test_no_collector_is_no_tracer_and_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_tracer(TracingConfig(), Tally()) is None
    monkeypatch.delitem(sys.modules, "quire.observe.otel", raising=False)
    monkeypatch.delattr(quire.observe, "otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[otel\]'"):
        open_tracer(TracingConfig(otlp_traces_endpoint="http://127.0.0.1:1"), Tally())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"otlp_traces_endpoint": "grpc://host:4317"}, "OTLP over HTTP"),
        ({"otlp_traces_endpoint": ":4317"}, "http://host:4318"),
        ({"otlp_traces_endpoint": "http://:4317"}, "with a host"),
        ({"otlp_traces_endpoint": "http://host:65536"}, "http://host:4318"),
        ({"otlp_traces_endpoint": "http://user:secret@host"}, "OTEL_EXPORTER_OTLP_HEADERS"),
        ({"otlp_traces_endpoint": "http://host", "otlp_traces_sample_rate": 1.5}, "0..1"),
        ({"otlp_traces_sample_rate": 0.5}, "needs otlp_traces_endpoint"),
        ({"otlp_traces_content": True}, "needs otlp_traces_endpoint"),
    ],
)
def test_wrong_options_are_refused_with_their_fix(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        ServerConfig.from_flat(**options)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("port", [4317, 4318])
def test_the_port_of_grpc_gets_a_warning(port: int, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
    tracer = open_tracer(TracingConfig(otlp_traces_endpoint=f"http://[::1]:{port}"), Tally())
    assert tracer is not None
    tracer.close()
    assert ("[::1]:4317: port 4317 is usually that of OTLP over gRPC" in caplog.text) == (port == 4317)


def test_spans_that_find_the_queue_full_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector does not answer meanwhile: a span that waited for it would never end here."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    counts = Tally()
    with collecting() as collector:
        collector.hold.clear()
        tracer = tracer_of(collector, counts)
        for _ in range(32):
            tracer.begin("x", [], {}).end(200)
        assert told(counts)["dropped"] >= 32 - 2 * 4  # those that wait, and those on the way
        collector.hold.set()
        tracer.close()
        assert len(collector.spans) == told(counts)["exported"] == 32 - told(counts)["dropped"] > 0
        assert collector.paths == {"/v1/traces"}
        assert {span.resource["service.name"] for span in collector.spans} == {"mine"}


def test_spans_that_the_collector_refuses_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
    counts = Tally()
    with collecting() as collector, caplog.at_level("WARNING"):
        collector.status = 400
        tracer = tracer_of(collector, counts)
        for _ in range(80):  # two messages
            tracer.begin("x", [], {}).end(200)
        tracer.close()
        assert told(counts) == {"exported": 0, "failed": 80, "dropped": 0}
    assert [record.name for record in caplog.records] == ["quire"] and "takes no spans" in caplog.text


def test_the_callers_trace_goes_on_and_its_sampling_counts() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
    with collecting() as collector:
        tracer = tracer_of(collector, Tally(), 0.0)
        for name, flags in (("own", ""), ("asked", "01"), ("unasked", "00"), ("broken", "zz")):
            headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-{flags}".encode())] if flags else []
            span = tracer.begin(name, [*headers, (b"tracestate", b"a=1"), (b"tracestate", b"b=2")], {})
            passed = dict(span.headers([(b"traceparent", b"old"), (b"x", b"y")]))
            assert passed[b"x"] == b"y" and passed[b"traceparent"] != b"old"
            assert (TRACE.encode() in passed[b"traceparent"]) == (name in ("asked", "unasked"))
            span.end(200)
        tracer.close()
        (only,) = collector.spans
        assert (only.name, only.trace, only.parent, only.state) == ("asked", TRACE, PARENT, "a=1,b=2")
