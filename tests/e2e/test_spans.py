"""The spans of a server's requests, as a collector gets them."""

import http.client
import json
from typing import Any

import pytest

from ..support.span_collector import Span, collecting
from .in_process import running_inside
from .serving import PATIENCE, Server, wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "a secret of the caller " * 8
pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")


def leave(server: Server, **fields: Any) -> None:
    """Begin to read a stream, and close the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    body = {"prompt": [1], "max_tokens": 2_000, "stream": True, "ignore_eos": True} | fields
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    response.read(64)
    response.close()
    connection.close()


def test_each_end_of_a_request_ends_its_span_and_the_account_is_the_engines() -> None:
    with collecting() as collector:
        options = {"model": "quire-tiny", "mock_step_ms": 2.0, "otlp_traces_endpoint": collector.url}
        with running_inside(**options) as inside:
            server = inside.server
            chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "temperature": 0.5, "n": 2}
            parent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
            assert server.ask("/v1/chat/completions", chat, **parent).status == 200
            assert server.ask("/v1/chat/completions", chat | {"stream": True}).status == 200
            assert server.ask("/v1/completions", {"prompt": "x", "model": "none"}).status == 404
            assert server.ask("/v1/completions", {"prompt": [1] * 100_000}).status == 400
            late = {"prompt": [1], "max_tokens": 2_000, "ignore_eos": True, "stream": True}
            assert server.ask("/v1/completions", late, **{"x-request-timeout": "0.1"}).status == 200
            leave(server)
            back = {"input": SECRET, "background": True, "max_output_tokens": 4}
            assert server.ask("/v1/responses", back).status == 200
            assert server.ask("/v1/embeddings", {"input": ["x", "y"]}).status == 200
            assert server.ask("/tokenize", {"prompt": "x"}).status == 200
            wait_until(lambda: not inside.engine.num_live, "an idle engine")
        first, again, unknown, long, *rest = collector.spans
        by_name = {(span.name, span.error, span.attributes.get("error.type")): span for span in rest}
    assert "secret" not in str(collector.spans)
    assert (first.name, first.trace, first.parent, first.state) == ("chat quire-tiny", TRACE, PARENT, "a=b")
    assert first.kind == 2 and first.error is None and first.events == ["scheduled", "first_token"]
    expected = {
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "quire-tiny",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "quire.preemptions": 0,
    }
    assert first.attributes | expected == first.attributes
    times = {name: first.attributes[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "e2e")}
    parts = [first.attributes[f"gen_ai.latency.time_in_model_{name}"] for name in ("prefill", "decode")]
    assert times["e2e"] == pytest.approx(times["time_in_queue"] + sum(parts))
    assert first.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(times["time_in_queue"] + parts[0])
    assert 0 < again.attributes["gen_ai.usage.cache_read.input_tokens"] < again.attributes["gen_ai.usage.input_tokens"]
    assert (unknown.name, unknown.error, unknown.attributes["error.type"]) == (
        "text_completion",
        None,
        "model_not_found",
    )
    assert long.attributes["error.type"] == "context_length_exceeded" and long.error is None
    failed: Span = by_name["text_completion quire-tiny", "deadline", "deadline"]
    assert failed.attributes["http.response.status_code"] == 200  # the stream had begun
    left = by_name["text_completion quire-tiny", None, "disconnect"]
    assert left.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    answered, background = by_name["chat", None, None], by_name["chat quire-tiny", None, None]
    assert background.parent == answered.number and background.attributes["gen_ai.usage.output_tokens"] == 4
    vectors = by_name["embeddings quire-tiny", None, None]
    assert vectors.attributes["gen_ai.usage.num_sequences"] == 2 and len(collector.spans) == 9
