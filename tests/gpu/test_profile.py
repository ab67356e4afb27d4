"""A profile on a GPU: kernels stand on the tracks of its streams, and the steps in it replay their graphs."""

import json
from typing import Any

from . import children
from .test_bad_states import python

OPTIONS: dict[str, Any] = {"device": "cuda", "kv_cache_memory_bytes": 1 << 28, "use_tqdm_on_load": False}


def test_a_profile_has_kernels_by_stream_and_graphs_go_on() -> None:
    done = python(children.profiled, json.dumps(OPTIONS))
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    found, runner = said["profile"], said["profile"]["parts"]["model runner"]
    assert said["tokens"] == 40 and len(found["facts"]) == 30 and found["lost"] == 0
    assert {"StepRunner.submit", "StepRunner.collect"} <= {name for _, name, *_ in runner}
    tracks = sorted({track for track, *_ in runner})
    assert not found["notes"], f"{found['notes']}; the tracks are {tracks}; {done.stderr[-2000:]}"
    kernels = [(name, begin) for track, name, begin, _ in runner if track.startswith("GPU 0, stream ")]
    names = [name for name, _ in kernels]
    assert sum(name.endswith("_kernel") for name in names) >= 30, f"{tracks}: {sorted(set(names))}"
    earliest, latest = found["begin"] - 1_000_000, found["end"] + 1_000_000
    outside = [(name, begin) for name, begin in kernels if not earliest <= begin <= latest]
    assert not outside, f"the clock of the GPU is not that of the calls, {earliest} to {latest}: {outside}"
    assert said["replayed"] >= 20, "the profile has no replayed graphs"
    assert said["texts"][0] == said["texts"][1]
