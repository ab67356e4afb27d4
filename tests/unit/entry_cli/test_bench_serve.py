"""`quire bench serve` from flags to files, against a server of fixed answers."""

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.config.flags import FlagParser
from quire.contracts.errors import ConfigError
from quire.entry.cli import bench_serve

pytest.importorskip("aiohttp")
EVENTS = [
    {"choices": [{"text": "a"}]},
    {"choices": [{"text": "b"}]},
    {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}},
]


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(b'{"data": [{"id": "listed/model"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers, body))  # type: ignore[attr-defined]
        if body["model"] == "missing":
            self._send(b'{"error": {"message": "the model is not here."}}', 404)
        else:
            self._send(b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in EVENTS) + b"data: [DONE]\n\n")

    def _send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    listener = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    listener.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield listener
    listener.shutdown()
    listener.server_close()


def parse(*flags: str) -> argparse.Namespace:
    parser = FlagParser(prog="bench serve")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    bench_serve.configure(parser)
    return parser.parse_args(list(flags))


def small(server: Any, *flags: str) -> argparse.Namespace:
    return parse(
        "--port",
        str(server.server_port),
        "--num-prompts",
        "4",
        "--random-input-len",
        "8",
        "--random-output-len",
        "2",
        *flags,
    )


def test_a_table_with_the_peers_flags(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    args = small(
        server,
        "--backend",
        "openai",
        "--dataset-name",
        "random",
        "--request-rate",
        "inf",
        "--max-concurrency",
        "2",
        "--seed",
        "3",
        "--percentile-metrics",
        "ttft,e2el",
        "--metric-percentiles",
        "50,99",
        "--goodput",
        "ttft:60000",
        "e2e:60000",
        "--ignore-eos",
        "--num-warmups",
        "2",
        "--api-key",
        "secret",
        "--header",
        "X-Test=1",
    )
    assert bench_serve.run(args) == 0
    out = capsys.readouterr().out
    assert "listed/model" in out and "goodput, requests/s (ttft:60000 e2el:60000 ms)" in out
    assert "TTFT, ms" in out and "p99" in out and "ITL, ms" not in out
    assert "secret" not in out
    path, headers, body = server.asked[-1]
    assert len(server.asked) == 6 and path == "/v1/completions"
    assert headers["Authorization"] == "Bearer secret" and headers["X-Test"] == "1"
    assert body["ignore_eos"] is True and body["max_tokens"] == 2 and len(body["prompt"]) == 8


def test_json_and_a_result_file(server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = small(
        server,
        "--json",
        "--save-result",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "r.json",
        "--model",
        "m",
        "--endpoint",
        "chat",
        "--extra-body",
        '{"top_k": 1}',
    )
    assert bench_serve.run(args) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert f"quire: note: the result is in {tmp_path / 'r.json'}\n" in err
    assert printed == json.loads((tmp_path / "r.json").read_text())
    assert (printed["completed"], printed["total_input_tokens"], printed["total_output_tokens"]) == (4, 36, 8)
    assert {"mean_ttft_ms", "median_tpot_ms", "p99_itl_ms", "p95_e2el_ms", "request_rate"} <= printed.keys()
    path, _, body = server.asked[-1]
    assert path == "/v1/chat/completions" and body["top_k"] == 1 and body["messages"][0]["role"] == "user"


def test_every_request_failing_is_a_failure(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_serve.run(small(server, "--model", "missing")) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "quire: error: no request was answered, HTTP 404 (4): the model is not here.\n"


@pytest.mark.parametrize("more", [[], ["--model", "m"]])
def test_no_server_is_one_plain_line(server: Any, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    server.shutdown()
    server.server_close()
    where = f"no server listens at http://127.0.0.1:{server.server_port}: start `quire serve`, or correct --base-url."
    if more:
        assert bench_serve.run(small(server, *more)) == 1
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1 and where in err
    else:
        with pytest.raises(ConfigError) as caught:
            bench_serve.run(small(server))
        assert str(caught.value) == where


def test_prompts_from_a_file(server: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "from the file"}\n')
    assert bench_serve.run(small(server, "--dataset", str(path), "--model", "m")) == 0
    assert {body["prompt"] for _, _, body in server.asked} == {"from the file"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-prompts", "0"), "--num-prompts 0"),
        (("--request-rate", "-1"), "--request-rate -1"),
        (("--max-concurrency", "0"), "--max-concurrency 0"),
        (("--random-range-ratio", "1.5"), r"\[0, 1\)"),
        (("--random-range-ratio", '{"input": 1}'), "--random-range-ratio"),
        (("--dataset-name", "sonnet"), "--dataset-name sonnet"),
        (("--dataset-name", "custom"), "--dataset-path FILE"),
        (("--percentile-metrics", "ttft,latency"), "--percentile-metrics latency"),
        (("--metric-percentiles", "101"), "between 0 and 100"),
        (("--metric-percentiles", "x"), "90,99"),
        (("--goodput", "itl:1"), "--goodput itl:1"),
        (("--base-url", "localhost:8000"), "http://"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench_serve.run(parse("--port", "1", *flags))


def test_ranges_for_input_and_output_apart(server: Any) -> None:
    assert bench_serve.run(small(server, "--random-range-ratio", '{"input": 0.5, "output": 0}', "--model", "m")) == 0
    assert {body["max_tokens"] for _, _, body in server.asked} == {2}
    assert all(4 <= len(body["prompt"]) <= 12 for _, _, body in server.asked)
