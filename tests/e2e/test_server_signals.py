"""The end of a server: asked politely, asked twice, asked while it loads. Real processes, an engine without a model."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ..support.template_process import SWITCH
from .serving import MOCK, Answer, Server, is_running, running_server, wait_until

NUM_STREAMS = 50
FOREVER = {"max_tokens": 4000}


def start_streams(pool: ThreadPoolExecutor, server: Server, count: int, **fields: Any) -> list[Any]:
    """Streams that have all begun to send when this returns."""

    def delivered() -> float:
        return sum(server.metric("quire:delivered_tokens_total").values())

    before = delivered()
    streams = [pool.submit(server.complete, f"Story {i}", seed=i, **fields) for i in range(count)]
    wait_until(lambda: sum(server.metric("quire:num_requests_running").values()) == count, "running streams")
    wait_until(lambda: delivered() - before >= 5 * count, "tokens")
    return streams


def outcome(answer: Answer) -> tuple[str, object]:
    """Return the text and its end, which do not depend on the times of the tokens."""
    last = [event for event in answer.events() if isinstance(event, dict) and event["choices"]][-1]
    return answer.text(), last["choices"][0]["finish_reason"]


def test_each_request_is_a_line_when_that_is_asked_for() -> None:
    with running_server(*MOCK, "--enable-log-requests") as server, running_server(*MOCK) as quiet:
        for number in range(3):
            assert (
                server.ask(
                    "/v1/completions",
                    {"prompt": "Secret", "max_tokens": 5, "ignore_eos": True},
                    **{"x-request-id": f"r-{number}"},
                ).status
                == 200
            )
        quiet.complete()
        lines = [line for line in server.stderr.splitlines() if line.startswith("request ")]
        assert [line.partition(" prompt tokens, 5 generated, length, ")[0].split(":")[0] for line in lines] == [
            "request r-0",
            "request r-1",
            "request r-2",
        ]
        assert "Secret" not in server.stderr and "request " not in quiet.stderr


def test_sigterm_lets_streams_finish_and_refuses_new_ones() -> None:
    with running_server(*MOCK, "--mock-step-ms", "5") as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        undisturbed = [outcome(a.result()) for a in start_streams(pool, server, NUM_STREAMS, max_tokens=300)]
        streams = start_streams(pool, server, NUM_STREAMS, max_tokens=300)
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.ask("/ready").status == 503, "draining")
        assert server.ask("/health").status == server.ask("/live").status == 200
        assert server.ask("/ready").json()["status"] == "draining"
        refused = server.complete("late")
        assert refused.status == 503 and "retry-after" in refused.headers
        assert refused.json()["error"]["code"] == "engine_draining"
        answers = [stream.result() for stream in streams]
        assert all(answer.status == 200 and answer.error() is None for answer in answers)
        assert [outcome(answer) for answer in answers] == undisturbed
        assert server.exit_code() == 0
        assert re.search(r"\d+ running have 30 s to finish", server.stderr) and "Traceback" not in server.stderr


@pytest.mark.parametrize("second, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once_with_an_error_frame(second: signal.Signals, code: int) -> None:
    with running_server(*MOCK, "--mock-step-ms", "20") as server, ThreadPoolExecutor(4) as pool:
        core = server.core_pid
        streams = start_streams(pool, server, 4, **FOREVER)
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.ask("/ready").status == 503, "draining")
        server.signal(second)
        assert server.exit_code() == code
        for stream in streams:
            error = stream.result().error()
            assert error is not None and "shutting down" in error["message"] and error["type"] == "server_error"
        assert not is_running(core)


def test_streams_that_take_too_long_end_with_an_error_frame() -> None:
    with (
        running_server(*MOCK, "--mock-step-ms", "20", "--shutdown-timeout", "0.3") as server,
        ThreadPoolExecutor(4) as pool,
    ):
        streams = start_streams(pool, server, 4, **FOREVER)
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert all("shutting down" in stream.result().error()["message"] for stream in streams)


def test_ctrl_c_is_a_polite_request_too() -> None:
    with running_server(*MOCK, "--mock-step-ms", "5") as server, ThreadPoolExecutor(4) as pool:
        streams = start_streams(pool, server, 4, max_tokens=200)
        server.signal(signal.SIGINT)
        assert all(stream.result().error() is None for stream in streams)
        assert server.exit_code() == 0
        assert "Ctrl-C" in server.stderr and "Traceback" not in server.stderr


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_while_it_loads_leaves_nothing(number: signal.Signals, code: int) -> None:
    # The bundled model on the CPU: importing torch takes a while, but a copy has imported all.
    with running_server(wait="/live", **{SWITCH: "0"}) as server:
        wait_until(lambda: "starting" in server.stderr or server.ask("/health").status == 200, "the engine's process")
        core = server.core_pid
        os.kill(core, signal.SIGSTOP)  # or it could be ready before the signal comes
        assert server.ask("/health").status == 503 and server.ask("/health").json()["status"] == "starting"
        refused = server.complete()
        assert refused.status == 503 and refused.headers["retry-after"]
        server.signal(number)
        os.kill(core, signal.SIGCONT)
        assert server.process.wait(10) == code
        wait_until(lambda: not is_running(core), "the end of the engine's process")
        assert "Traceback" not in server.stderr
