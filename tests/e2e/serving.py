"""A server as a child process, for tests: started on a free port, watched, and gone at the end.

Servers and their children are copies of a process that has imported torch (`tests/support/template_process.py`), but
for those with `TEMPLATE_PROCESS="0"` in their environment.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..support import template_process

SOURCE = Path(__file__).resolve().parents[2] / "src"
PATIENCE = 60.0  # seconds after which a test gives up; nothing here waits so long unless something is broken
MOCK = ("--device", "mock")


@dataclass
class Answer:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The events of a stream: JSON values, "[DONE]" as a string; comments are left out."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def text(self) -> str:
        """Return the joined text of the events of a completion stream."""
        return "".join(
            choice["text"] for event in self.events() if isinstance(event, dict) for choice in event.get("choices", ())
        )

    def error(self) -> dict[str, Any] | None:
        """The error event of a stream, which must be the last but [DONE]; None without one."""
        *before, last, done = self.events()
        assert done == "[DONE]" and not any(isinstance(event, dict) and "error" in event for event in before)
        found: dict[str, Any] | None = last.get("error")
        return found


@dataclass
class Server:
    """A running `quire serve`."""

    process: "subprocess.Popen[bytes]"
    log: Path
    url: str = ""

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return int(self.url.rpartition(":")[2])

    @property
    def stderr(self) -> str:
        """The text that the server has printed so far."""
        return self.log.read_text()

    @property
    def core_pid(self) -> int:
        """The process of its engine."""
        (child,) = children(self.process.pid)
        return child

    def ask(self, path: str, body: object = None, method: str | None = None, **headers: str) -> Answer:
        """Send a request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            data = None if body is None else json.dumps(body).encode()
            kind = {} if data is None else {"content-type": "application/json"}
            connection.request(method or ("GET" if data is None else "POST"), path, data, kind | headers)
            response = connection.getresponse()
            read = response.read()
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, read)
        finally:
            connection.close()

    def complete(self, prompt: Any = "Once", **fields: Any) -> Answer:
        """A streamed completion, read to its end; 32 tokens unless told otherwise."""
        asked = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True} | fields
        return self.ask("/v1/completions", asked)

    def metric(self, name: str) -> dict[str, float]:
        """The samples of one metric, by their labels as text."""
        lines = self.ask("/metrics").body.decode().splitlines()
        samples = [line.rpartition(" ") for line in lines if line.partition("{")[0] == name]
        return {labels: float(value) for labels, _, value in samples}

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server."""
        self.process.send_signal(number)

    def exit_code(self) -> int:
        """Wait for its end."""
        return self.process.wait(PATIENCE)


def wait_until(condition: Callable[[], bool], what: str = "") -> None:
    """Poll until a condition holds; fails after a long time."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """The processes that a process has started and that still run."""
    names = "pid=,ppid=,state=,comm="
    shown = subprocess.run(["ps", "-A", "-o", names], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=3) for line in shown.splitlines()]
    return [
        int(child)
        for child, parent, state, name in rows
        if int(parent) == pid and state[0] != "Z" and name != template_process.NAME
    ]


def is_running(pid: int) -> bool:
    """Return True if a process exists and is no zombie."""
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and state[0] != "Z"


@contextlib.contextmanager
def running_server(*flags: str, wait: str = "/ready", command: str = "serve", **environment: str) -> Iterator[Server]:
    """`quire serve`, or another command, with these flags on a free port, until the block ends.

    wait          a path that must answer 200 first; "/live": the port answers, the engine may still be loading;
                  "": nothing
    environment   variables beside the test's own
    """
    with tempfile.TemporaryDirectory(prefix="quire-test-") as folder:
        log = Path(folder, "stderr")
        with log.open("wb") as stderr:
            process = template_process.start(
                ["-m", "quire", command, "--port", "0", *flags],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": str(SOURCE), "TMPDIR": folder} | environment,
            )
        server = Server(process, log)
        try:
            if wait:
                _await_answer(server, wait)
            yield server
        finally:
            orphans = [] if process.poll() is not None else children(process.pid)
            _end(process)
            for pid in orphans:
                wait_until(lambda pid=pid: not is_running(pid), "the end of the engine's process")


def _await_answer(server: Server, path: str) -> None:
    def answers() -> bool:
        assert server.process.poll() is None, f"the server ended with {server.process.returncode}:\n{server.stderr}"
        if not server.url:
            found = re.findall(r"istening on (http://\S+)", server.stderr)
            server.url = found[0] if found else ""
        return bool(server.url) and server.ask(path).status == 200

    wait_until(answers, f"{path} of {server.stderr}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError("the server did not end after two SIGTERM") from None
