"""A file of requests in OpenAI's batch format. The server's ASGI application answers them in this process, without a
port. So decoders, limits and errors are those of the server.

Answers are appended to OUTPUT.partial as they come, so that an interrupted run can go on. At the end they are written
to the output in the order of the input. Memory holds the custom ids, the file offsets of their answers, and the
requests in flight; never the whole files.
"""

import asyncio
import fcntl
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.contracts.errors import ConfigError, EngineError, shown
from quire.entry.http.errors import json_fault

IN_FLIGHT = 256  # requests at once: enough to fill the engine's batch, few enough to keep in memory
RETRY_SECONDS = 0.5  # pause before a request is sent again that found the queue full
NO_ROOM, UNABLE = (408, 429, 529), 503
RESPONSES = "/v1/responses"
NULL = b"null"
App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


class _Elsewhere(msgspec.Struct):
    stream: Any = None
    background: Any = None


class Line(msgspec.Struct):
    """A line of the input file. `problem` is the message of its error; "" for a valid line."""

    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(NULL)
    problem: str = ""

    def check(self) -> str:
        """Return the line's problem; "" for none. Raises `msgspec.DecodeError` for a body that is not an object."""
        if not isinstance(self.custom_id, str) or not self.custom_id:
            return "custom_id must be a non-empty string"
        if self.method != "POST" or not isinstance(self.url, str):
            return 'method must be "POST", and url a path such as /v1/chat/completions'
        body = msgspec.json.decode(self.body, type=_Elsewhere)
        name = "stream" if body.stream else "background"
        return (
            f"body.{name} is set, and a batch has whole answers only: leave it out"
            if (body.stream or body.background)
            else ""
        )

    @property
    def id(self) -> str:
        """The id of the answer, a digest of the request: equal requests have equal ids."""
        asked = msgspec.json.encode((self.custom_id, self.url, bytes(self.body), self.problem))
        return f"batch_req_{hashlib.sha256(asked).hexdigest()[:24]}"


class Outcome(NamedTuple):
    """Summary of a batch's output file.

    answers     number of lines with an answer
    errors      number of lines with an error
    commonest   the most frequent error: its code, its count and an example; "" without errors
    """

    answers: int
    errors: int
    commonest: str


class Batch:
    """A run that answers the requests of an input file, and goes on where an interrupted run ended.

    total   number of valid requests in the input file
    done    number of these that have an answer
    """

    def __init__(self, source: Path, target: Path, most: int) -> None:
        """Read the input once, to check it. `most`: maximum bytes of a line, as of a server's request body.
        Raises `ConfigError` when a file cannot be used, or when two requests have the same custom_id."""
        if target.exists() and not target.is_file():
            raise ConfigError(
                f"{target} is not a regular file, and the run replaces the output file at its end: choose another file."
            )
        target = target.resolve()  # a symbolic link is kept; the file it points to is replaced
        self._source, self._target, self._most = source, target, most
        self._partial = target.with_name(target.name + ".partial")
        names: dict[str, tuple[int, str]] = {}
        try:
            for number, line in self._lines():
                if not line.problem and (first := names.setdefault(line.custom_id, (number, line.id))[0]) != number:
                    raise ConfigError(
                        f"{source}: lines {first} and {number} have the same custom_id "
                        f"{shown(line.custom_id)}: give each line its own."
                    )
            self._file = self._partial.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._places = self._earlier(names)
        except BlockingIOError:
            raise ConfigError(
                f"{self._partial} is in use by another run: wait until it ends, or choose another output."
            ) from None
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}: choose another file.") from None
        self.total, self.done = len(names), len(self._places)

    async def run(self, app: App, report: Callable[[], None]) -> None:
        """Run all requests that have no answer. `report` is called after each answer.
        Raises `EngineError` when the engine has died. The answers up to then are kept."""

        async def answer(number: int, line: Line) -> None:
            status, headers, body = await ask(app, line)
            response = {
                "status_code": status,
                "request_id": "".join(headers["x-request-id"]),
                "body": msgspec.Raw(body),
            }
            response |= {"warnings": warnings} if (warnings := headers["x-quire-warning"]) else {}
            result = _result(line, response, msgspec.json.decode(body)["error"] if status >= 400 else None)
            self._places[line.custom_id] = self._file.seek(0, os.SEEK_END)
            self._file.write(result)
            self._file.flush()
            self.done += 1
            report()

        lines = self._lines()
        await all_at_once(((n, line) for n, line in lines if self._asks(line)), answer)

    def finish(self) -> Outcome:
        """Write the output in the order of the input, and delete the partial file."""
        new, answers = self._target.with_name(self._target.name + ".tmp"), 0
        kinds, examples = Counter[str](), dict[str, str]()
        with new.open("wb") as out:
            for number, line in self._lines():
                if line.problem:
                    data = _result(line, None, {"code": "invalid_line", "message": line.problem, "line": number})
                else:
                    self._file.seek(self._places[line.custom_id])
                    data = self._file.readline()
                if (error := msgspec.json.decode(data)["error"]) is None:
                    answers += 1
                else:
                    kind = str(error.get("code") or error.get("type"))
                    kinds[kind] += 1
                    examples.setdefault(kind, str(error.get("message")))
                out.write(data)
        os.replace(new, self._target)
        self._partial.unlink(missing_ok=True)
        commonest = "".join(
            f"{kind}, {count} of {kinds.total()} ({examples[kind]})" for kind, count in kinds.most_common(1)
        )
        return Outcome(answers, kinds.total(), commonest)

    def close(self) -> None:
        """Close the partial file, and delete it when it is empty."""
        empty = not self._file.tell()
        self._file.close()
        if empty:
            self._partial.unlink(missing_ok=True)

    def _earlier(self, names: dict[str, tuple[int, str]]) -> dict[str, int]:
        """Return the file offsets of the answers of earlier runs, by custom_id. An interrupted run left a partial file.
        A finished run left an output, which is copied: the input may have got more lines since."""
        over = not self._file.tell() and self._target.exists()
        try:
            places = dict(_answered(self._target if over else self._partial, names))
        except ConfigError:
            if over:
                self._partial.unlink()
            raise
        if over:
            with self._target.open("rb") as file:
                shutil.copyfileobj(file, self._file)
        return places

    def _lines(self) -> Iterator[tuple[int, Line]]:
        return read_lines(self._source, self._most)

    def _asks(self, line: Line) -> bool:
        return not line.problem and line.custom_id not in self._places


def read_lines(source: Path, most: int) -> Iterator[tuple[int, Line]]:
    """Yield every line of a file that is not empty, with its number. most: maximum bytes of a line"""
    with source.open("rb") as file:
        for number, data in enumerate(file, 1):
            if not data.strip():
                continue
            line = Line()
            try:
                line = msgspec.json.decode(data, type=Line)
                problem = (
                    f"the line has more than {most} bytes: send less, or set --max-body-bytes"
                    if len(data) > most
                    else line.check()
                )
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                problem = f"the line is not a request ({json_fault(error, data)})"
            line.problem = problem and f"line {number}: {problem}."
            yield number, line


async def all_at_once(lines: Iterator[tuple[int, Line]], answer: Callable[[int, Line], Awaitable[None]]) -> None:
    """Call `answer` with each line and its number, for up to `IN_FLIGHT` lines at once. Raises the first error."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def one(number: int, line: Line) -> None:
        try:
            await answer(number, line)
        finally:
            room.release()

    try:
        async with asyncio.TaskGroup() as tasks:
            for number, line in lines:
                await room.acquire()
                tasks.create_task(one(number, line))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _answered(path: Path, names: dict[str, tuple[int, str]]) -> Iterator[tuple[str, int]]:
    """Yield (custom_id, file offset) of the answers of an earlier run to the same requests.
    Server errors (status 500 or more) are left out, so that these requests run again. A last line that is incomplete is
    cut off. Raises `ConfigError` when the file holds something else."""
    place = 0
    if not path.exists():
        return
    with path.open("rb") as file:
        for data in file:
            if not data.endswith(b"\n"):
                os.truncate(path, place)
                return
            try:
                result = msgspec.json.decode(data)
                name, response = result["custom_id"], result["response"]
                same = name in names and names[name][1] == result["id"]
                if same and response is not None and response["status_code"] < 500:
                    yield name, place
            except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
                raise ConfigError(f"{path} exists and holds no answers of a batch: choose another file.") from None
            place += len(data)


async def ask(app: App, line: Line) -> tuple[int, dict[str, list[str]], bytes]:
    """Send the request of a line until there is room for it. Return the answer, as `_post` does. Raises `EngineError`
    when the engine is dead."""
    asked = bytes(line.body)
    if line.url == RESPONSES:  # do not store the response, unless the request says so
        given = msgspec.json.decode(asked, type=dict[str, msgspec.Raw])
        if bytes(given.get("store", NULL)) == NULL:
            asked = msgspec.json.encode(given | {"store": False})
    while True:
        status, headers, body = await _post(app, line.url, asked)
        if status == UNABLE:
            raise EngineError(msgspec.json.decode(body)["error"]["message"])
        if status not in NO_ROOM:
            return status, headers, body
        await asyncio.sleep(RETRY_SECONDS)


def _result(line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    name = line.custom_id if isinstance(line.custom_id, str) else None
    return msgspec.json.encode({"id": line.id, "custom_id": name, "response": response, "error": error}) + b"\n"


async def _post(app: App, path: str, body: bytes) -> tuple[int, dict[str, list[str]], bytes]:
    """Call the application. Return the status, the headers x-request-id and x-quire-warning, and the body."""
    answer: list[Any] = []
    asked = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        return asked.pop() if asked else await asyncio.Event().wait()  # the client never disconnects

    async def send(message: Any) -> None:
        answer.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    headers = {
        name: [value.decode() for key, value in answer[0]["headers"] if key == name.encode()]
        for name in ("x-request-id", "x-quire-warning")
    }
    return answer[0]["status"], headers, b"".join(message.get("body", b"") for message in answer[1:])
