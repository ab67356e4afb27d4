"""`quire chat --url` and `quire complete --url` against a server of ten lines: what is sent, printed, and said when
something goes wrong."""

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.config import env
from quire.entry.cli.main import main

from ...support.addresses import free_port

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}


def event(value: object) -> str:
    return f"data: {json.dumps(value) if value != '[DONE]' else value}\n\n"


def text_stream(*words: str, reason: str = "stop") -> str:
    chunks = [{"choices": [{"index": 0, "text": word, "finish_reason": None}]} for word in words]
    chunks += [{"choices": [{"index": 0, "text": "", "finish_reason": reason}]}, {"choices": [], "usage": USAGE}]
    return ": keep-alive\n\n" + "".join(map(event, [*chunks, "[DONE]"]))


def chat_stream(*words: str) -> str:
    deltas = [{"role": "assistant", "content": ""}, *({"content": word} for word in words), {}]
    return "".join(
        map(
            event,
            [
                *({"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas),
                {"choices": [], "usage": USAGE},
                "[DONE]",
            ],
        )
    )


@dataclass
class Served:
    """Answers of the server to a POST (status, body), and the requests that it got: (path, headers, body)."""

    url: str = ""
    answers: list[tuple[int, str]] = field(default_factory=list)
    models: tuple[int, str] = (200, json.dumps({"data": [{"id": "some-model"}, {"id": "other"}]}))
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    for name in ("QUIRE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    state = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(*state.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            self.reply(*state.answers.pop(0))

        def reply(self, status: int, body: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("shape", ["{}", "{}/", "{}/v1", "{}/v1/"])
def test_a_completion(served: Served, shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    served.answers = [(200, text_stream("one", " twö", " three"))]
    assert main(["complete", "--url", shape.format(served.url), "-p", "hi", "--temperature", "0.5", "--stop", "x"]) == 0
    out, err = capsys.readouterr()
    assert out == "one twö three\n"
    assert err.startswith("quire: prompt 7 tokens (4 cached), answer 3 tokens in ") and "first after" in err
    ((path, headers, body),) = served.asked
    assert path == "/v1/completions" and "authorization" not in headers
    assert body == {
        "model": "some-model",
        "prompt": "hi",
        "temperature": 0.5,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_the_scheme_may_be_left_out(served: Served) -> None:
    served.answers = [(200, text_stream("a"))]
    assert main(["complete", "--url", served.url.removeprefix("http://"), "-p", "hi"]) == 0


def test_a_conversation(served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    lines = ["a", "b"]
    monkeypatch.setattr(builtins, "input", lambda prompt="": lines.pop(0) if lines else _end())
    served.answers = [(200, chat_stream("one", " two")), (200, chat_stream("three"))]
    assert main(["chat", "--url", served.url, "--model-name", "m", "--system-prompt", "s", "--no-stats"]) == 0
    assert capsys.readouterr().out == "one two\nthree\n"
    path, _, body = served.asked[1]
    assert path == "/v1/chat/completions" and body["model"] == "m"
    assert body["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one two"},
        {"role": "user", "content": "b"},
    ]


def _end() -> str:
    raise EOFError


@pytest.mark.parametrize(
    ("args", "variables", "key"),
    [
        (["--api-key", "given"], {"QUIRE_API_KEY": "ours"}, "Bearer given"),
        ([], {"QUIRE_API_KEY": "ours", "OPENAI_API_KEY": "theirs"}, "Bearer ours"),
        ([], {"OPENAI_API_KEY": "theirs"}, "Bearer theirs"),
    ],
)
def test_keys(
    served: Served, monkeypatch: pytest.MonkeyPatch, args: list[str], variables: dict[str, str], key: str
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    served.answers = [(200, text_stream("a"))]
    assert main(["complete", "--url", served.url, "-p", "hi", *args]) == 0
    assert served.asked[0][1]["authorization"] == key
    assert env.client_key() in (None, "ours", "theirs")


def error(message: str) -> str:
    return json.dumps({"error": {"message": message, "type": "t", "param": None, "code": None}})


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ((401, error("no key.")), 3, "answered 401: no key. Give the key with --api-key"),
        ((404, error("no such model.")), 3, "answered 404: no such model. See http"),
        ((400, error("too long.")), 1, "answered 400: too long."),
        ((503, json.dumps({"error": "starting"})), 1, "answered 503: starting"),
        ((500, "<html>"), 1, "answered 500: Internal Server Error"),
        ((422, json.dumps({"detail": "wrong field"})), 1, "answered 422: wrong field"),
        ((200, event({"choices": [{"text": "a"}]}) + event({"error": {"message": "engine died"}})), 1, "engine died"),
        ((200, event({"choices": [{"text": "a"}]})), 1, "broke off: the server or network failed. Ask again."),
        ((200, "data: no json\n\n"), 1, "is not a JSON object: check that --url is an OpenAI API."),
    ],
)
def test_what_goes_wrong_is_one_line(
    served: Served, answer: tuple[int, str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served.answers = [answer]
    assert main(["complete", "--url", served.url, "-p", "hi"]) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("quire: error: ")]
    assert len(lines) == 1 and words in lines[0]


def test_a_stream_that_is_cut_in_the_middle_of_a_chunk(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """Chunked framing whose last chunk never comes."""
    chunk = event({"choices": [{"text": "one"}]})
    head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    with raw_server(f"{head}{len(chunk):x}\r\n{chunk}\r\n40\r\ndata: {{") as url:
        assert main(["complete", "--url", url, "--model-name", "m", "-p", "hi"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("one") and "broke off" in err


@pytest.mark.parametrize("status", ["200 OK", "500 Error"])
@pytest.mark.parametrize("framing", ["content-length: 40\r\n\r\n{", "transfer-encoding: chunked\r\n\r\n40\r\n{"])
def test_a_server_that_breaks_off_while_it_lists_its_models(
    status: str, framing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with raw_server(f"HTTP/1.1 {status}\r\n{framing}") as url:
        assert main(["complete", "--url", url, "-p", "hi"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quire: error: ") and ("broke off" in line or "answered 500" in line)


def test_a_server_that_speaks_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    with raw_server("220 mail.example.org\r\n") as url:
        assert main(["complete", "--url", url, "--model-name", "m", "-p", "hi"]) == 1
    assert "is it an HTTP server?" in capsys.readouterr().err


class raw_server:  # noqa: N801  reads as a function
    """Sends these bytes to the first who connects and asks, and hangs up."""

    def __init__(self, answer: str) -> None:
        self._answer = answer

    def __enter__(self) -> str:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        connection.recv(65536)
        connection.sendall(self._answer.encode())
        connection.close()

    def __exit__(self, *error: object) -> None:
        self._thread.join(5)
        self._socket.close()


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["chat", "--url", f"localhost:{port}", "-q", "hi"]) == 1
    assert f"no server listens at http://localhost:{port}: start `quire serve`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ((200, json.dumps({"data": []})), "lists no model: name a model with --model-name"),
        ((404, "nothing"), "There is no OpenAI API at this --url."),
    ],
)
def test_models_that_cannot_be_listed(
    served: Served, models: tuple[int, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served.models = models
    assert main(["chat", "--url", served.url, "-q", "hi"]) == 3
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--url", "ftp://x"], "must be like http://localhost:8000"),
        (["--url", "http://"], "must be like http://localhost:8000"),
        (["--url", "http://x:99999"], "Port out of range"),
        (["--url", "http://[::1"], "--url http://[::1: Invalid IPv6 URL"),
        (["--url", "http://a b"], "http://a b:80: URL can't contain control characters"),
        (["--url", "http://x", "--max-model-len", "5"], "--max-model-len: with --url the server has its own options"),
    ],
)
def test_flags_that_make_no_sense(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "-p", "hi", *args]) == 3
    assert words in capsys.readouterr().err


def test_the_servers_bound_is_mentioned(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.answers = [(200, text_stream("a", reason="length"))] * 2
    main(["complete", "--url", served.url, "-p", "hi", "--no-stats"])
    assert "--max-tokens asks for more" in capsys.readouterr().err
    main(["complete", "--url", served.url, "-p", "hi", "--no-stats", "--max-tokens", "1"])
    assert capsys.readouterr().err == ""


def test_ctrl_c_closes_the_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.entry.cli import remote

    events = remote._events

    def interrupted(*args: Any) -> Iterator[str]:
        yield next(events(*args))
        raise KeyboardInterrupt

    monkeypatch.setattr(remote, "_events", interrupted)
    served.answers = [(200, text_stream("one", "two"))]
    assert main(["complete", "--url", served.url, "-p", "hi"]) == 130
    out, err = capsys.readouterr()
    assert out == "one\n" and "answer 1 tokens" in err and "Traceback" not in err
