"""Lines of the log about requests: the backend, the tries, and how each answer ended."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from quire.config.serve import LogConfig
from quire.entry.http.access.routed_log import RoutedLog
from quire.entry.http.request_scope import AccessLog

from ...support.mock_backends import mock_backends, routed

PATH, STREAM = "/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 3}
SHOWN = ("request_id", "status", "backend", "tries", "error")


async def half(scope: Any, receive: Any, send: Any) -> None:
    """An answer that breaks off, and no stream: the client's connection is cut."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b'{"choices": [', "more_body": True})
    raise ConnectionAbortedError


async def lines_of_requests(form: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    """Send requests that end in several ways. Return the lines about them, and the URL of the backend that has them."""
    log, lines = AccessLog(LogConfig(access_log=True, log_format=form), "router"), list[str]()
    async with mock_backends(2) as (full, one), aiohttp.ClientSession() as session:
        around: Any = lambda app: RoutedLog(app, log)  # noqa: E731
        async with routed([full, one], around=around) as (router, url):

            async def ask(path: str = PATH, **more: Any) -> None:
                headers = {"x-request-id": f"id-{len(lines)}"}
                async with session.post(url + path, json=STREAM | more, headers=headers) as answer:
                    assert answer.headers["x-request-id"] == headers["x-request-id"]  # the backends send none
                    await answer.read()

            async def told() -> None:
                while not (text := capsys.readouterr().err):
                    await asyncio.sleep(0.001)
                lines.extend(text.splitlines())

            full.refuse = 503
            for path in ("/none", PATH):
                await ask(path)
                await told()
            router.backends[0].draining, one.cut_after = True, 1
            await ask()
            await told()
            one.replaced_by = half
            with pytest.raises(aiohttp.ClientPayloadError):
                await ask()
            await told()
            one.replaced_by, one.stalls = None, True
            leaves = asyncio.create_task(ask(user="stall"))
            while not one.live:
                await asyncio.sleep(0.001)
            leaves.cancel()
            await told()
            router.backends[1].draining = True
            await ask()
            await told()
    return lines, one.url


def test_a_line_says_how_a_request_ended(capsys: pytest.CaptureFixture[str]) -> None:
    lines, url = asyncio.run(asyncio.wait_for(lines_of_requests("json", capsys), 60))
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    asked = {"process": "router", "level": "info", "message": "request", "method": "POST"}
    assert all(asked.items() <= line.items() and line["time"] and line["seconds"] >= 0 for line in found)
    assert [tuple(line.get(name) for name in SHOWN) for line in found] == [
        ("id-0", 404, None, None, "unknown_path"),
        ("id-1", 200, url, 2, None),
        ("id-2", 200, url, 1, "backend_failed"),
        ("id-3", 200, url, 1, "backend_failed"),
        ("id-4", 499, url, 1, None),
        ("id-5", 503, None, None, "no_backend"),
    ]


def test_the_same_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    lines, url = asyncio.run(asyncio.wait_for(lines_of_requests("text", capsys), 60))
    assert lines[1].split()[1:4] == ["POST", PATH, "200"] and lines[1].endswith(f"id-1 backend={url} tries=2")
