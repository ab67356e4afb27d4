"""Client that times streamed requests to an OpenAI-compatible server. Knows nothing of arrival rates."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from quire.bench.serve_load import Ask
from quire.contracts.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

DONE = b"[DONE]"
MAX_ERROR_BYTES, MAX_SENTENCE = 1 << 20, 500


@dataclass(kw_only=True)
class Record:
    """Record of one request. Times are seconds on a monotonic clock.

    late         seconds from the request's arrival time until the client sent it
    started, first, ended   times when the request was sent, when the first event with text came, and of the end
    gaps         seconds between successive events with text
    num_output   output tokens by the server's count; if it sent no count, the number of events (`counted` is False)
    error        short kind of the error; None: no error
    said         message of the error, from the server if it sent one
    """

    started: float
    late: float = 0.0
    first: float | None = None
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_events: int = 0
    num_input: int = 0
    num_output: int = 0
    counted: bool = False
    error: str | None = None
    said: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_token(self) -> bool:
        """Return True if the choice has text or tool calls, not only a role. It is always True for text completions."""
        d = self.delta
        return d is None or bool(d.content or d.reasoning or d.reasoning_content or d.tool_calls)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server to measure and the format of the requests.

    chat       True: requests are chat messages; False: text completions
    extra      fields that are merged into every request body
    timeout    seconds for a whole request
    insecure   True: do not verify the TLS certificate
    """

    base_url: str
    endpoint: str
    model: str
    chat: bool
    headers: dict[str, str]
    extra: dict[str, Any]
    timeout: float = 6 * 3600.0
    insecure: bool = False

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the JSON body of a request."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            given = isinstance(ask.prompt, list)
            body["messages"] = ask.prompt if given else [{"role": "user", "content": ask.prompt}]
            body["max_completion_tokens"] = ask.max_tokens
        else:
            body |= {"prompt": ask.prompt, "max_tokens": ask.max_tokens}
        return body | self.extra


class Client:
    """HTTP client with one connection per concurrent request; an async context manager.
    Raises `ConfigError` when aiohttp, the client library of the `bench` extra, is not installed."""

    def __init__(self, target: Target) -> None:
        try:
            import aiohttp
        except ImportError:
            raise ConfigError(
                "`quire bench serve` needs aiohttp: run "
                "`pip install '.[bench]'` in Quire's folder, or `pip install aiohttp`."
            ) from None
        self.target = target
        self._library, self._errors = aiohttp, aiohttp.ClientError

    async def __aenter__(self) -> "Client":
        target, library = self.target, self._library
        self._session = library.ClientSession(
            headers={"Content-Type": "application/json", **target.headers},
            connector=library.TCPConnector(limit=0, ssl=not target.insecure),
            timeout=library.ClientTimeout(total=target.timeout, sock_connect=30),
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """Return the name of the first model that the server lists. Raises `ConfigError` if it lists none."""
        url = f"{self.target.base_url}/v1/models"
        try:
            async with self._session.get(url) as response:
                if response.status != 200:
                    said = _sentence(await response.read()) or "name the model with --model."
                    raise ConfigError(f"{url} answers {response.status}: {said}")
                listed = await response.json(content_type=None)
                return str(listed["data"][0]["id"])
        except (self._errors, TimeoutError, OSError) as error:
            raise ConfigError(_unreachable(error, self.target.base_url)) from None
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"{url} lists no model: name a model with --model.") from None

    async def send(self, ask: Ask, late: float = 0.0) -> Record:
        """Run one request to its end. Server errors are not raised but kept in `Record.error`. `late`: see `Record`."""
        target = self.target
        body = msgspec.json.encode(target.body(ask))
        record = Record(started=perf_counter(), late=late)
        try:
            async with self._session.post(target.base_url + target.endpoint, data=body) as response:
                if response.status != 200:
                    record.error, record.said = f"HTTP {response.status}", _sentence(await response.read())
                else:
                    await _read(response.content, record)
        except TimeoutError:
            record.error = "timeout"
        except (self._errors, OSError) as error:
            record.error, record.said = type(error).__name__, _unreachable(error, target.base_url)
        except msgspec.MsgspecError:
            record.error = "invalid event"
        record.ended = perf_counter()
        if not record.counted:
            record.num_output = record.num_events
        return record


async def _read(content: "aiohttp.StreamReader", record: Record) -> None:
    rest, last, finished = b"", record.started, False
    async for chunk in content.iter_any():
        now = perf_counter()
        *events, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            data = event.partition(b"data:")[2].strip()
            if not data:
                continue  # a comment that keeps the connection alive
            if data == DONE:
                finished = True
            elif _note(_DECODER.decode(data), record):
                if record.first is None:
                    record.first = now
                else:
                    record.gaps.append(now - last)
                last = now
                record.num_events += 1
    if not finished and record.error is None:
        record.error = "the stream broke off"


def _note(event: _Event, record: Record) -> bool:
    """Record an event's usage and error. Return True if the event has tokens."""
    if event.error is not None:
        kind = event.error.get("type") if isinstance(event.error, dict) else None
        record.error, record.said = f"error event {kind or ''}".strip(), _message(event.error)
    if event.usage is not None:
        record.counted = True
        record.num_input, record.num_output = event.usage.prompt_tokens, event.usage.completion_tokens
    for choice in event.choices:
        if choice.has_token():
            return True
    return False


def _unreachable(error: Exception, where: str) -> str:
    """Return the message of a failed connection."""
    cause = error.__cause__ or error
    if isinstance(error, ConnectionRefusedError) or isinstance(cause, ConnectionRefusedError):
        return f"no server listens at {where}: start `quire serve`, or correct --base-url."
    return f"{where} cannot be reached ({type(error).__name__}: {error}): correct --base-url."


def _sentence(body: bytes) -> str:
    """Return the message of an error response; "" if it has none."""
    try:
        answer = msgspec.json.decode(body[:MAX_ERROR_BYTES])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return _message(answer.get("error", answer) if isinstance(answer, dict) else answer)


def _message(error: Any) -> str:
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return " ".join(str(message or "").split())[:MAX_SENTENCE]
