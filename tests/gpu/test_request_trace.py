"""A trace of a request beside others on a GPU: it reaches the kernels, and graphs are replayed again after it."""

from collections.abc import Iterator

from quire import LLM, SamplingParams
from quire.observe.calls import Span
from quire.procs.messages import Add

from ..unit.procs.test_request_trace import asking, new, serve, traced

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
PROMPT = [11, 12, 13, 14, 15]


def names(spans: list[Span]) -> Iterator[str]:
    for span in spans:
        yield span.name
        yield from names(span.inside)


def test_a_request_beside_another_one_and_graphs_after_it() -> None:
    with LLM(device="cuda", kv_cache_memory_bytes=1 << 28, use_tqdm_on_load=False) as llm:

        def tokens() -> list[int]:
            llm.reset_prefix_cache()
            return list(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)

        before = tokens()
        worker = llm.engine.worker
        features = worker.features.all
        found = traced(serve(llm.engine.core, Add((new(0, tokens=60),)), asking(), Add((new(1, tokens=20),))))
        assert [step.kind for step in found.steps] == ["prefill", "decode", "decode"]
        assert all(step.requests == 2 for step in found.steps[1:])
        for step in found.steps:
            runner = step.calls[-1]
            assert runner.name == "model runner"
            assert [one.name for one in runner.inside] == ["StepRunner.submit", "StepRunner.collect"]
        called = set(names(found.steps[0].calls))
        assert {"Sampler.sample", "layers.0.attention"} <= called and any(name.endswith("_kernel") for name in called)
        assert worker.features.all == features
        counted = dict(worker.recorder.counts)
        assert tokens() == before
        assert worker.recorder.counts["replayed"] >= counted.get("replayed", 0) + 30, "graphs are not replayed any more"
