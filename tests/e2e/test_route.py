"""Two `quire route` in front of two `quire serve` agree; a backend is killed, then a router; a drained one stays so.

The first router has an operator and keeps a state, the second one has keys with limits.
"""

import http.client
import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

from .serving import MOCK, Answer, Server, running_server, wait_until

KEYS = {"keys": {"few": {"key": "sk-few", "requests_per_minute": 1}, "all": {"key": "sk-all"}}}
SESSIONS = [f"s{number}" for number in range(16)]  # that one server has all of them is as likely as 15 heads in a row


def drain(router: Server, backend: str) -> None:
    """Drain a backend on the operators' side of a router."""
    operators = router.stderr.split("listening on ")[2].split()[0].removeprefix("http://")
    connection = http.client.HTTPConnection(operators, timeout=10)
    kind = {"content-type": "application/json"}
    connection.request("POST", "/backends/drain", json.dumps({"backend": backend}), kind)
    assert json.load(connection.getresponse())["draining"] is True
    connection.close()


def asked(router: Server, session: str, key: str = "", max_tokens: int = 4) -> Answer:
    """A streamed completion of a session."""
    body = {"prompt": "Once", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return router.ask("/v1/completions", body, **{"x-session-id": session, "authorization": f"Bearer {key}"})


def backend_of(router: Server, session: str, key: str) -> str:
    """The backend that answers a session."""
    before = _answered(router, key)
    assert asked(router, session, key).error() is None
    (url,) = [url for url, count in _answered(router, key).items() if count != before.get(url, 0.0)]
    return url


def _answered(router: Server, key: str) -> dict[str, float]:
    text = router.ask("/metrics", authorization=f"Bearer {key}").body.decode()
    return {url: float(n) for url, n in re.findall(r'requests_total\{backend="([^"]*)",status="200"\} (\S+)', text)}


def told(router: Server, key: str) -> list[dict[str, Any]]:
    """The lines of the log about the requests with a key. Every line is JSON."""
    return [line for text in router.stderr.splitlines() if (line := json.loads(text)).get("key") == key]


def test_two_routers_in_front_of_two_servers(tmp_path: Path) -> None:
    found, state, keys = tmp_path / "backends.txt", str(tmp_path / "state.json"), tmp_path / "keys.json"
    keys.write_text(json.dumps(KEYS))
    with running_server(*MOCK, "--mock-step-ms", "10") as one, running_server(*MOCK) as two:
        found.write_text(f"{one.url}\n{two.url} weight=1\n")
        flags = ("--backend-file", str(found), "--policy", "consistent-hash")
        logged = ("--log-format", "json", "--access-log")
        keyed = running_server(*flags, "--api-key-file", str(keys), *logged, command="route", wait="/live")
        operated = (*flags, "--admin-port", "0", "--state-file", state)
        with keyed as second:
            with running_server(*operated, command="route") as first:
                homes = {session: backend_of(first, session, "") for session in SESSIONS}
                assert set(homes.values()) == {one.url, two.url}
                assert homes == {session: backend_of(second, session, "sk-all") for session in SESSIONS}
                assert [asked(second, "s0", key).status for key in ("", "sk-few", "sk-few")] == [401, 200, 429]
                keys.write_text(json.dumps({"keys": {"all": {"key": "sk-all"}}}))
                wait_until(lambda: len(told(second, "few")) == 2, "a line of each request with the key")
                first_line, limited = told(second, "few")
                shown = {"backend": homes["s0"], "tries": 1, "status": 200, "process": "router", "level": "info"}
                assert shown.items() <= first_line.items() and first_line["time"] and limited["status"] == 429
                second.signal(signal.SIGHUP)
                wait_until(lambda: asked(second, "s0", "sk-few").status == 401, "the keys are read again")
                scrape = {"authorization": "Bearer sk-all"}
                counted = re.compile(rb'reloads_total{(?=.*"done")(?=.*"keys").*} 1.0')
                wait_until(lambda: bool(counted.search(second.ask("/metrics", **scrape).body)), "the reload is counted")

                made = second.ask(
                    "/v1/responses", {"input": "x", "background": True}, authorization="Bearer sk-all"
                ).json()
                assert first.ask(f"/v1/responses/{made['id']}", None, "GET").json()["id"] == made["id"]

                mine = next(session for session, url in homes.items() if url == one.url)
                broken: list[Answer] = []
                asking = threading.Thread(target=lambda: broken.append(asked(first, mine, "", 4000)))
                asking.start()
                wait_until(lambda: sum(_answered(first, "").values()) == 18, "the first byte")
                os.killpg(one.process.pid, signal.SIGKILL)
                asking.join()
                error = broken[0].error()
                assert error is not None and error["code"] == "backend_failed"
                for session in (mine, *SESSIONS[:3]):
                    assert backend_of(first, session, "") == backend_of(second, session, "sk-all") == two.url
                assert list(first.metric("quire_router:backend_up").values()) == [0.0, 1.0]

                drain(first, two.url)
                assert first.complete().status == 503 and first.ask("/ready").status == 503
                assert first.ask("/v1/models", None, "GET", host="evil.example").status == 403
                os.killpg(first.process.pid, signal.SIGKILL)
                assert asked(second, mine, "sk-all").error() is None  # the other router has not drained it
            with running_server(*operated, command="route", wait="/live") as first:
                assert "all are being drained" in first.complete().body.decode()
                first.signal(signal.SIGTERM)
                assert first.exit_code() == 0 and "SIGTERM: no new requests" in first.stderr
