"""A profile on a GPU: kernels stand on the tracks of its streams, and the steps in it replay their graphs."""

import msgspec

from quire import LLM, SamplingParams
from quire.procs.step_profile import StepProfiled

from ..unit.procs.test_step_profile import asking, new, served

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
PROMPT = [11, 12, 13, 14, 15]


def test_a_profile_has_kernels_by_stream_and_graphs_go_on() -> None:
    with LLM(device="cuda", kv_cache_memory_bytes=1 << 28, use_tqdm_on_load=False) as llm:
        before = list(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
        worker = llm.engine.worker
        replayed = worker.recorder.counts.get("replayed", 0)
        reply, tokens = served(llm.engine.core, asking(30), new(40))
        assert reply.error is None, reply.error
        found = msgspec.json.decode(str(reply.value), type=StepProfiled)
        assert tokens == 40 and len(found.facts) == 30 and found.lost == 0
        runner = found.parts["model runner"]
        assert {"StepRunner.submit", "StepRunner.collect"} <= {name for _, name, *_ in runner}
        tracks = sorted({track for track, *_ in runner})
        assert not found.notes, f"{found.notes}; the tracks are {tracks}"
        kernels = [(name, begin, spent) for track, name, begin, spent in runner if track.startswith("GPU 0, stream ")]
        names = [name for name, *_ in kernels]
        assert sum(name.endswith("_kernel") for name in names) >= 30, f"{tracks}: {sorted(set(names))}"
        inside = [found.begin - 1_000_000 <= begin <= found.end + 1_000_000 for _, begin, _ in kernels]
        assert all(inside), "the clock of the GPU is not that of the calls"
        assert worker.recorder.counts["replayed"] >= replayed + 20, "the profile has no replayed graphs"
        again = list(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
        assert again == before
