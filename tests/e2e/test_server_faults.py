"""Answers to clients and operators when something breaks: a dead engine, a stopped one, a hung one, a failed start."""

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .serving import MOCK, is_running, running_server, wait_until
from .test_server_signals import FOREVER, start_streams


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_engine_is_told_to_every_stream_and_ends_the_server(number: signal.Signals) -> None:
    with running_server(*MOCK, "--mock-step-ms", "20") as server, ThreadPoolExecutor(20) as pool:
        core = server.core_pid
        streams = start_streams(pool, server, 20, **FOREVER)
        os.kill(core, number)
        told = time.monotonic()
        for stream in streams:
            error = stream.result().error()
            assert error is not None and error["code"] == "engine_dead" and "engine process" in error["message"]
        assert time.monotonic() - told < 20.0  # ten times what is promised: this machine may be busy
        refused = server.complete()
        assert refused.status == 503 and "retry-after" in refused.headers
        assert server.ask("/ready").status == server.ask("/health").status == 503
        assert server.ask("/live").status == 200
        assert server.exit_code() == 1
        assert not is_running(core)
        assert "quire: error: The engine died" in server.stderr and "Traceback" not in server.stderr


def test_an_engine_outlives_no_killed_server() -> None:
    with running_server(*MOCK) as server:
        core = server.core_pid
        server.process.kill()
        wait_until(lambda: not is_running(core), "the end of the engine's process")


def test_a_hung_step_shows_and_does_not_keep_the_server_from_ending() -> None:
    flags = ("--mock-step-ms", "5000", "--hang-timeout", "0.2", "--shutdown-timeout", "0.2")
    with running_server(*MOCK, *flags) as server, ThreadPoolExecutor(1) as pool:
        with socket.create_connection(("127.0.0.1", server.port)) as leaves:
            body = b'{"prompt": "Once", "max_tokens": 30, "ignore_eos": true}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            leaves.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: "the engine hangs" in server.stderr, "a hung engine")
        first = lambda: server.ask("/debug/requests").json()["requests"][0]  # noqa: E731
        wait_until(lambda: first()["state"] == "abort", "its client to leave")
        assert server.ask("/ready").json()["status"] == "hung" and set(server.metric("quire:ready").values()) == {0.0}
        assert "goes on" not in server.stderr  # it is the same step
        wait_until(lambda: server.ask("/ready").status == 200, "the end of the step")
        stream = pool.submit(server.complete)
        wait_until(lambda: server.ask("/ready").status == 503, "another hang")
        assert server.ask("/health").status == server.ask("/live").status == 200
        core = server.core_pid
        server.signal(signal.SIGTERM)
        answer = stream.result()  # nothing had been sent yet: it still gets a status
        assert answer.status == 503 and "shutting down" in answer.json()["error"]["message"]
        assert server.exit_code() == 0 and not is_running(core)


def test_a_busy_port_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running_server(*MOCK, "--port", str(port), wait="") as server:
            assert server.exit_code() == 5
            (line,) = server.stderr.splitlines()
            assert line.startswith(f"quire: error: port {port} of 127.0.0.1 is in use by ") and "--port" in line
            if sys.platform == "linux":
                assert f"process {os.getpid()} (" in line


@pytest.mark.parametrize(
    "flags, words",
    [
        (("/no/such/model",), "/no/such/model"),
        ((*MOCK, "--ssl-certfile", "/no/cert", "--ssl-keyfile", "/no/key"), "/no/cert"),
        (("--max-model-len", "1000000000"), "error: --max-model-len=1000000000 exceeds"),
    ],
)
def test_a_start_that_fails_says_why_in_one_line(flags: tuple[str, ...], words: str) -> None:
    with running_server(*flags, wait="") as server:
        assert server.exit_code() == 3
        last = server.stderr.splitlines()[-1]
        assert last.startswith("quire: error: ") and words in last and "Traceback" not in server.stderr


def test_flags_of_limits_and_keys_reach_the_connection() -> None:
    flags = (
        "--max-body-bytes",
        "2000",
        "--max-header-bytes",
        "2000",
        "--max-headers",
        "20",
        "--api-key",
        "sk-1",
        "--access-log",
        "--served-model-name",
        "m",
    )
    with running_server(*MOCK, *flags) as server:
        key = {"authorization": "Bearer sk-1"}
        assert server.ask("/v1/models").status == 401
        assert server.ask("/v1/models", **key).json()["data"][0]["id"] == "m"
        assert server.ask("/v1/completions", {"prompt": "x" * 2000}, **key).status == 413
        assert server.ask("/v1/models", **key, x="x" * 2000).status == 431
        assert server.ask("/v1/models", **key, **{f"h{i}": "x" for i in range(20)}).status == 431
        assert "GET /v1/models 401" in server.stderr and "sk-1" not in server.stderr


def test_a_unix_socket_is_served_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with running_server(*MOCK, "--uds", str(path), wait="") as server:

        def ready() -> bool:
            with socket.socket(socket.AF_UNIX) as peer:
                if peer.connect_ex(str(path)):
                    return False
                peer.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return peer.recv(65536).startswith(b"HTTP/1.1 200 ")

        wait_until(ready, "a ready server")
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
    assert not path.exists()


def test_https_with_a_certificate_that_is_read_again(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        certificate,
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    if shutil.which("openssl") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no openssl to make a certificate with")
    trusted = ssl.create_default_context(cafile=certificate)
    with running_server(*MOCK, "--ssl-keyfile", key, "--ssl-certfile", certificate, wait="") as server:
        wait_until(lambda: "  address " in server.stderr, "a ready server")
        port = int(server.stderr.partition("https://127.0.0.1:")[2].split()[0])
        for size, status in ((100, 200), (9_000_000, 413)):
            with (
                socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
                trusted.wrap_socket(plain, server_hostname="127.0.0.1") as peer,
            ):
                head = b"POST /ping HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size
                end = ssl.cert_time_to_seconds(str((peer.getpeercert() or {})["notAfter"]))
                peer.sendall(head + b"x" * 100)
                assert peer.recv(65536).startswith(b"HTTP/1.1 %d " % status)
        first = ssl.get_server_certificate(("127.0.0.1", port))
        good = Path(certificate).read_bytes()
        for content, words in ((b"no certificate", "The certificate stays as it was"), (good, "is read again from")):
            Path(certificate).write_bytes(content)
            if content is good:
                subprocess.run(command, capture_output=True, check=True)
            server.signal(signal.SIGHUP)
            wait_until(lambda words=words: words in server.stderr, server.stderr)
            assert (ssl.get_server_certificate(("127.0.0.1", port)) == first) == (content is not good)
            if content is not good:
                url, unchecked = f"https://127.0.0.1:{port}/metrics", ssl._create_unverified_context()
                body = urllib.request.urlopen(url, context=unchecked).read().decode()
                lines = [line for line in body.splitlines() if line[0] != "#"]
                found = {line.partition("{")[0]: float(line.split()[-1]) for line in lines if not line.endswith(" 0.0")}
                assert found["quire:certificate_end_time_seconds"] == end and found["quire:reloads_total"] == 1
