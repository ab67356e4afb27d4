"""Rendering where it can be stopped: child processes with little memory and little time, for templates that a request
brings and for whatever `sandbox_meter` gave up. What goes wrong there ends as an error of that request alone.

Knows processes and limits, nothing of templates; `sandbox_child` is the other end of the pipes. A child is started when
one is first needed, serves one rendering after the other, and is killed by the first that does not end well.
"""

import marshal
import math
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from quire.contracts.errors import InvalidParameter, RequestFailed
from quire.text.children import Child, Children

MOST_TEXT = 16 * 2**20  # bytes of a prompt; twice the largest body
CHILD = "quire.text.sandbox_child"
READY = b"ready 0\n"


class TextTooLong(InvalidParameter):
    """A prompt of more than MOST_TEXT bytes."""


class Sandbox:
    """Renders in children, as many at once as there are callers; from any thread.

    seconds   that a rendering may take;  memory  bytes of address space of a child, of which Python takes some 30 M
    """

    def __init__(self, seconds: float = 5.0, memory: int = 512 * 2**20) -> None:
        self._seconds, self._memory = seconds, memory
        self._children = Children()

    def render(self, template: tuple[Any, ...], arguments: tuple[Any, ...], param: str,
               over: Future[None] | None = None) -> str:
        """What a template makes of arguments; both go as they are to `sandbox_child.render`. `over` ends it when done.

        Errors: `InvalidParameter`: what the child says, or that a limit was met, of `param`; `RequestFailed`;
        `EngineClosed` after `close`.
        """
        job, over = marshal.dumps((marshal.dumps(template), arguments)), over or Future()
        status, used, began = "dead", True, time.monotonic()
        while status == "dead" and used and not over.done():
            (child, used), began = self._take(), time.monotonic()
            status, text = self._run(child, job, over)
            used &= time.monotonic() - began < self._seconds  # who killed it may have meant what it did before
        if status == "text":
            return text
        if status == "refused":
            named, _, message = text.partition("\n")
            raise InvalidParameter(message, param=named or param)
        limit = f"made more than {MOST_TEXT >> 20} MiB of text" if status == "long" else (
            f"took more than {self._seconds:g} s" if time.monotonic() - began >= self._seconds
            else f"took more than {self._memory >> 20} MiB of memory")
        raise (TextTooLong if status == "long" else InvalidParameter)(
            f"rendering the chat template {limit} and was ended: send less, or use a simpler template.", param=param)

    def close(self) -> None:
        """End the children, and start none any more; idempotent."""
        self._children.close()

    def _run(self, child: Child, job: bytes, over: Future[None]) -> tuple[str, str]:
        """`_ask` until time is up or it is over; a child that does not answer well is ended."""
        answered = False

        def stop(over: object = None) -> None:
            if not answered:
                child.kill()

        timer = threading.Timer(self._seconds, stop)
        timer.start()
        over.add_done_callback(stop)
        status, text = _ask(child, job)
        answered = True
        timer.cancel()
        (self._children.give if status in ("text", "refused") else self._children.end)(child)
        return status, text

    def _take(self) -> tuple[Child, bool]:
        """A child, and whether it has rendered before."""
        child, used = self._children.take("-m", CHILD, str(math.ceil(self._seconds) + 1), str(self._memory))
        assert child.stdout is not None
        if not used and child.stdout.readline() != READY:
            self._children.end(child)
            raise RequestFailed("the process for chat templates cannot be started; the log says more.", code="sandbox")
        return child, used


def _ask(child: Child, job: bytes) -> tuple[str, str]:
    """(how it ended, text); "dead" when there is no whole answer."""
    assert child.stdin is not None and child.stdout is not None
    with suppress(OSError, ValueError):
        child.stdin.write(len(job).to_bytes(8) + job)
        child.stdin.flush()
        status, size = child.stdout.readline(40).decode().split()
        data = child.stdout.read(min(int(size), MOST_TEXT))
        if len(data) == int(size):
            return status, data.decode("utf-8", "surrogatepass")
    return "dead", ""
