"""/debug/profile of a server on a CPU: trace events that Perfetto opens, one profile at a time, everything put back."""

import http.client
import json
import threading
from collections import defaultdict
from typing import Any

from .in_process import running_inside
from .serving import PATIENCE, wait_until

LONG = {"prompt": "Once", "max_tokens": 250, "ignore_eos": True, "temperature": 0}


def checked(body: bytes) -> dict[str, Any]:
    """The trace, whose events are as the format wants them, and whose slices of a track lie in or behind each other."""
    found: dict[str, Any] = json.loads(body)
    tracks = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    for event in found["traceEvents"]:
        assert event["ph"] in ("M", "X") and event["name"] and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert event["args"].keys() <= {"name", "sort_index"}
    for slices in tracks.values():
        open_ends: list[float] = []
        for begin, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= begin + 0.001:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.001
            open_ends.append(end)
    return found


def test_a_profile_is_a_trace_of_named_slices_and_there_is_one_at_a_time() -> None:
    with running_inside(device="cpu", model="quire-tiny") as inside:
        server, core = inside.server, inside.core
        before = set(vars(core)), set(vars(core.scheduler))
        told: list[Any] = []
        thread = threading.Thread(target=lambda: told.append(server.complete(**LONG)))
        thread.start()
        wait_until(lambda: inside.engine.num_live == 1, "a running request")
        answer = server.ask("/debug/profile?steps=5&seconds=20")
        assert answer.status == 200 and "attachment" in answer.headers["content-disposition"]
        found = checked(answer.body)
        thread.join(PATIENCE)
        assert told[0].status == 200
        slices = [event for event in found["traceEvents"] if event["ph"] == "X"]
        steps = [event for event in slices if event["name"].startswith("step ")]
        assert len(steps) == 5 and all(event["args"]["tokens"] for event in steps)
        names = {event["name"] for event in slices}
        assert {"EngineCore.step", "Scheduler.plan", "prefill", "decode"} <= names
        assert any(name.startswith("aten::") for name in names)
        processes = {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
        assert processes == {"requests", "engine core", "model runner"}
        assert found["otherData"]["slices_left_out"] == 0 and found["otherData"]["notes"] == []
        for query, field in (("seconds=0", "seconds"), ("seconds=x", "steps"), ("steps=0", "steps")):
            assert server.ask(f"/debug/profile?{query}").json()["error"]["param"] == field

        waiting = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        waiting.request("GET", "/debug/profile?seconds=30")
        wait_until(lambda: "step" in vars(core), "a profile of an idle engine")
        assert server.ask("/debug/profile?seconds=1").status == 409
        assert server.ask("/debug/trace").json()["error"]["code"] == "trace_runs"
        waiting.close()  # the caller leaves: everything is put back, and the next one gets a profile
        wait_until(lambda: "step" not in vars(core), "the end of the profile")
        empty = checked(server.ask("/debug/profile?seconds=0.05").body)
        assert not any(event["name"].startswith("step ") for event in empty["traceEvents"])
        assert (set(vars(core)), set(vars(core.scheduler))) == before
