"""Spans of requests, for OpenTelemetry: begun below the caller's span, ended with the status of the answer.

Nothing here waits for the collector (`otel.py`), and nothing of OpenTelemetry is imported before a tracer is opened.
Knows HTTP's headers and statuses. Knows nothing of engines.
"""

import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Self

from quire.config.serve import TracingConfig
from quire.contracts.errors import ConfigError
from quire.observe.series import Tally

Message = MutableMapping[str, Any]
CLIENT_GONE = 499  # status of a request whose client has left
FLUSH_SECONDS = 2.0  # that spans get when the process ends
MISSING = (
    "otlp_traces_endpoint needs OpenTelemetry, which is not installed here ({}): pip install 'quire[otel]', or leave "
    "the option out."
)


def open_tracer(config: TracingConfig, counts: Tally, service: str = "quire") -> "Tracer | None":
    """Return the tracer of a process; None without a collector. Raises `ConfigError` without OpenTelemetry's packages.

    counts    spans by what became of them: exported, failed, dropped
    service   name of the service, unless OTEL_SERVICE_NAME is set
    """
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from quire.observe import otel
    except ImportError as error:
        raise ConfigError(MISSING.format(error)) from None
    for result in ("exported", "failed", "dropped"):
        counts.add(result, count=0)
    provider = otel.make_provider(config.otlp_traces_endpoint, config.otlp_traces_sample_rate, service, counts)
    return Tracer(otel, provider, content=config.otlp_traces_content)


def own(**facts: str | int) -> dict[str, Any]:
    """Return facts under the names that attributes of Quire's own have: those for which no convention has a name."""
    return {f"quire.{name}": value for name, value in facts.items()}


class Tracer:
    """Begins the spans of a process. `content`: spans may have texts of prompts and answers."""

    def __init__(self, otel: Any, provider: Any, *, content: bool) -> None:
        self._otel, self._provider, self._content = otel, provider, content
        self._tracer = provider.get_tracer("quire")

    def begin(self, name: str, headers: Iterable[tuple[bytes, bytes]], attributes: Mapping[str, Any]) -> "ServerSpan":
        """Begin the span of an HTTP request. A traceparent that is none begins a trace of its own."""
        given: dict[str, str] = {}
        for key, value in headers:
            if key in (b"traceparent", b"tracestate"):
                text, word = value.decode("latin-1"), key.decode()
                given[word] = f"{given[word]},{text}" if word in given else text
        span = self._otel.begin(self._tracer, name, given, attributes)
        return ServerSpan(self._otel, self._tracer, span, content=self._content)

    def close(self) -> None:
        """Send the spans that wait, for `FLUSH_SECONDS` at most."""
        ending = threading.Thread(target=self._provider.shutdown, name="quire-last-spans", daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)


class ServerSpan:
    """The span of a request.

    records   False: the trace is not sampled, so that attributes are for nobody
    content   True: texts of prompts and answers may be attributes
    notes     attributes that the span gets at its end
    error     why the request failed, a short word: the code of its error; "": it did not, or nobody knows
    """

    def __init__(self, otel: Any, tracer: Any, span: Any, *, content: bool) -> None:
        self._otel, self._tracer, self._span, self.content = otel, tracer, span, content
        self._began, self._began_ns = time.monotonic(), time.time_ns()
        self.records: bool = span.is_recording()
        self.error = ""
        self.notes: dict[str, Any] = {}

    def below(self, name: str, *, calls: bool = False) -> "ServerSpan":
        """Begin a span below this one. `calls`: it is a request to another server."""
        span = self._otel.begin_below(self._tracer, self._span, name, {}, calls=calls)
        return ServerSpan(self._otel, self._tracer, span, content=self.content)

    def headers(self, given: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return headers of a request that this span makes to another server: `given`, with this span's context."""
        own = self._otel.headers_of(self._span)
        kept = [header for header in given if header[0] not in (b"traceparent", b"tracestate")]
        return [*kept, *((name.encode(), value.encode("latin-1")) for name, value in own.items())]

    def rename(self, name: str) -> None:
        """Change the name."""
        self._span.update_name(name)

    def event(self, name: str, at: float) -> None:
        """Add an event. `at`: seconds of the monotonic clock"""
        self._span.add_event(name, timestamp=self._began_ns + round((at - self._began) * 1e9))

    def end(self, status: int, attributes: Mapping[str, Any] | None = None) -> None:
        """End the span with the HTTP status of the answer; 0: it has none of its own.

        The span's status is an error for 5xx, and for an answer that failed after its beginning. A client that left, or
        an error of the client (4xx), leaves the status unset, as OpenTelemetry's conventions for servers want it.
        """
        if self.records:
            found = self.notes | dict(attributes or {})
            if status:
                found["http.response.status_code"] = status
            left, code = status == CLIENT_GONE, str(status) if status >= 400 else ""
            if error := self.error or ("disconnect" if left else code):
                found["error.type"] = error
                if status >= 500 or status < 400 or (left and self.error):
                    self._otel.mark_failed(self._span, error)
            self._span.set_attributes(found)
        self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.error = kind.__name__
        self.end(0)


class Answering:
    """An ASGI application that answers a request in a span: `run` gives the status of the answer.

    left   exceptions that mean that the client has gone; others count as 500
    """

    def __init__(self, app: Callable[..., Awaitable[None]], span: ServerSpan, left: type[Exception]) -> None:
        self._app, self._span, self._left = app, span, left
        self.status = CLIENT_GONE

    async def run(self, scope: Message, receive: Callable[[], Awaitable[Any]], send: Callable[..., Any]) -> None:
        """Answer. `status` is `CLIENT_GONE` until the whole answer is sent."""
        begun = 0

        async def passing(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = message["status"]
            elif not message.get("more_body", False):
                self.status = begun
            await send(message)

        try:
            await self._app(scope, receive, passing)
        except self._left:
            raise
        except Exception as error:  # the server in front answers 500, unless an answer has begun
            self.status, self._span.error = begun or 500, type(error).__name__
            raise
