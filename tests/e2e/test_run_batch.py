"""`quire run-batch` as a process, over the mock device: every kind of route, Ctrl-C and going on, and no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src"
RUN = (
    "import sys; from quire.entry.cli.main import main; code = main(sys.argv[1:]); "
    "assert 'torch' not in sys.modules; sys.exit(code)"
)
USER = [{"role": "user", "content": "hi"}]


def start(folder: Path, *flags: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-c",
        RUN,
        "run-batch",
        "-i",
        str(folder / "in.jsonl"),
        "-o",
        str(folder / "out.jsonl"),
        "--device",
        "mock",
        *flags,
    ]
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "QUIRE_API_KEY": "of a server"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def write(folder: Path, *requests: tuple[str, dict[str, Any]]) -> None:
    (folder / "in.jsonl").write_text(
        "".join(
            json.dumps({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body}) + "\n"
            for i, (url, body) in enumerate(requests)
        )
    )


def test_every_route_that_takes_a_request(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 3}, 200),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3}, 200),
        (
            "/v1/chat/completions",
            {"messages": USER, "chat_template": "{{ 'x' * n }}", "max_tokens": 1, "chat_template_kwargs": {"n": 3}},
            200,
        ),
        ("/v1/chat/completions", {"messages": USER, "chat_template": "{{ 'x' * 2000000000 }}"}, 400),
        ("/tokenize", {"prompt": "hi"}, 200),
        ("/v1/completions", {"prompt": "a", "temperature": 3}, 400),
        ("/v1/completions", {"prompt": "a", "model": "gpt-x"}, 404),
        ("/v1/nothing", {}, 404),
        ("/v1/models", {}, 405),
    ]
    write(tmp_path, *((url, body) for url, body, _ in cases))
    with start(tmp_path, "--trust-request-chat-template", "--served-model-name", "mine") as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and not out, err
    results = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(r["custom_id"], r["response"]["status_code"]) for r in results] == [
        (f"r{i}", status) for i, (_, _, status) in enumerate(cases)
    ], err
    assert results[0]["response"]["body"]["model"] == "mine" and results[0]["response"]["request_id"]
    assert len(results[1]["response"]["body"]["choices"]) == 4
    assert f"{sum(status == 200 for *_, status in cases)} answers and 5 errors" in err
    assert "the commonest error: " in err


def test_ctrl_c_keeps_what_is_answered_and_the_next_run_goes_on(tmp_path: Path) -> None:
    write(tmp_path, *[("/v1/completions", {"prompt": "a", "max_tokens": 1000, "ignore_eos": True})] * 300)
    partial = tmp_path / "out.jsonl.partial"
    with start(tmp_path, "--max-num-seqs", "4") as process:
        while process.poll() is None and not (partial.exists() and partial.stat().st_size):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    kept = {json.loads(text)["custom_id"]: text for text in partial.read_text().splitlines()}
    assert process.returncode == 130 and 0 < len(kept) < 300 and f"{len(kept)} of 300 answers are kept" in err, err
    assert "Traceback" not in err and not (tmp_path / "out.jsonl").exists()
    with start(tmp_path) as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0 and f"{len(kept)} of 300 were answered by an earlier run" in err, err
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(text)["custom_id"] for text in lines] == [f"r{i}" for i in range(300)]
    assert set(kept.values()) <= set(lines) and not partial.exists()


def test_a_bad_file_or_flag_ends_it_at_once(tmp_path: Path) -> None:
    write(tmp_path, ("/v1/completions", {"prompt": "a"}))
    (tmp_path / "in.jsonl").write_text((tmp_path / "in.jsonl").read_text() * 2)
    for flags, code, words in (
        ((), 3, "lines 1 and 2 have the same custom_id 'r0'"),
        (("-o", str(tmp_path / "in.jsonl")), 3, "is the input"),
        (("--port", "1"), 2, "--port"),
    ):
        with start(tmp_path, *flags) as process:
            _, err = process.communicate(timeout=300)
        assert process.returncode == code and words in err, err
