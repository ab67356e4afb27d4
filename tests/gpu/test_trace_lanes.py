"""Lanes and step mode of a trace on a GPU: events tell when the device ran a step; graphs are replayed meanwhile."""

from quire import LLM
from quire.observe.calls import Span
from quire.traces.lanes import lane_lines, trace_lanes
from quire.traces.step_commands import stop_names
from quire.traces.step_mode import Stepper
from quire.traces.trace import trace

PROMPT = [11, 12, 13, 14, 15]
SLACK = 1_000_000  # nanoseconds between the clocks of host and device


def flat(span: Span) -> list[Span]:
    return [span, *(one for inner in span.inside for one in flat(inner))]


def test_steps_on_the_device_lie_between_their_submit_and_their_collect() -> None:
    with LLM(device="cuda", kv_cache_memory_bytes=1 << 28, use_tqdm_on_load=False) as llm:
        assert llm.engine.worker is not None
        before = llm.engine.worker.recorder.counts["replayed"]
        root = trace_lanes(llm, PROMPT, max_tokens=16)
        assert llm.engine.worker.recorder.counts["replayed"] >= before + 3 * 10, "a trace made its steps eager"
        cpu, device = root.inside
        calls = {span.name: span for span in flat(cpu)}
        assert [step.name for step in device.inside][:2] == ["step 0: prefill, 5 tokens", "step 1: decode, 1 token"]
        assert len(device.inside) == 16 and len(list(lane_lines(root))) > 3 * 16
        for number, step in enumerate(device.inside):
            submitted = calls[f"EngineCore.submit of step {number}"]
            (collected,) = (one for name, one in calls.items() if name.endswith(f".collect of step {number}"))
            assert submitted.begin - SLACK <= step.begin < step.end <= collected.end + SLACK
            if number:
                assert device.inside[number - 1].end <= step.begin + SLACK // 10
        print(*lane_lines(root), sep="\n")


def test_step_mode_reads_tensors_of_the_device() -> None:
    lines: list[str] = []
    commands = iter(["b StepRunner.submit", "b head", "c", "c", "s", "n", "n", "b head", "c"])
    with LLM(device="cuda", async_depth=1, enforce_eager=True, kv_cache_memory_bytes=1 << 28) as llm:
        stepper = Stepper(llm, stop_names(llm), lambda: next(commands, None), lines.append)
        trace(llm, PROMPT, max_tokens=1, stepper=stepper)
    text = "\n".join(lines)
    assert "tokens 0 to 5, block table: 1" in text and "best tokens of the last row: " in text
