"""`quire top`: the picture from events, on terminals of any kind, and what is said when nothing can be watched."""

import copy
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.entry.cli import top_watch
from quire.entry.cli.main import main
from quire.entry.cli.top_view import TopView

FACTS = {"version": "1", "models": ["some-model"], "device": "cpu", "dtype": "float32"}
STEP = {
    "step": 9,
    "at": 1.0,
    "chunks": [[1, 0, 512, 0], [2, 0, 88, 1]],
    "decodes": 30,
    "drafts": [60, 41],
    "tokens": 690,
    "sampled": 72,
}
SUMS = {"steps": 10, "prompt_tokens": 600, "tokens": 900, "sampled": 300, "drafts": 60, "accepted": 45}
SUMS |= {"plan_s": 0.01, "launch_s": 0.01, "device_s": 0.12, "collect_s": 0.08, "finish_s": 0.0}  # type: ignore[dict-item]
TIER = {"blocks": 8, "used": 2, "loaded": 0, "loaded_bytes": 0, "stored": 2, "stored_bytes": 2048}
ENGINE: dict[str, Any] = {
    "replica": 0,
    "steps": [STEP],
    "skipped": 0,
    "sums": SUMS,
    "queue": {
        "running": 3,
        "waiting": 2,
        "preempted": 1,
        "waits_for": "slots",
        "blocked": {"grammar": 1},
        "num_preemptions": 4,
        "slots": 8,
    },
    "blocks": {
        "total": 100,
        "own": 20,
        "shared": 10,
        "moving": 5,
        "cached": 25,
        "free": 40,
        "groups": [
            {"window": None, "block_size": 16, "own": 20, "shared": 4},
            {"window": 64, "block_size": 16, "own": 0, "shared": 6},
        ],
    },
    "prefix": {"queries": 100, "hits": 50, "misses": {"tokens": {"requests": 3, "blocks": 9}}, "states": None},
    "tiers": {"host": TIER},
    "requests": {
        "handle": [1, 2],
        "id": ["mine", None],
        "state": ["running", "waiting"],
        "slot": [0, -1],
        "prompt": [90, 5],
        "tokens": [100, 5],
        "computed": [99, 0],
        "cached": [64, -1],
        "blocks": [7, 0],
        "preemptions": [0, 0],
        "more": 0,
    },
}
FRAME: dict[str, Any] = {
    "frame": 3,
    "at": 1.0,
    "seconds": 0.5,
    "cost_s": 0.0,
    "engines": [ENGINE],
    "draining": None,
    "experts": {"loads": [[30, 10], [10, 10]], "balancedness": 0.8},
    "exchanged": {"tp": 4096},
    "latency": {
        "requests": 5,
        "counts": {"ttft_s": 4, "tpot_s": 0, "queue_s": 0, "e2e_s": 3},
        "window_s": 300.0,
        "oldest_wait_s": 12.25,
        "ttft_s": [0.05, 0.2, 0.31],
        "tpot_s": None,
        "queue_s": None,
        "e2e_s": [1.0, 11.0, 12.0],
    },
}


def picture(*events: tuple[str, dict[str, Any]], width: int = 100, height: int = 50, **options: Any) -> list[str]:
    """The lines of a picture after these events."""
    view = TopView("http://here", **options)
    for name, data in events:
        view.take(name, data)
    return view.render(width, height).plain.split("\n")


def later(**changes: Any) -> dict[str, Any]:
    """The next frame, with changes in its engine."""
    frame = copy.deepcopy(FRAME)
    for name, value in changes.items():
        frame["engines"][0][name] |= value
    return frame


def test_all_numbers_of_one_engine() -> None:
    moved = {"host": TIER | {"stored_bytes": 2048 + 10240}}
    after = later(prefix={"queries": 140, "hits": 80}, tiers=moved)
    lines = picture(("engine", FACTS), ("frame", FRAME), ("frame", after), ("lost", {"frames": 3}))
    text = "\n".join(lines)
    for words in (
        "quire top · http://here · some-model · cpu, float32 · 3 frames lost",
        "3 running of 8 · 2 waiting for slots · 1 of them preempted · 1 blocked (grammar)",
        "4 preemptions",
        "step 9 · 2 prompt chunks (600 tokens) · 30 decodes · 41 of 60 drafts right",
        "1,200 tokens/s in · 600 out · drafts: 75% right · 20.0 steps/s",
        "35.0%",
        "20 own · 10 shared · 5 moving · 25 cached · 40 free",
        "full: 24 · window 64: 6",
        "75.0% of prompt tokens reused in the last seconds · misses: tokens 3",  # 30 of 40 between the frames
        "10.00 ms · plan 1.00 · launch 1.00 · wait 8.00 · finish 0.00 · device 12.00 at most",
        "first token 50 / 200 / 310 ms of 4 · whole 1.0 / 11.0 / 12.0 s of 3",
        "p50 / p90 / p99 of requests, last 300 s · the oldest waits 12.2 s",
        "2 of 8 blocks · in 0 B/s · out 10.0 KiB/s",
        "tp 8.0 KiB/s",
        "balancedness 0.80 · by rank 67% 33%",
    ):
        assert words in text, words
    assert "50.0% of prompt tokens reused since the start" in "\n".join(picture(("engine", FACTS), ("frame", FRAME)))
    assert lines[-2].split() == ["mine", "running", "90", "10", "64", "7", "0"]
    assert lines[-1].split() == ["#2", "waiting", "5", "0", "-", "0", "0"]
    (bar,) = [line for line in lines if "35.0%" in line]
    assert [bar.count(letter) for letter in "█▓▒░·"] == [12, 6, 3, 15, 24]


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_terminal_and_one_without_letters(width: int) -> None:
    lines = picture(("engine", FACTS), ("frame", FRAME), width=width, height=80, ascii_only=True)
    assert max(map(len, lines)) <= width and "".join(lines).isascii()
    assert any(line.startswith("latency") for line in lines)
    assert len(picture(("frame", FRAME), width=width, height=5)) == 5


def test_backends_and_replicas_have_a_row_each() -> None:
    second = later()
    second["engines"].append(copy.deepcopy(ENGINE) | {"replica": 1})
    lines = picture(
        ("frame", {"backend": "http://a:1"} | FRAME),
        ("frame", {"backend": "http://b:2"} | second),
        ("down", {"backend": "http://c:3", "reason": "no connection"}),
    )
    assert lines[0].endswith("3 backends, 1 down") and "c:3 no connection" in lines
    rows = [line.split()[0] for line in lines if line[:1] in "ab" and ":" in line]
    assert rows == ["a:1", "b:2", "b:2"] and "b:2 replica 1" in "\n".join(lines)
    only = copy.deepcopy(second)
    del only["engines"][0]
    lines = picture(("frame", second), ("frame", only))
    assert not any("replica" in line for line in lines), "a replica that died is not shown"


def test_a_router_keeps_its_layout_while_one_backend_is_up() -> None:
    router = ("router", {"backends": ["http://a:1", "http://b:2"]})
    frame = ("frame", {"backend": "http://a:1"} | FRAME)
    lines = picture(router, frame)
    assert lines[0].endswith("2 backends") and "b:2 waiting for the first frame ..." in lines
    assert any(line.startswith("engine") for line in lines) and any(line.startswith("a:1 ") for line in lines)
    lines = picture(router, frame, ("down", {"backend": "http://b:2", "reason": "no connection"}))
    assert any(line.startswith("a:1 ") for line in lines) and "b:2 no connection" in lines


def test_a_server_that_drains() -> None:
    frame = FRAME | {"draining": {"requests": 3, "seconds": 12.4}}
    assert picture(("frame", frame))[0].endswith("draining: 3 requests, 12 s left")


def test_a_router_that_drains_and_one_of_its_backends() -> None:
    names = ["http://a:1", "http://b:2"]
    before = ("router", {"backends": names, "draining": [], "ending": None})
    frame = ("frame", {"backend": "http://a:1"} | FRAME)
    lines = picture(before, frame, ("router", {"backends": names, "draining": ["http://b:2"], "ending": None}))
    assert lines[0].endswith("2 backends · b:2 gets no new requests") and any(line.startswith("a:1 ") for line in lines)
    lines = picture(before, frame, ("router", {"backends": names, "draining": [], "ending": {"requests": 4}}))
    assert lines[0].endswith("2 backends · the router ends: 4 requests are left")


def test_an_idle_engine() -> None:
    none = dict.fromkeys(SUMS, 0)
    idle = copy.deepcopy(FRAME)
    idle["engines"][0] |= {"steps": [], "sums": none, "prefix": ENGINE["prefix"] | {"queries": 0, "misses": {}}}
    idle["latency"] = dict.fromkeys(FRAME["latency"]) | {"requests": 0, "window_s": 300.0}
    text = "\n".join(picture(("frame", idle)))
    assert "no step yet" in text and "idle" in text and "no prompt yet" in text


def test_hostile_ids_are_text() -> None:
    frame = later(requests={"id": ["\x1b[2J\n" + "x" * 500, "[bold]"]})
    lines = picture(("frame", frame), width=80)
    assert "\x1b" not in "".join(lines) and any(line.startswith("?[2J?xxx") for line in lines)
    assert any("[bold]" in line for line in lines) and max(map(len, lines)) <= 80


# --- against a server of a few lines ----------------------------------------------------------------------------------


class Served:
    """Answers to GET, the last one again and again: (status, body)."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, str]] = []
        self.keys: list[str | None] = []
        self.stays = False  # True: connections stay open behind the body
        self.over = threading.Event()
        self.url = ""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    for name in ("QUIRE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    state = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = state.answers.pop(0) if len(state.answers) > 1 else state.answers[0]
            state.keys.append(self.headers.get("authorization"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())
            if state.stays:
                state.over.wait(60)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield state
    state.over.set()
    server.shutdown()
    server.server_close()


def event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n: a comment\n\n"


STREAM = event("engine", FACTS) + event("frame", FRAME)


def test_one_picture(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.answers = [(200, STREAM)]
    assert main(["top", "--once", "--url", served.url, "--api-key", "k"]) == 0
    out = capsys.readouterr().out
    assert "some-model" in out and "3 running of 8" in out and "\x1b" not in out and served.keys == ["Bearer k"]


ROUTER = event("router", {"backends": ["http://a:1", "http://b:2"]})
A_LIVES = event("frame", {"backend": "http://a:1"} | FRAME)


def test_one_picture_of_a_router_has_every_backend(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    down = event("down", {"backend": "http://b:2", "reason": "no connection"})
    for stream in (ROUTER + A_LIVES + down, ROUTER + down + A_LIVES):
        served.answers = [(200, stream)]
        assert main(["top", "--once", "--url", served.url]) == 0
        out = capsys.readouterr().out
        assert "2 backends, 1 down" in out and "b:2 no connection" in out and "a:1 " in out


def test_one_picture_of_a_router_that_no_backend_answers(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    downs = [event("down", {"backend": url, "reason": "no connection"}) for url in ("http://a:1", "http://b:2")]
    served.answers = [(200, ROUTER + "".join(downs))]
    assert main(["top", "--once", "--url", served.url]) != 0
    told = capsys.readouterr()
    assert "a:1 no connection" in told.out and "b:2 no connection" in told.out and "no backend of" in told.err


def test_one_picture_does_not_wait_for_a_silent_backend_for_ever(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_watch, "ONCE_SECONDS", 0.2)
    served.answers = [(200, ROUTER + A_LIVES)]
    served.stays = True
    assert main(["top", "--once", "--url", served.url]) == 0
    out = capsys.readouterr().out
    assert "a:1 " in out and "b:2 waiting for the first frame" in out


@pytest.mark.parametrize(
    ("status", "message", "words"),
    [
        (401, "this server needs an API key.", "Give the key with --api-key"),
        (404, "no such path.", "Is it a server or a router of Quire?"),
        (404, "this server was started with --no-web: start it without.", "was started with --no-web"),
        (429, "64 watch already: close another one.", "64 watch already"),
        (503, "the engine is being loaded.", "is being loaded"),
    ],
)
@pytest.mark.parametrize("once", [["--once"], []])
def test_why_nothing_can_be_watched(
    served: Served, capsys: pytest.CaptureFixture[str], status: int, message: str, words: str, once: list[str]
) -> None:
    served.answers = [(status, json.dumps({"error": {"message": message}}))]
    assert main(["top", *once, "--url", served.url]) != 0
    err = " ".join(capsys.readouterr().err.split())
    assert words in err and "Traceback" not in err and ("Quire?" in err) == ("Quire?" in words)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://x"])
def test_a_wrong_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url]) != 0
    assert "--url" in capsys.readouterr().err


def test_a_lost_connection_is_tried_again(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_watch, "PRINT", 0.0)
    tries: list[float] = []

    def wait(seconds: float) -> None:
        tries.append(seconds)
        if len(tries) >= 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top_watch.time, "sleep", wait)
    refused = json.dumps({"error": {"message": "planted"}})
    served.answers = [(200, STREAM), (503, refused), (200, STREAM + event("end", {"reason": "it ends."}))]
    assert main(["top", "--url", served.url]) == 0
    out = capsys.readouterr().out
    assert "the stream ended" in out and "planted" in out and "it ends." in out and "Trying again" in out
    assert out.rindex("3 running of 8") > out.index("planted")


def test_ctrl_c_ends_it_with_zero_and_without_words(served: Served) -> None:
    served.answers = [(200, STREAM)]
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "top", "--url", served.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "quire top" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
