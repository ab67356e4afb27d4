"""Spans of a router: below the caller's, above those of the backend and of the prefill backend."""

import asyncio

import aiohttp
import pytest

from quire.config.serve import TracingConfig

from ...support.mock_backends import mock_backends, routed
from ...support.span_collector import collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")


def test_a_routers_spans_join_the_callers_with_those_of_its_backends() -> None:
    async def work() -> None:
        with collecting() as collector:
            tracing = TracingConfig(otlp_traces_endpoint=collector.url)
            async with mock_backends(2) as (prefill, decode):
                async with routed([decode], (prefill,), prefill_threshold=100, tracing=tracing) as (_, url):
                    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
                    async with aiohttp.ClientSession(headers=parent) as session:
                        for path, cut in (("/v1/completions", -1), ("/v1/completions", 2), ("/none", -1)):
                            decode.cut_after = cut
                            body = {"prompt": "a" * 400, "max_tokens": 4, "stream": True}
                            async with session.post(url + path, json=body) as answer:
                                await answer.read()
            computed, whole, _, broken, refused = collector.spans
            own, state = decode.headers[0]["traceparent"], decode.headers[0]["tracestate"]
            assert own == f"00-{TRACE}-{whole.number}-01" and state == "a=b"
            assert prefill.headers[0]["traceparent"] == f"00-{TRACE}-{computed.number}-01"
            assert (whole.name, whole.kind, whole.parent, whole.error) == ("POST /v1/completions", 2, PARENT, None)
            assert (computed.name, computed.kind, computed.parent) == ("prefill", 3, whole.number)
            noted = {"quire.backend": decode.url, "quire.prefill": prefill.url, "quire.tries": 1}
            assert whole.attributes | noted == whole.attributes
            assert broken.error == "backend_failed"
            assert refused.attributes["error.type"] == "404" and refused.error is None

    asyncio.run(asyncio.wait_for(work(), 60))
