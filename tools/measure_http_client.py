"""Many event streams read by one cheap loop, so that what a server costs can be measured beside its client.

A process of its own (`measure_http.py` starts it): counts events and times first ones, and decodes nothing. Speaks
just enough HTTP/1.1 for the server measured: one POST per connection at a time, a chunked answer.
"""

import json
import re
import resource
import selectors
import socket
import sys
from time import perf_counter
from typing import Any

from process_time import cpu_seconds

GOOD, EVENT, END = b"HTTP/1.1 200", b"\ndata: ", b"0\r\n\r\n"
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
USAGE_REACH = 1000  # bytes before the end of an answer that hold its usage
SILENCE = 60.0  # seconds without a byte from anybody after which the run has failed


class Stream:
    """A connection that sends the same request `repeat` times, one after the other."""

    def __init__(self, address: tuple[str, int], request: bytes, repeat: int) -> None:
        self.first_s: list[float] = []  # seconds to each first event
        self.whole_s: list[float] = []
        self.num_events = self.num_tokens = 0
        self._request, self._left = request, repeat
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self) -> None:
        """Send the request."""
        self._tail, self._recent, self._begun, self._left = b"", b"", False, self._left - 1
        self._started = perf_counter()
        self.socket.sendall(self._request)

    def read(self) -> bool:
        """Take what has come; returns whether the last answer is complete. Raises ConnectionError when it cannot be."""
        new = self.socket.recv(1 << 18)
        if not new:
            raise ConnectionError("the server closed the connection")
        data = self._tail + new
        self._recent = (self._recent + new)[-USAGE_REACH:]
        if not self._begun:
            if not data.startswith(GOOD[: len(data)]):
                raise ConnectionError(data[:200].decode(errors="replace"))
            if EVENT not in data:
                self._tail = data
                return False
            self.first_s.append(perf_counter() - self._started)
            self._begun = True
        self.num_events += data.count(EVENT)
        if data.endswith(END):
            self.whole_s.append(perf_counter() - self._started)
            self.num_events -= 2  # the usage and [DONE]
            usage = USAGE.findall(self._recent)
            self.num_tokens += int(usage[-1]) if usage else 0
            if not self._left:
                return True
            self.ask()
            return False
        self._tail = data[1 - len(EVENT) :]
        return False


def drive(task: dict[str, Any]) -> dict[str, Any]:
    """Run `streams` connections, each asking `body` `repeat` times; returns counts, times and own processor time.

    With "pid", also that process's CPU seconds and the events between the moment when every stream had begun and the
    end: what a stream costs while it runs, without what it costs to begin.
    """
    body = json.dumps(task["body"]).encode()
    head = f"POST {task['path']} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    streams = [Stream(("127.0.0.1", task["port"]), request, task["repeat"]) for _ in range(task["streams"])]
    selector = selectors.DefaultSelector()
    for stream in streams:
        selector.register(stream.socket, selectors.EVENT_READ, stream)
    started = perf_counter()
    for stream in streams:
        stream.ask()
    left, steady, not_begun = len(streams), (0.0, 0), set(streams) if "pid" in task else set()
    while left:
        ready = selector.select(SILENCE)
        if not ready:
            raise TimeoutError(f"{left} streams are silent for {SILENCE:.0f} s")
        for key, _ in ready:
            if key.data.read():
                selector.unregister(key.data.socket)
                key.data.socket.close()
                left -= 1
            if not_begun and key.data.num_events:
                not_begun.discard(key.data)
                if not not_begun:
                    steady = _standing(task["pid"], streams)
    last = _standing(task["pid"], streams) if "pid" in task else (0.0, 0)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": perf_counter() - started,
        "events": sum(stream.num_events for stream in streams),
        "tokens": sum(stream.num_tokens for stream in streams),
        "first_s": sorted(seconds for stream in streams for seconds in stream.first_s),
        "whole_s": sorted(seconds for stream in streams for seconds in stream.whole_s),
        "cpu_s": used.ru_utime + used.ru_stime,
        "steady_server_cpu_s": last[0] - steady[0],
        "steady_events": last[1] - steady[1],
    }


def _standing(pid: int, streams: list[Stream]) -> tuple[float, int]:
    """(CPU seconds of a process so far, events so far)."""
    used = cpu_seconds(pid)
    if used is None:
        raise OSError("processor time of another process is known only where there is /proc, while it runs")
    return used, sum(stream.num_events for stream in streams)


def main() -> None:
    """Read a task from standard input, print the result, or {"error": ...}, both as JSON."""
    try:
        result = drive(json.load(sys.stdin))
    except (OSError, TimeoutError) as error:
        result = {"error": str(error)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
