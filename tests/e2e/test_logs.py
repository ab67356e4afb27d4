"""Lines of a server on standard error: JSON if that is asked for, with request ids, and never a text of a user."""

import json
import re
import signal
from typing import Any

from .serving import MOCK, running_server, wait_until

MARKER = "zebra-in-the-log"
TURN = [{"role": "user", "content": MARKER}]
TOOL = {"type": "function", "function": {"name": "f", "description": MARKER, "parameters": {"const": MARKER}}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": MARKER, "max_tokens": 2, "stop": MARKER, "echo": True}),
    ("/v1/completions", {"prompt": MARKER, "temperature": MARKER}),  # refused, and the answer says why
    ("/v1/completions", {"prompt": MARKER * 10_000}),  # does not fit
    ("/v1/chat/completions", {"messages": TURN, "max_tokens": 2, "stream": True, "user": MARKER}),
    ("/v1/chat/completions", {"messages": TURN, "response_format": {"type": "json_schema", "json_schema": {}}}),
    ("/v1/chat/completions", {"messages": TURN, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/messages", {"model": MARKER, "messages": TURN, "max_tokens": 2}),
    ("/v1/responses", {"input": MARKER, "instructions": MARKER, "max_output_tokens": 2}),
    ("/v1/embeddings", {"input": MARKER}),
    ("/tokenize", {"prompt": MARKER}),
]


def test_every_line_is_json_and_none_holds_a_text_of_a_user() -> None:
    flags = ("--enable-log-requests", "--log-format", "json", "--api-key", "sk-" + MARKER)
    with running_server(*MOCK, *flags, wait="/health") as server:
        key = {"authorization": f"Bearer sk-{MARKER}"}

        def ask(path: str, body: object = None, name: str = "r") -> int:
            return server.ask(path, body, **{"x-request-id": name}, **key).status

        def lines(**wanted: object) -> list[dict[str, Any]]:
            made = [json.loads(line) for line in server.stderr.splitlines()]
            return [line for line in made if wanted.items() <= line.items()]

        wait_until(lambda: ask("/ready") == 200)
        assert not lines(message="request"), "no line for an HTTP request"
        server.signal(signal.SIGUSR1)
        wait_until(lambda: bool([line for line in lines() if "log is debug" in line["message"]]))
        statuses = [ask(path, body, f"id-{number}") for number, (path, body) in enumerate(ASKED)]
        assert {200, 400} <= {*statuses}
        for number, (path, _) in enumerate(ASKED):
            wait_until(lambda number=number: bool(lines(request_id=f"id-{number}", message="request")))  # later
            (line,) = lines(request_id=f"id-{number}", message="request")
            assert (line["path"], line["status"], line["process"]) == (path, statuses[number], "http")
        assert lines(request_id="id-0", generated_tokens=2, finish="length"), "sizes and reason of a request"
        assert lines(request_id="id-0", message="request", finish="length")
        assert lines(request_id="id-2", message="request", error="context_length_exceeded")
        refused = server.ask("/metrics", **key).body.decode()
        counted = re.findall(r'rejections_total{.*reason="(\w+)"} ([1-9].*)', refused)
        assert ("prompt_too_long", "1.0") in counted and {name for name, _ in counted} <= {"prompt_too_long", "invalid"}
        server.signal(signal.SIGUSR2)
        wait_until(lambda: bool([line for line in lines() if "log is info" in line["message"]]))
        ask("/version", name="later")
        assert not lines(request_id="later")
        server.signal(signal.SIGHUP)  # nothing ends
        wait_until(lambda: bool([line for line in lines() if "no files to read again" in line["message"]]))
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert MARKER not in server.stderr and all("time" in line and "level" in line for line in lines())
