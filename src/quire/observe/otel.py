"""OpenTelemetry's SDK as Quire uses it: spans wait in a bounded queue, and one thread sends them to the collector.

Imports the SDK, which the extra `otel` brings: `open_tracer` imports this module when spans are asked for.
"""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire import __version__
from quire.config.env import span_limits
from quire.observe.series import Tally

LOG = logging.getLogger("quire")
PATH = "/v1/traces"
GRPC_PORT = 4317
WAITING = 2048
AT_ONCE = 64  # the SDK's 512 are encoded in one go, and meanwhile no event of a stream is sent
PROPAGATOR = TraceContextTextMapPropagator()


def make_provider(endpoint: str, rate: float | None, service: str, counts: Tally) -> Any:
    """Return a `TracerProvider` that sends spans to a collector.

    rate      share of traces that are recorded where no parent decides; None: as OTEL_TRACES_SAMPLER says
    service   value of service.name, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has one
    counts    spans by what became of them: exported, failed, dropped
    """
    # The exporter writes a line for each try. `CountedExporter` tells when spans begin to fail, and when that ends.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    own = {"service.version": __version__, "service.instance.id": f"{socket.gethostname()}:{os.getpid()}"}
    given = Resource.create()
    if str(given.attributes["service.name"]).startswith("unknown_service"):
        given = given.merge(Resource({"service.name": service}))
    provider = TracerProvider(
        sampler=None if rate is None else ParentBased(TraceIdRatioBased(rate)),
        resource=Resource(own).merge(given),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(CountedProcessor(endpoint, counts))
    return provider


def begin(tracer: Any, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> Any:
    """Begin the span of a request to this server, below the span that the caller's headers name, if they name one."""
    return tracer.start_span(name, PROPAGATOR.extract(headers), SpanKind.SERVER, attributes)


def begin_below(tracer: Any, parent: Any, name: str, attributes: Mapping[str, Any], *, calls: bool) -> Any:
    """Begin a span below `parent`. `calls`: it is a request to another server."""
    kind = SpanKind.CLIENT if calls else SpanKind.INTERNAL
    return tracer.start_span(name, set_span_in_context(parent), kind, attributes)


def headers_of(span: Any) -> dict[str, str]:
    """Return the headers traceparent and, if there is one, tracestate, for a request that belongs to a span."""
    headers: dict[str, str] = {}
    PROPAGATOR.inject(headers, set_span_in_context(span))
    return headers


def mark_failed(span: Any, why: str) -> None:
    """Set the status of a span to an error."""
    span.set_status(Status(StatusCode.ERROR, why))


def collector_url(endpoint: str) -> str:
    """Return the address to which spans are posted: `endpoint`, with the path of the protocol unless it has a path."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH


class CountedExporter(SpanExporter):  # type: ignore[misc]
    """Sends spans to a collector and counts them. `num_taken`: spans that have left the queue."""

    def __init__(self, endpoint: str, counts: Tally) -> None:
        self._sender, self._counts = OTLPSpanExporter(endpoint=collector_url(endpoint)), counts
        self._where, port = urlsplit(endpoint).netloc, urlsplit(endpoint).port
        if port == GRPC_PORT:
            LOG.warning(
                "the collector at %s: port %d is usually that of OTLP over gRPC. Spans go there by OTLP over HTTP, "
                "which usually has port 4318.",
                self._where,
                port,
            )
        self._failing = False
        self.num_taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans. The thread of the queue calls this and waits; the sender tries for OTEL_EXPORTER_OTLP_TIMEOUT."""
        self.num_taken += len(spans)
        result = self._sender.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        self._counts.add("failed" if failed else "exported", count=len(spans))
        if failed and not self._failing:
            LOG.warning(
                "the collector at %s takes no spans: requests go on, and lost spans are counted in /metrics "
                "(trace_spans). OTLP over HTTP usually has port 4318.",
                self._where,
            )
        elif self._failing and not failed:
            LOG.warning("the collector at %s takes spans again.", self._where)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        """End. A sender that waits for its next try gives up."""
        self._sender.shutdown()


class CountedProcessor(BatchSpanProcessor):  # type: ignore[misc]
    """The queue of ended spans. A span that finds the queue full is dropped and counted."""

    def __init__(self, endpoint: str, counts: Tally) -> None:
        self._most, at_once = span_limits(WAITING, AT_ONCE)
        self._counts, self._num_queued = counts, 0
        self._exporter = CountedExporter(endpoint, counts)
        super().__init__(self._exporter, max_queue_size=self._most, max_export_batch_size=at_once)

    def on_end(self, span: ReadableSpan) -> None:
        """Queue an ended span. Never waits."""
        if not span.context.trace_flags.sampled:
            return
        if self._num_queued - self._exporter.num_taken >= self._most:
            self._counts.add("dropped")
            return
        self._num_queued += 1
        super().on_end(span)
