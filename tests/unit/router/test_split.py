"""Prefill on one backend and decode on another, as vLLM's toy_proxy_server.py does it."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import aiohttp
import pytest

from ...support.mock_backends import MockBackend, mock_backends, routed

LONG = "a" * 400  # 100 tokens by the router's estimate


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def ask(url: str, path: str = "/v1/completions", **fields: Any) -> int:
    body = {"prompt": LONG, "max_tokens": 4, "stream": True} | fields
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as answer:
        await answer.read()
        return answer.status


def test_the_fields_are_those_of_the_proxy() -> None:
    async def work() -> None:
        async with mock_backends(2) as (prefill, decode):
            async with routed([decode], (prefill,), prefill_threshold=100) as (_, url):
                fields = {"stream_options": {"include_usage": True}, "min_tokens": 2, "max_completion_tokens": 4}
                assert await ask(url, temperature=0.25, **fields) == 200
            assert prefill.bodies == [
                {
                    "prompt": LONG,
                    "max_tokens": 1,
                    "max_completion_tokens": 1,
                    "stream": False,
                    "temperature": 0.25,
                    "kv_transfer_params": {
                        "do_remote_decode": True,
                        "do_remote_prefill": False,
                        "remote_engine_id": None,
                        "remote_block_ids": None,
                        "remote_host": None,
                        "remote_port": None,
                    },
                }
            ]
            assert decode.bodies == [
                {
                    "prompt": LONG,
                    "max_tokens": 4,
                    "stream": True,
                    "temperature": 0.25,
                    **fields,
                    "kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": prefill.name},
                }
            ]
            ids = [backend.headers[0]["x-request-id"] for backend in (prefill, decode)]
            assert ids[0] == ids[1]

    run(work())


@pytest.mark.parametrize(
    "fields",
    [{"prompt": "a" * 40}, {"n": 2}, {"kv_transfer_params": {"do_remote_prefill": True}}, {"prompt": [LONG, LONG]}],
)
def test_other_requests_are_not_split(fields: dict[str, Any]) -> None:
    async def work() -> None:
        async with mock_backends(2) as (prefill, decode):
            decode.cache.clear()
            async with routed([decode], (prefill,), prefill_threshold=100) as (_, url):
                await ask(url, **fields)
            assert not prefill.bodies

    run(work())


def test_a_cached_prompt_is_computed_where_it_is_decoded() -> None:
    """The second turn has 100 tokens more than the first: below the threshold, though the prompt is above it."""

    async def work() -> None:
        async with mock_backends(2) as (prefill, decode):
            async with routed([decode], (prefill,), prefill_threshold=300, policy="prefix-affinity") as (router, url):
                for times in (8, 9):
                    assert await ask(url, prompt=LONG * times) == 200
                text = router.metrics.render()[0].decode()
            assert len(prefill.bodies) == 1 and len(decode.bodies) == 2
            assert 'prefills_total{result="remote"} 1.0' in text and 'prefills_total{result="local"} 1.0' in text

    run(work())


def break_prefill(prefill: MockBackend, how: str) -> Any:
    if how == "refuses":
        prefill.refuse = 500
    elif how == "says nothing":

        async def mute(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"" if scope["path"] == "/health" else b'{"id": 1}'})

        prefill.replaced_by = mute
    return prefill.kill() if how == "is dead" else asyncio.sleep(0)


@pytest.mark.parametrize("how", ["refuses", "says nothing", "is dead"])
def test_a_prompt_is_computed_where_it_is_decoded_when_the_prefill_backend(how: str) -> None:
    async def work() -> None:
        async with mock_backends(2) as (prefill, decode):
            async with routed([decode], (prefill,), prefill_threshold=100, health_interval=60) as (router, url):
                await break_prefill(prefill, how)
                assert await ask(url) == 200
                assert 'prefills_total{result="failed"} 1.0' in router.metrics.render()[0].decode()
            assert [json.dumps(body).count("kv_transfer") for body in decode.bodies] == [0]

    run(work())


def test_a_second_try_computes_the_prompt_itself() -> None:
    """The prefilled blocks are promised to one backend, once."""

    async def work() -> None:
        async with mock_backends(3) as (prefill, full, decode):
            full.refuse = 503
            async with routed([full, decode], (prefill,), prefill_threshold=100) as (_, url):
                assert await ask(url) == 200
            assert len(prefill.bodies) == 1
            assert "kv_transfer_params" in full.bodies[0] and "kv_transfer_params" not in decode.bodies[0]

    run(work())
