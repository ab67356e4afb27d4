"""A collector of OpenTelemetry spans in this process: OTLP over HTTP, on a free port."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Span:
    """A span that came. `error`: the description of its status if that is an error, else None."""

    name: str
    kind: int
    trace: str
    number: str
    parent: str
    state: str
    error: str | None
    attributes: Mapping[str, Any]
    events: list[str]
    resource: Mapping[str, Any]


@dataclass
class Collector:
    """The spans that came. `status`: that of the answers; `hold`: unset, answers wait for it."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    status: int = 200
    hold: threading.Event = field(default_factory=threading.Event)
    _came: threading.Condition = field(default_factory=threading.Condition)

    def take(self, body: bytes) -> None:
        """Add the spans of a message."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        with self._came:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                own = _values(resource.resource.attributes)
                self.spans += [_span(one, own) for scope in resource.scope_spans for one in scope.spans]
            self._came.notify_all()

    def wait(self, count: int, seconds: float = 60.0) -> list[Span]:
        """Return the spans once there are `count` of them."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.spans) >= count, seconds), [one.name for one in self.spans]
            return list(self.spans)


def _span(one: Any, resource: Mapping[str, Any]) -> Span:
    return Span(
        name=one.name,
        kind=one.kind,
        trace=one.trace_id.hex(),
        number=one.span_id.hex(),
        parent=one.parent_span_id.hex(),
        state=one.trace_state,
        error=one.status.message if one.status.code == 2 else None,
        attributes=_values(one.attributes),
        events=[event.name for event in one.events],
        resource=resource,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens until the end of the block."""
    found = Collector()
    found.hold.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.paths.add(self.path)
            found.hold.wait(60)
            if found.status == 200:
                found.take(body)
            self.send_response(found.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield found
    finally:
        found.hold.set()
        server.shutdown()
        server.server_close()
