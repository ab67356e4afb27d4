"""The live view of a real server: several HTTP processes, keys, a router in front, and `quire top` over all of it."""

import http.client
import json
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from .serving import MOCK, PATIENCE, Server, running_server, wait_until

DEAD = "http://127.0.0.1:9"  # nobody listens there
KEY, OTHER = "sk-one", "sk-two"


class Watcher:
    """A connection that reads the live view in a thread, until `close`."""

    def __init__(self, server: Server, key: str = "") -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._server, self._headers = server, {"authorization": f"Bearer {key}"} if key else {}
        wait_until(self._connects, "a process that has heard of the engine")  # each of several hears by itself
        assert self._response.status == 200
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _connects(self) -> bool:
        self._connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=PATIENCE)
        self._connection.request("GET", "/debug/live", headers=self._headers)
        self._response = self._connection.getresponse()
        return self._response.status != 503

    def _read(self) -> None:
        name = ""
        try:
            for line in self._response:
                if line.startswith(b"event: "):
                    name = line[7:].decode().strip()
                elif line.startswith(b"data: "):
                    self.events.append((name, json.loads(line[6:])))
        except (OSError, ValueError, http.client.HTTPException, AttributeError):
            pass  # closed

    def frames(self) -> list[dict[str, Any]]:
        return [data for name, data in self.events if name == "frame"]

    def told(self) -> list[dict[str, Any]]:
        """Events of requests."""
        return [one for frame in self.frames() for engine in frame["engines"] for one in engine["events"]]

    def close(self) -> None:
        if self._connection.sock is not None:
            self._connection.sock.close()
        self._connection.close()


def test_every_http_process_has_the_whole_engine_and_timelines_of_its_own() -> None:
    with running_server(*MOCK, "--api-server-count", "3", "--mock-step-ms", "2") as server:
        watchers = [Watcher(server) for _ in range(6)]  # some process has several of them
        wait_until(lambda: all(watcher.frames() for watcher in watchers), "a first frame")
        facts = [watcher.events[0][1] for watcher in watchers]
        assert {one["processes"] for one in facts} == {3}
        for _ in range(6):
            assert server.complete().status == 200
        wait_until(
            lambda: all(sum(one["what"] == "finished" for one in watcher.told()) == 6 for watcher in watchers),
            "six ends for each watcher",
        )
        for watcher in watchers:
            sampled = sum(engine["sums"]["sampled"] for frame in watcher.frames() for engine in frame["engines"])
            assert sampled == 6 * 32
            assert [name for name, _ in watcher.events[1:]] == ["frame"] * (len(watcher.events) - 1)
            watcher.close()


def test_a_key_sees_its_own_ids_and_a_stranger_nothing() -> None:
    with running_server(*MOCK, "--api-key", KEY, OTHER, "--mock-step-ms", "5", wait="/health") as server:
        assert server.ask("/debug/live").status == 401
        watchers = {key: Watcher(server, key) for key in (KEY, OTHER)}
        body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "request_id": "mine"}
        asked = {"authorization": f"Bearer {KEY}", "x-request-id": "mine"}
        assert server.ask("/v1/completions", body, **asked).status == 200

        def ids(key: str) -> set[Any]:
            return {one for frame in watchers[key].frames() for one in frame["engines"][0]["requests"]["id"]}

        wait_until(lambda: ids(KEY) == {"mine"} and ids(OTHER) == {None}, "the request in both streams")
        path = "/debug/requests/mine"
        answers = {key: server.ask(path, authorization=f"Bearer {key}") for key in (KEY, OTHER)}
        assert answers[OTHER].status == 404
        told = answers[KEY].json()
        assert told["watched"] and [one["what"] for one in told["events"]][:2] == ["arrived", "admitted"]
        for watcher in watchers.values():
            watcher.close()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_streams_go_on_while_the_server_drains(processes: str) -> None:
    with running_server(*MOCK, "--api-server-count", processes, "--mock-step-ms", "20") as server:
        watchers = [Watcher(server) for _ in range(4)]
        body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(server.ask("/v1/completions", body).status))
        asking.start()
        wait_until(
            lambda: all(any(e["what"] == "admitted" for e in one.told()) for one in watchers), "a running request"
        )
        server.signal(signal.SIGTERM)
        wait_until(lambda: all(one.events[-1][0] == "end" for one in watchers), "the ends of the streams")
        asking.join(PATIENCE)
        assert answers == [200]
        for watcher in watchers:
            left = [frame["draining"]["requests"] for frame in watcher.frames() if frame["draining"] is not None]
            assert left[0] == 1 and left[-1] == 0 and "shutting down" in watcher.events[-1][1]["reason"]
            watcher.close()


@pytest.mark.parametrize("through", ["server", "router", "router with a dead backend"])
def test_quire_top_once(through: str) -> None:
    with running_server(*MOCK, "--mock-step-ms", "2") as server:
        url, routing = server.url, None
        if through != "server":
            dead = ["--backend", DEAD] if "dead" in through else []
            flags = ["--backend", server.url, *dead, "--port", "0"]
            routing = subprocess.Popen(
                [sys.executable, "-m", "quire", "route", *flags], stderr=subprocess.PIPE, text=True
            )
            assert routing.stderr is not None
            line = next(line for line in routing.stderr if "listening on" in line)
            url = line.split("listening on ")[1].split()[0]
        try:
            server.complete()
            done = subprocess.run(
                [sys.executable, "-m", "quire", "top", "--once", "--url", url],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            assert done.returncode == 0, done.stderr
            assert "\x1b" not in done.stdout
            if "dead" in through:
                assert (
                    "2 backends, 1 down" in done.stdout and "127.0.0.1:9 " in done.stdout and "run wait" in done.stdout
                )
            else:
                assert "0 running of" in done.stdout and "first token" in done.stdout
        finally:
            if routing is not None:
                routing.terminate()
                routing.wait(PATIENCE)
