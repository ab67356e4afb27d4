"""`quire trace` of ranks: a step goes on in every rank's process, down to the exchanges, and nothing of it stays."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.entry.cli.main import main
from quire.observe.calls import Span
from quire.procs.messages import Add
from quire.traces.trace import trace

from ..unit.procs.test_request_trace import asking, new, serve, traced
from .test_tour import visits

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "kv_cache_memory_bytes": 1 << 24,
    "use_tqdm_on_load": False,
    "async_depth": 1,
    "dtype": "float32",
    "max_num_seqs": 4,
}
PROMPT = [11, 12, 13, 14, 15]


def flat(span: Span) -> Iterator[Span]:
    yield span
    for inner in span.inside:
        yield from flat(inner)


def calls(llm: LLM) -> list[dict[str, list[Span]]]:
    """For each step, the calls of each rank."""
    root = trace(llm, PROMPT, max_tokens=3)
    steps = [span for span in flat(root) if span.phase]
    assert [step.phase for step in steps] == [
        "step 0: prefill, 5 tokens",
        "step 1: decode, 1 token",
        "step 2: decode, 1 token",
    ]
    return [{one.name: list(flat(one)) for one in step.inside if one.name.startswith("rank ")} for step in steps]


def exchanged(spans: list[Span]) -> list[tuple[str, str]]:
    """Exchanges; a sum with the residual (`add`) has a plain sum inside."""
    spans = [span for span in spans if span.name != "tp.add"]
    return [(span.name, span.takes) for span in spans if span.name.split(".")[0] in ("tp", "pp", "tokens")]


def test_every_rank_of_a_layer_is_followed() -> None:
    with LLM(tensor_parallel_size=2, **OPTIONS) as llm:
        steps = calls(llm)
        for step, rows in zip(steps, (5, 1, 1), strict=True):
            assert list(step) == ["rank 0 (tp 0)", "rank 1 (tp 1)"]
            for spans in step.values():
                names = [span.name for span in spans]
                way = [
                    "StepRunner.submit",
                    "DeviceState.apply",
                    "Programs.compute",
                    "embed",
                    "layers.0",
                    "layers.0.attention",
                    "layers.7",
                    "head",
                    "Sampler.sample",
                    "StepRunner.collect",
                ]
                assert [names.index(name) for name in way] == sorted(names.index(name) for name in way)
                found = exchanged(spans)
                assert found[:-1] == [("tp.all_reduce", f"f32[{rows},256]")] * (1 + 2 * 8)
                assert found[-1][0] == "tp.all_gather"
                (down,) = (span for span in spans if span.name == "layers.3.mlp.down.add")
                assert [one.name for one in flat(down)][-1] == "tp.all_reduce"
        # the ranks have one clock, and no step begins before the one before it ended
        for before, after in zip(steps, steps[1:], strict=False):
            for name in before:
                assert before[name][0].end <= after[name][0].begin
        found = traced(serve(llm.engine.core, asking(), Add((new(0, tokens=2),))))
        for one in found.steps:
            assert [call.name for call in one.calls[-2:]] == ["rank 0", "rank 1"]
            assert {"StepRunner.submit", "StepRunner.collect"} == {call.name for call in one.calls[-1].inside}
        assert "tp.all_reduce" in [span.name for span in flat(found.steps[0].calls[-1])]
        assert llm.engine.core.executor.control("trace", {"on": False}) == [[], []]
        (english, pages), (_, chinese) = visits(llm, "ranks")
        assert [page.values for page in chinese] == [page.values for page in pages] and english.facts[
            "sums"
        ] == 1 + 2 * 8
        assert pages[2].values[0] == ("rank 0 holds", "model.embed_tokens.weight: rows 0-4095 of 8192")
        assert (
            all(page.code.lines and page.values for page in pages) and pages[5].code.name == "ProcessGroup.all_reduce"
        )
        greedy = SamplingParams(temperature=0.0, max_tokens=2)
        assert len(llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0].token_ids) == 2


def test_stages_hand_over_to_each_other() -> None:
    with LLM(pipeline_parallel_size=2, **OPTIONS) as llm:
        prefill, decode, _ = calls(llm)
    first, last = "rank 0 (stage 0)", "rank 1 (stage 1)"
    owed = ("tokens.receive", "i32[1]")  # of the step before, in the prefill of the request that warmed up
    assert exchanged(prefill[first]) == [owed, ("pp.send", "f32[1,5,256]")]
    assert exchanged(prefill[last]) == [("pp.receive", "f32[1,5,256]"), ("tokens.post", "i32[1]")]
    assert exchanged(decode[first]) == [owed, ("pp.send", "f32[1,1,256]")]
    assert not {"layers.0.attention", "head"} - {span.name for span in decode[first] + decode[last]}


def test_text_and_file_show_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    flags = ["--device", "cpu", "-tp", "2", "--kv-cache-memory-bytes", str(1 << 24), "--dtype", "float32"]
    assert main(["trace", "-p", "The quire", "--max-tokens", "3", "--out", str(file), *flags]) == 0
    text = capsys.readouterr().out
    step = text[text.index("step 0: prefill") : text.index("step 1: decode")]
    for rank in ("rank 0 (tp 0)", "rank 1 (tp 1)"):
        part = step[step.index(rank) :].partition("rank 1" if rank.startswith("rank 0") else "\x00")[0]
        assert "tp.all_reduce  distributed/process_group.py" in part and "tp.all_gather" in part
        assert "layers.1 to layers.7: the same stops, 7 in all" in part
    events = json.loads(file.read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert tracks == {2: "rank 0 (tp 0)", 3: "rank 1 (tp 1)"}
    for track in (2, 3):
        sums = [event for event in events if event["tid"] == track and event["name"] == "tp.all_reduce"]
        assert len(sums) == 3 * (1 + 2 * 8) and all(event["dur"] > 0 for event in sums)
        assert {event["cat"].partition(":")[0] for event in sums} == {"step 0", "step 1", "step 2"}
