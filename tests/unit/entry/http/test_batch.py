"""A file of requests over an application that a test scripts: order, errors, what is kept, and what is asked again."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.contracts.errors import ConfigError, EngineError
from quire.entry.http import batch as module
from quire.entry.http.batch import IN_FLIGHT, Batch


class App:
    """Answers with what `respond` makes of a body, the last request of several first, and keeps what it was asked."""

    def __init__(self, respond: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]] | None = None) -> None:
        self.respond = respond or (lambda body: (200, {"echo": body}))
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.now = self.most = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        assert scope["method"] == "POST" and (b"content-type", b"application/json") in scope["headers"]
        message = await receive()
        body = json.loads(message["body"])
        self.asked.append((scope["path"], body))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01 / len(self.asked))
        self.now -= 1
        status, answer = self.respond(body)
        headers = [(b"x-request-id", b"r"), *self.headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


def line(name: Any, **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    def write(*lines: str) -> tuple[Path, Path]:
        (tmp_path / "in.jsonl").write_text("\n".join(lines), "utf-8")
        return tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    return write


def run(files: tuple[Path, Path], app: App, most: int = 1000) -> list[dict[str, Any]]:
    batch = Batch(*files, most)
    try:
        asyncio.run(batch.run(app, lambda: None))
        assert batch.done == batch.total
        answers, errors, commonest = batch.finish()
    finally:
        batch.close()
    results = [json.loads(text) for text in files[1].read_text().splitlines()]
    assert sorted(path.name for path in files[0].parent.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert (answers, errors) == (sum(r["error"] is None for r in results), sum(r["error"] is not None for r in results))
    assert bool(commonest) == bool(errors)
    assert all(set(r) == {"id", "custom_id", "response", "error"} for r in results)
    assert len({r["id"] for r in results}) == len(results)
    return results


def test_answers_come_in_the_order_of_the_input(files: Callable[..., Any]) -> None:
    app = App()
    results = run(files(*(line(f"ü{i}", n=i) for i in range(2 * IN_FLIGHT)), "", "  "), app)
    assert [r["custom_id"] for r in results] == [f"ü{i}" for i in range(2 * IN_FLIGHT)]
    assert results[3]["response"] == {"status_code": 200, "request_id": "r", "body": {"echo": {"n": 3}}}
    assert app.most == IN_FLIGHT and app.asked[0][0] == "/v1/completions"


def test_errors_of_the_application_are_both_answer_and_error(files: Callable[..., Any]) -> None:
    error = {"message": "no", "type": "t", "param": None, "code": "c"}
    (result,) = run(files(line("a")), App(lambda body: (400, {"error": error})))
    assert result["response"]["status_code"] == 400 and result["response"]["body"] == {"error": error}
    assert result["error"] == error


def test_the_commonest_error_is_told_with_an_example(files: Callable[..., Any]) -> None:
    def respond(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        code = {0: None, 1: "rare"}.get(body["n"], "often")  # errors in Anthropic's form have no code
        return 400, {"error": {"message": f"no {body['n']}", "type": "a_type", "code": code}}

    batch = Batch(*files("nonsense", *(line(str(i), n=i) for i in range(4))), 1000)
    asyncio.run(batch.run(App(respond), lambda: None))
    assert batch.finish() == (0, 5, "often, 2 of 5 (no 2)")
    batch.close()


@pytest.mark.parametrize(
    "bad, name, words",
    [
        ("nonsense", None, "not a request"),
        ("[1]", None, "not a request"),
        ('{"custom_id": "x"', None, "not a request"),
        ("\x80", None, "not a request"),
        ("[" * 5000, None, "not a request"),
        ("{}", None, "custom_id"),
        (line(""), "", "custom_id"),
        (line(5), None, "custom_id"),
        (line([]), None, "custom_id"),
        ('{"custom_id": "x", "url": "/a", "method": "GET", "body": {}}', "x", "POST"),
        ('{"custom_id": "x", "body": {}}', "x", "url"),
        ('{"custom_id": "x", "url": 5, "body": {}}', "x", "url"),
        ('{"custom_id": "x", "url": "/a"}', "x", "not a request"),
        (r'{"custom_id": "x", "url": "/a", "body": {"prompt": "\ud800"}}', None, "half of a surrogate pair"),
        ('{"custom_id": "x", "url": "/a", "body": [1]}', "x", "not a request"),
        (line("x", stream=True), "x", "stream"),
        (line("x", background=True), "x", "background"),
        (line("x", long="y" * 1000), "x", "--max-body-bytes"),
    ],
)
def test_a_bad_line_is_an_error_and_stops_nothing(files: Callable[..., Any], bad: str, name: Any, words: str) -> None:
    results = run(files(line("a"), "", bad, line("b")), App())
    assert [r["error"] is None for r in results] == [True, False, True]
    assert results[1]["custom_id"] == name and results[1]["response"] is None
    assert results[1]["error"]["line"] == 3 and results[1]["error"]["code"] == "invalid_line"
    assert results[1]["error"]["message"].startswith("line 3: ") and words in results[1]["error"]["message"]


def test_a_name_given_twice_stops_it_before_it_begins(files: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="lines 1 and 4 have the same custom_id 'a'"):
        Batch(*files(line("a"), line("b"), "bad", line("a")), 1000)
    assert run(files(line("a"), line("a", stream=True)), App())[0]["error"] is None  # a bad line names nobody


def test_no_room_is_waited_for(files: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    left = [429, 408, 529, 429]
    app = App(lambda body: (left.pop(), {"error": {"message": "full"}}) if left else (200, {}))
    assert run(files(line("a")), app)[0]["error"] is None and len(app.asked) == 5


def test_warnings_are_part_of_a_line(files: Callable[..., Any]) -> None:
    app = App()
    app.headers = [(b"x-quire-warning", b"unknown field 'x'"), (b"x-quire-warning", b"b")]
    assert run(files(line("a", x=1)), app)[0]["response"]["warnings"] == ["unknown field 'x'", "b"]


def test_responses_are_kept_only_when_they_are_to_be(files: Callable[..., Any]) -> None:
    app, bodies = App(), ({"input": "a"}, {"input": "b", "store": True}, {"input": "c", "store": None})
    run(
        files(*(json.dumps({"custom_id": body["input"], "url": "/v1/responses", "body": body}) for body in bodies)), app
    )
    assert {body["input"]: body["store"] for _, body in app.asked} == {"a": False, "b": True, "c": False}


def test_another_request_of_the_same_name_is_asked(files: Callable[..., Any]) -> None:
    run(files(line("a", n=1), line("b", n=1)), App())
    app = App()
    results = run(files(line("a", n=2), line("b", n=1)), app)
    assert [body for _, body in app.asked] == [{"n": 2}] and results[0]["response"]["body"] == {"echo": {"n": 2}}


def test_only_one_run_writes_an_output(files: Callable[..., Any]) -> None:
    first = Batch(*(paths := files(line("a"))), 1000)
    with pytest.raises(ConfigError, match="another run"):
        Batch(*paths, 1000)
    first.close()
    assert len(run(paths, App())) == 1


def test_what_is_answered_is_not_asked_again(files: Callable[..., Any]) -> None:
    def respond(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["n"] == 7:
            return 503, {"error": {"message": "the engine died"}}
        return (500 if body["n"] == 1 else 400 if body["n"] == 2 else 200), {"error": {"message": "x"}}

    paths = files(*(line(str(i), n=i) for i in range(10)))
    first = Batch(*paths, 1000)
    dying = App(respond)
    with pytest.raises(EngineError, match="the engine died"):
        asyncio.run(first.run(dying, lambda: None))
    first.close()
    partial = paths[1].with_name("out.jsonl.partial")
    kept = {json.loads(text)["custom_id"] for text in partial.read_text().splitlines()}
    assert 0 < len(kept) < 10 and not paths[1].exists()
    with partial.open("a") as file:
        file.write('{"id": "torn", "custom_id": "7"')
    app = App()
    results = run(paths, app)
    faults = {1} & set(map(int, kept))  # of the engine, not of the request
    assert {body["n"] for _, body in app.asked} == set(range(10)) - set(map(int, kept)) | faults
    assert [r["custom_id"] for r in results] == [str(i) for i in range(10)] and results[1]["error"] is None
    more = App()
    results = run(files(line("new", n=0), *(line(str(i), n=i) for i in range(1, 10))), more)
    assert [body["n"] for _, body in more.asked] == [0] and len(results) == 10


def test_a_file_that_is_something_else_is_left_alone(files: Callable[..., Any], tmp_path: Path) -> None:
    paths = files(line("a"))
    for text in ("dear diary\n", '{"a": 1}\n', "[]\n", "5\n"):
        paths[1].write_text(text)
        with pytest.raises(ConfigError, match="holds no answers of a batch"):
            Batch(*paths, 1000)
        assert paths[1].read_text() == text and not paths[1].with_name("out.jsonl.partial").exists()
    for source, target in ((tmp_path / "none", paths[1]), (paths[0], tmp_path / "no" / "out")):
        with pytest.raises(ConfigError, match="No such file"):
            Batch(source, target, 1000)
