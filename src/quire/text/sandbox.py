"""Rendering of chat templates in child processes with limits of memory and time.

It serves templates of requests, and renderings that are too costly for `sandbox_meter`. A failure there fails only that
request. Knows processes and limits, nothing of templates; `sandbox_child` is the other end of the pipes. A child is
started on demand, renders one template after the other, and is killed after a rendering that it did not finish.
"""

import marshal
import math
import threading
import time
from concurrent.futures import Future
from typing import Any

from quire.contracts.errors import InvalidParameter, RequestFailed
from quire.text.children import Child, Children, ask, receive

MOST_TEXT = 16 * 2**20  # bytes of a rendered prompt; twice the largest request body
CHILD = "quire.text.sandbox_child"
READY = b"ready"


class TextTooLong(InvalidParameter):
    """The rendered prompt has more than MOST_TEXT bytes."""


class Sandbox:
    """Renderer of chat templates in child processes. Each call of `render` has a child to itself; any thread may call.

    seconds   limit of a rendering
    memory    limit of a child's address space in bytes, of which Python takes some 30 M
    """

    def __init__(self, seconds: float = 5.0, memory: int = 512 * 2**20) -> None:
        self._seconds, self._memory = seconds, memory
        self._children = Children()

    def render(
        self, template: tuple[Any, ...], arguments: tuple[Any, ...], param: str, over: Future[None] | None = None
    ) -> str:
        """Render a template. `template` and `arguments` are passed to `sandbox_child.render`.
        `over`: future; when it is done, the child is killed. Raises `InvalidParameter` with the child's message, or for
        `param` when a limit was reached; `RequestFailed` when no child can be started; `EngineClosed` after `close`."""
        job, over = marshal.dumps((marshal.dumps(template), arguments)), over or Future()
        status, used, began = "dead", True, time.monotonic()
        while status == "dead" and used and not over.done():
            (child, used), began = self._take(), time.monotonic()
            status, text = self._run(child, job, over)
            used &= time.monotonic() - began < self._seconds  # died early: an earlier job's timer may have killed it
        if status == "text":
            return text
        if status == "refused":
            named, _, message = text.partition("\n")
            raise InvalidParameter(message, param=named or param)
        limit = (
            f"made more than {MOST_TEXT >> 20} MiB of text"
            if status == "long"
            else (
                f"took more than {self._seconds:g} s"
                if time.monotonic() - began >= self._seconds
                else f"took more than {self._memory >> 20} MiB of memory"
            )
        )
        raise (TextTooLong if status == "long" else InvalidParameter)(
            f"rendering the chat template {limit} and was ended: send less, or use a simpler template.", param=param
        )

    def close(self) -> None:
        """Kill the child processes, and start no more; idempotent."""
        self._children.close()

    def _run(self, child: Child, job: bytes, over: Future[None]) -> tuple[str, str]:
        """Run a job until it ends, until the time limit, or until `over`. Kill the child if it does not answer well."""
        answered = False

        def stop(over: object = None) -> None:
            if not answered:
                child.kill()

        timer = threading.Timer(self._seconds, stop)
        timer.start()
        over.add_done_callback(stop)
        answer = ask(child, job, MOST_TEXT + len("text\n"))
        answered = True
        timer.cancel()
        status, _, text = answer.decode("utf-8", "surrogatepass").partition("\n")
        (self._children.give if status in ("text", "refused") else self._children.end)(child)
        return status or "dead", text

    def _take(self) -> tuple[Child, bool]:
        """Return a child, and True if it has rendered before."""
        child, used = self._children.take("-m", CHILD, str(math.ceil(self._seconds) + 1), str(self._memory))
        assert child.stdout is not None
        if not used and receive(child.stdout, len(READY)) != READY:
            self._children.end(child)
            raise RequestFailed(
                "the process for chat templates cannot be started: see the server's log.", code="sandbox"
            )
        return child, used
