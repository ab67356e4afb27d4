"""`quire chat --url` and `quire complete --url`: the same commands with a server instead of a model in this process.

Speaks OpenAI's API over HTTP with the standard library: streams of server-sent events, errors as JSON. Works with any
server of that API.
"""

import argparse
import http.client
import json
import socket
import ssl
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from quire import __version__
from quire.config.env import client_key
from quire.config.flags import FlagParser
from quire.config.sources import FLAG, ORIGIN
from quire.contracts.errors import ConfigError, EngineDead, ModelNotFound, QuireError, RequestFailed
from quire.entry.cli.answer import AnswerPiece

CONNECT_SECONDS = 10.0
MAX_ERROR_BYTES = 1 << 20
DONE = "[DONE]"
V1 = "/v1/"
BROKEN = (OSError, http.client.HTTPException)  # raised when a connection fails
COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"


def add_remote_flags(parser: FlagParser) -> None:
    """Add --url and the flags that belong to it."""
    group = parser.add_argument_group("Ask a server instead of loading a model here")
    group.add_argument("--url", metavar="URL", help="the server: http://host:8000, with or without /v1")
    group.add_argument("--api-key", metavar="KEY", help="API key (default: $QUIRE_API_KEY or $OPENAI_API_KEY)")
    group.add_argument("--model-name", metavar="NAME", help="model to use (default: the first of the server's list)")


def remote_model(args: argparse.Namespace) -> "RemoteModel | None":
    """Return the model that the flags name on the server at --url; None without --url. Raises `QuireError`."""
    if args.url is None:
        if args.api_key is not None or args.model_name is not None:
            raise ConfigError("--api-key and --model-name go with --url: add --url, or leave them out.")
        return None
    given = vars(args)
    refuse_engine_flags(given, but=f"{ORIGIN}model")
    name = args.model_name or given.get("model_argument") or given.get(f"{FLAG}model")
    return RemoteModel(args.url, key=args.api_key or client_key(), name=name)


def refuse_engine_flags(given: Mapping[str, Any], but: str = "") -> None:
    """Raise `ConfigError` when flags of an engine stand beside --url. but: place of the one that may"""
    useless = [flag for place, flag in given.items() if place.startswith(ORIGIN) and place != but]
    if useless:
        raise ConfigError(f"{', '.join(useless)}: with --url the server has its own options: leave these flags out.")


class RemoteServer:
    """A server that speaks HTTP, at a URL with or without /v1. key: API key to send; None: none."""

    def __init__(self, url: str, key: str | None) -> None:
        self._scheme, self._host, self._port, self._base = _split(url)
        self._key = key

    @property
    def where(self) -> str:
        """The server's address, as users type it."""
        return f"{self._scheme}://{self._host}:{self._port}"

    @contextmanager
    def asked(
        self, method: str, path: str, body: Any = None, *, silence: float | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send one request and give its response. Every failure becomes a `QuireError` of one line.
        Without `silence` there is a time limit for the connection only, since a model may take long."""
        headers = {"User-Agent": f"quire/{__version__}", "Accept": "application/json, text/event-stream"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        kind = http.client.HTTPSConnection if self._scheme == "https" else http.client.HTTPConnection
        try:
            connection = kind(self._host, self._port, timeout=CONNECT_SECONDS)
        except http.client.InvalidURL as error:
            raise ConfigError(f"{self.where}: {error}.") from None
        with closing(connection):
            try:
                connection.connect()
                connection.sock.settimeout(silence)
                connection.request(method, self._base + path, None if body is None else json.dumps(body), headers)
                response = connection.getresponse()
            except (*BROKEN, UnicodeError) as error:
                raise _unreachable(error, self.where) from None
            if response.status != http.client.OK:
                try:
                    raise _refusal(response, self.where, path)
                except BROKEN as error:
                    raise _broken_off(error, self.where) from None
            yield response

    def read(self, path: str) -> bytes:
        """Return the body of the answer to GET. Raises `QuireError`."""
        with self.asked("GET", path) as response:
            try:
                return response.read()
            except BROKEN as error:
                raise _broken_off(error, self.where) from None

    def events(self, path: str, silence: float | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the data of every event of a stream, until its end. Raises `QuireError`.
        silence: seconds to wait for an answer and for each of its parts; None: no limit"""
        with self.asked("GET", path, silence=silence) as response:
            for name, data in _events(response, self.where):
                yield name, _json(data.encode(), self.where)


class RemoteModel:
    """A model on a server. `fields`, an argument of its methods, has the sampling parameters: JSON name -> value."""

    def __init__(self, url: str, *, key: str | None, name: str | None) -> None:
        self._server = RemoteServer(url, key)
        self.name = name or self._first_model()

    def stream(self, prompt: str, fields: Mapping[str, Any]) -> Iterator[AnswerPiece]:
        """Send a prompt to the server and yield the new pieces of the text that continues it."""
        return self._stream(COMPLETIONS, {"prompt": prompt, **fields})

    def stream_chat(self, messages: list[dict[str, Any]], fields: Mapping[str, Any]) -> Iterator[AnswerPiece]:
        """Send a conversation to the server and yield the new pieces of its answer."""
        return self._stream(CHAT, {"messages": messages, **fields})

    def _first_model(self) -> str:
        found = _json(self._server.read(MODELS), self._server.where)
        models = found.get("data") or []
        if not models or not isinstance(models[0], dict) or "id" not in models[0]:
            raise ModelNotFound(f"{self._server.where} lists no model: name a model with --model-name.")
        return str(models[0]["id"])

    def _stream(self, path: str, fields: Mapping[str, Any]) -> Generator[AnswerPiece, None, None]:
        body = {"model": self.name, **fields, "stream": True, "stream_options": {"include_usage": True}}
        with self._server.asked("POST", path, body) as response:
            ended, reason = False, None
            for _, data in _events(response, self._server.where):
                if data == DONE:
                    ended = True
                    break
                event = _json(data.encode(), self._server.where)
                if "error" in event:
                    raise RequestFailed(f"{self._server.where} answered: {_words(event)}", code="remote")
                for choice in event.get("choices") or []:
                    reason = choice.get("finish_reason") or reason
                    text = _text(choice)
                    yield AnswerPiece(text=text, num_tokens=1 if text else 0, reason=reason)
                if usage := event.get("usage"):
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                    yield AnswerPiece(
                        num_prompt=usage.get("prompt_tokens"), total=usage.get("completion_tokens"), num_cached=cached
                    )
            if not ended and reason is None:
                raise EngineDead(
                    f"the answer of {self._server.where} broke off: the server or network failed. Ask again."
                )


def _split(url: str) -> tuple[str, str, int, str]:
    """Split a URL into (scheme, host, port, path without /v1)."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}.") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"--url {url}: must be like http://localhost:8000.")
    path = parts.path.rstrip("/")
    default = 443 if parts.scheme == "https" else 80
    return parts.scheme, host, port or default, path.removesuffix("/v1")


def _unreachable(error: Exception, where: str) -> QuireError:
    if isinstance(error, ConnectionRefusedError):
        return EngineDead(f"no server listens at {where}: start `quire serve`, or correct --url.")
    if isinstance(error, socket.gaierror):
        return ConfigError(f"{where}: the host has no address ({error.strerror}): correct --url.")
    if isinstance(error, TimeoutError):
        return EngineDead(
            f"{where} did not accept the connection within {CONNECT_SECONDS:g} s: check --url and the network."
        )
    if isinstance(error, ssl.SSLError):
        return EngineDead(f"{where}: no secure connection ({error.reason or error}): is it an https server?")
    if isinstance(error, UnicodeError):
        return ConfigError("--api-key: the key must be printable ASCII.")
    return EngineDead(f"{where} closed the connection ({type(error).__name__}): is it an HTTP server?")


def _broken_off(error: Exception, where: str) -> QuireError:
    return EngineDead(f"the answer of {where} broke off ({type(error).__name__}): ask again.")


def _refusal(response: http.client.HTTPResponse, where: str, path: str) -> QuireError:
    body = response.read(MAX_ERROR_BYTES)
    try:
        words = _words(json.loads(body))
    except (UnicodeDecodeError, json.JSONDecodeError):
        words = response.reason or ""
    said = f"{where} answered {response.status}: {words}"
    if response.status in (401, 403):
        return ConfigError(f"{said} Give the key with --api-key, or in QUIRE_API_KEY.")
    if response.status == 404 and not path.startswith(V1):
        question = " Is it a server or a router of Quire?" * all(one not in words for one in ("--no-web", "/debug/"))
        return RequestFailed(said + question, code="remote")
    if response.status == 404:
        return ModelNotFound(
            f"{said} See {where}{MODELS} for its models, and check --url."
            if path != MODELS
            else f"{said} There is no OpenAI API at this --url."
        )
    return RequestFailed(said, code="remote")


def _words(answer: Any) -> str:
    """Return the message of an error response in any of the usual JSON shapes."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return str(message or "no reason given")


def _json(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError):
        value = None
    if not isinstance(value, dict):
        raise EngineDead(f"the answer of {where} is not a JSON object: check that --url is an OpenAI API.")
    return value


def _events(response: http.client.HTTPResponse, where: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the data of every server-sent event. Comments and other fields are left out."""
    name, lines = "", list[str]()
    try:
        for raw in response:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            if line.startswith("data:"):
                lines.append(line[5:].removeprefix(" "))
            elif line.startswith("event:"):
                name = line[6:].removeprefix(" ")
            elif not line and lines:
                yield name, "\n".join(lines)
                name, lines = "", []
    except BROKEN as error:
        raise _broken_off(error, where) from None


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return str(choice.get("text") or delta.get("content") or "")
