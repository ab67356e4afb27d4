"""`quire trace --from http`: a request through the processes of a server, on one clock, and nothing of it stays."""

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.config.serve import ServerConfig
from quire.entry.cli.main import main
from quire.entry.core_process import build
from quire.kernels.select import select
from quire.observe.calls import PACKAGE, Span
from quire.observe.render_calls import render
from quire.procs.messages import CoreStart
from quire.procs.request_trace import core_stops
from quire.traces.http_trace import http_stops, trace_http

from ..support.core_thread import CoreThread
from .in_process import running_inside
from .serving import PATIENCE, wait_until

WAY = [
    ("client", "POST /v1/chat/completions"),
    ("HTTP process", "LimitedProtocol.connection_made"),
    ("HTTP process", "LimitedProtocol.on_message_complete"),
    ("HTTP process", "RequestScope.__call__"),
    ("HTTP process", "Endpoint.__call__"),
    ("HTTP process", "RequestDecoder.decode"),
    ("HTTP process", "ChatTemplate.render_here"),
    ("HTTP process", "Tokenizer.encode"),
    ("HTTP process", "FrontEnd.start"),
    ("HTTP process", "CoreClient.send"),
    ("HTTP process", "wire.encode"),
    ("", "wire to the core"),
    ("engine core", "EngineCore.add"),
    ("engine core", "EngineCore.step"),
    ("engine core", "Scheduler.plan"),
    ("engine core", "Finisher.apply"),
    ("", "wire from the core"),
    ("HTTP process", "Messages.decode"),
    ("HTTP process", "FrontEnd.take"),
    ("HTTP process", "SequenceText.push"),
    ("HTTP process", "ChatWriter.piece"),
    ("HTTP process", "EventStream.write"),
    ("client", "reads an event"),
]  # process and stop


def flat(span: Span, process: str = "") -> Iterator[tuple[str, Span]]:
    yield process, span
    process = span.name if span.name in ("client", "HTTP process", "engine core") else process
    for inner in span.inside:
        yield from flat(inner, process)


def test_every_process_is_passed_in_the_order_of_time_and_nothing_stays(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "http.json"
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in http_stops()]
    assert all(function.__name__ == name for _, name, function in before), "a wrapper has stayed"
    flags = ["--device", "mock", "--max-tokens", "3", "--temperature", "0.25", "--json", "--out", str(file)]
    assert main(["trace", "--from", "http", "-p", "Hello", *flags]) == 0
    assert all(vars(owner)[name] is function for owner, name, function in before)
    root = msgspec.json.decode(capsys.readouterr().out, type=Span)
    found = [(process, span) for process, span in flat(root)]
    passed = [(process, span.name) for process, span in found]
    at = -1
    for stop in WAY:
        at = passed.index(stop, at + 1)
    assert [span.phase for span in root.inside if span.phase] == [
        "step 0: prefill, 9 tokens",
        "step 1: decode, 1 token",
        "step 2: decode, 1 token",
    ]
    guards = [span.takes for _, span in found if span.name == "Guard.__call__"]
    assert {"ServesPage", "Gate", "json_only"} <= set(guards) and len(set(guards)) == len(guards)
    (asked,) = (span for _, span in found if span.name.startswith("POST "))
    body = {"max_tokens": 3, "ignore_eos": True, "temperature": 0.25, "stream": True}
    assert asked.takes == f"{len(json.dumps({'messages': [{'role': 'user', 'content': 'Hello'}]} | body))} bytes"
    assert passed.count(("", "wire to the core")) == 1 and passed.count(("", "wire from the core")) == 3
    assert all(root.begin <= span.begin <= span.end <= root.end for _, span in found)
    for process, span in found:
        inside = [one for one in span.inside if process or span.name == "engine core"]
        assert all(span.begin <= one.begin and one.end <= span.end for one in inside), span.name
    for name, size in (("Exchange.body", r"\d+ bytes"), ("Tokenizer.encode", r"ints\[9\]")):
        assert any(one.name == name and re.fullmatch(size, one.gives) for _, one in found)
    for name, of in (("Tokenizer.encode", "tokenizer.json of"), ("ChatTemplate.render_here", "the template of")):
        (told,) = {one.decided for _, one in found if one.name == name}
        place, line = re.search(r" ([\w/]+\.py):(\d+)$", told).groups()  # type: ignore[union-attr]
        assert told.startswith(of) and (PACKAGE / place).read_text().splitlines()[int(line) - 1]
    events = json.loads(file.read_text())["traceEvents"]
    tracks = {one["args"]["name"]: one["tid"] for one in events if one["ph"] == "M"}
    assert tracks.keys() == {"client", "HTTP process", "engine core"}
    names = {one["name"] for one in events if one["tid"] == tracks["HTTP process"] and one["ph"] == "X"}
    assert {"RequestScope.__call__", "FrontEnd.take"} <= names


def test_a_request_of_a_running_server(capsys: Any) -> None:
    with running_inside(mock_step_ms=3) as inside:
        url, stops = inside.server.url, [*core_stops(inside.core)]
        before = [vars(owner).get(name) for owner, name, _ in stops]
        client = http.client.HTTPConnection("127.0.0.1", inside.server.port, timeout=PATIENCE)
        body = json.dumps({"prompt": "Once", "max_tokens": 4000, "ignore_eos": True})
        client.request("POST", "/v1/completions", body, {"content-type": "application/json", "x-request-id": "a/b"})
        wait_until(lambda: b'"running"' in inside.server.ask("/debug/requests").body, "a request that runs")
        assert main(["trace", "--url", url, "--request", "cmpl-a/b"]) == 0
        out = capsys.readouterr().out
        assert f"request a/b of {url}, 2 tokens of prompt; eager" in out and "MockExecutor.submit" in out
        assert re.search(r"step \d+: decode, 1 token from \d+ on; 1 request, 1 token in the step", out)
        assert before == [vars(owner).get(name) for owner, name, _ in stops]
        for words, said in (
            (["--request", "nobody"], "/debug/requests lists them."),
            (["--request", "a/b", "-q", "fp8"], "-q: with --url the server has its own options"),
            (["--from", "start", "--full"], "shortened: leave --from and --full out."),
        ):
            assert main(["trace", "--url", url, *words]) != 0
            told = capsys.readouterr().err
            assert said in told and "Is it a server" not in told
        client.close()
        wait_until(lambda: b'"abort"' in inside.server.ask("/debug/requests").body, "the end of the request")
        assert main(["trace", "--url", url, "--request", "a/b"]) != 0
        assert "the request has ended" in capsys.readouterr().err
    assert main(["trace", "--request", "a"]) == 3 and "add --url" in capsys.readouterr().err
    with running_inside(web=False) as inside:
        assert main(["trace", "--url", inside.server.url, "--request", "a"]) != 0
        assert "was started with --no-web: start it without" in capsys.readouterr().err


def test_the_steps_go_down_to_the_kernels_that_the_plan_chose() -> None:
    config = ServerConfig.from_flat(
        host="127.0.0.1", port=0, access_log=False, num_threads=1, kv_cache_memory_bytes=1 << 22
    )
    made: list[CoreThread] = []

    def launch(start: CoreStart) -> Any:
        made.append(CoreThread(start, build))
        return made[0]

    root = trace_http(config, "a", max_tokens=2, launch=launch)
    assert made[0].core is not None
    spans = [span for _, span in flat(root)]
    plan = json.loads(str(made[0].core.facts.plans["engine"]))
    for kernel in plan["kernels"]:
        called = [one for one in spans if one.name.startswith(f"{kernel['op']}.{kernel['name']}.")]
        told = [one.decided for one in called if one.decided]
        assert called or kernel["op"] == "activation"
        assert all(kernel["reason"] in one and f"{kernel['op']}: {kernel['name']}" in one for one in told)
        assert all(f"select.py:{select.__code__.co_firstlineno}" in one for one in told) and len(told) <= 1
    runner = [one for one in spans if one.name == "model runner"]
    assert len(runner) == 2 and {"Sampler.sample", "head"} <= {one.name for _, one in flat(runner[0])}
    assert any("decided from: at most 2,048 tokens and 256 requests" in line for line in render(root, None))
