"""`quire trace`: what it shows is what was called, and nothing of it stays."""

import io
import json
import re
import shlex
import signal
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.assemble import engine as assembly
from quire.contracts.errors import ConfigError, PromptTooLong
from quire.entry.cli.main import main
from quire.observe.calls import PACKAGE, Span
from quire.observe.render_calls import events, render
from quire.procs.messages import Add
from quire.traces.lanes import lane_lines, trace_lanes
from quire.traces.step_commands import scripted, step_through, stop_names
from quire.traces.step_mode import Stepper
from quire.traces.step_words import VLLM
from quire.traces.trace import engine_stops, recording, trace
from quire.worker.taps import HiddenTap

from ..support.full import FULL
from ..support.tiny_models import Tiny, random_model, write_model
from ..unit.procs.test_request_trace import asking, new, serve, traced

OPTIONS: dict[str, Any] = {"num_threads": 1, "kv_cache_memory_bytes": 1 << 24, "use_tqdm_on_load": False}
PROMPT = [11, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(async_depth=1, **OPTIONS) as llm:
        yield llm


def flat(span: Span) -> Iterator[Span]:
    yield span
    for inner in span.inside:
        yield from flat(inner)


def names(span: Span) -> list[str]:
    return [one.name for one in flat(span)]


def steps(root: Span) -> list[Span]:
    return [span for span in flat(root) if span.phase]


def test_every_room_is_passed_in_the_order_of_the_design(llm: LLM) -> None:
    passed = names(trace(llm, "The quire is folded.", max_tokens=3))
    way = [
        "LLM.generate",
        "FrontEnd.start",
        "FrontEnd.encode",
        "EngineCore.add",
        "LLM._step",
        "EngineCore.step",
        "Scheduler.plan",
        "KVAllocator.match",
        "KVAllocator.admit",
        "InProcessExecutor.submit",
        "StepRunner.run",
        "StepRunner.submit",
        "DeviceState.apply",
        "Programs.compute",
        "step.ref.build_inputs",
        "embed",
        "Rotaries.rows",
        "layers.0",
        "layers.0.attention",
        "layers.0.mlp",
        "layers.7",
        "norm",
        "head",
        "Sampler.sample",
        "step.ref.finish_step",
        "StepRunner.collect",
        "InProcessExecutor.collect",
        "Finisher.apply",
        "FrontEnd.apply",
        "Finisher.end",
        "KVAllocator.free",
        "SequenceText.push",
    ]
    at = [passed.index(name) for name in way]
    assert at == sorted(at)


def test_prefill_and_decode_steps_are_apart_with_their_shapes(llm: LLM) -> None:
    root = trace(llm, PROMPT, max_tokens=4)
    found = steps(root)
    assert [step.phase for step in found] == [
        "step 0: prefill, 5 tokens",
        *(f"step {i}: decode, 1 token" for i in (1, 2, 3)),
    ]
    for step, rows in zip(found, (5, 1, 1, 1), strict=True):
        (layer,) = (span for span in flat(step) if span.name == "layers.3")
        assert layer.gives == f"bf16[{rows},256]" or layer.gives == f"f32[{rows},256]"
        assert layer.where.startswith("layers/decoder.py:") and f"i64[{rows}]" in layer.takes
        (head,) = (span for span in flat(step) if span.name == "head")
        assert head.gives == "f32[1,8192]"
        (sampled,) = (span for span in flat(step) if span.name == "Sampler.sample")
        assert sampled.takes == "f32[1,8192]"
    assert all(a.end <= b.begin for a, b in zip(found[:-1], found[1:], strict=True))
    for span in flat(root):
        assert span.begin <= span.end and all(
            span.begin <= inner.begin <= inner.end <= span.end for inner in span.inside
        )


def test_a_prompt_in_chunks_has_several_prefill_steps() -> None:
    with LLM(async_depth=1, max_num_batched_tokens=16, max_num_seqs=4, **OPTIONS) as llm:
        found = [step.phase for step in steps(trace(llm, list(range(40)), max_tokens=2))]
    assert found == [
        "step 0: prefill, 16 tokens",
        "step 1: prefill, 16 tokens",
        "step 2: prefill, 8 tokens",
        "step 3: decode, 1 token",
    ]


def test_a_request_after_another_one_finds_its_blocks(llm: LLM) -> None:
    text = "The quire is a stack of folded pages, and a page is a block of tokens. " * 4
    plain, warm = trace(llm, text, max_tokens=2), trace(llm, text, max_tokens=2, after=text + "More.")
    cached, length = map(int, re.search(r"; (\d+) of (\d+) tokens", warm.name).groups())  # type: ignore[union-attr]
    assert 0 < cached < length and "prefix cache" not in plain.name and "misses" not in warm.name
    prefills = [next(step.phase for step in steps(one)) for one in (plain, warm)]
    assert prefills == [f"step 0: prefill, {length} tokens", f"step 0: prefill, {length - cached} tokens"]


def test_a_prompt_that_is_not_reused_has_the_report_of_the_engine(llm: LLM) -> None:
    text = "A book is a stack of folded pages, and a page is a block of tokens. " * 4
    other = trace(llm, text, max_tokens=1, after=text.replace("stack", "heap", 1)).name
    assert re.search(
        r"; 0 of \d+ tokens.*, which misses from block 0 on: tokens, nearest \d+, tokens differ at 5$", other
    )


def test_drafts_and_their_acceptance_are_told() -> None:
    drafting = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    with LLM(async_depth=1, speculative_config=drafting, **OPTIONS) as llm:
        spans = list(flat(trace(llm, [5, 6, 7] * 8, max_tokens=12)))
    assert {"StepDrafts.inputs", "NgramDrafter.draft", "ngram.ref.propose"} <= {span.name for span in spans}
    told = [
        re.fullmatch(r"(\d+) drafted, (\d+) accepted; tokens \[(?:\d+(?:, )?)+\]", s.gives)
        for s in spans
        if s.name.endswith(".accept")
    ]
    assert told and all(told)
    counts = [tuple(map(int, one.groups())) for one in told if one]
    assert all(0 <= accepted <= drafted <= 2 for drafted, accepted in counts) and any(drafted for drafted, _ in counts)


def test_another_kernel_is_another_trace(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {choice.op: choice.name for choice in llm.engine.kernels.choices}
    called = set(names(trace(llm, PROMPT)))
    others = ("norm", "heads", "attention")  # heads are normed, too
    assert f"norm.{chosen['norm']}.rms_norm" in called and not any(name.startswith("norm.ref.") for name in called)
    by_reference = partial(assembly.resolve_engine, forced=dict.fromkeys(others, "ref"))
    monkeypatch.setattr(assembly, "resolve_engine", by_reference)
    with LLM(async_depth=1, **OPTIONS) as other:
        spans = list(flat(trace(other, PROMPT)))
    called = {span.name for span in spans}
    assert "norm.ref.rms_norm" in called and "attention.ref.paged_attention" in called
    assert not called & {f"norm.{chosen['norm']}.rms_norm", "quire_norm", "quire_attend_rows"}
    assert {s.where.partition(":")[0] for s in spans if s.name == "norm.ref.rms_norm"} == {"kernels/norm/ref.py"}


def test_the_kernels_that_were_chosen_are_those_that_are_called(llm: LLM) -> None:
    root = trace(llm, PROMPT)
    called, told = names(root), [span.decided for span in flat(root) if span.decided]
    for choice in llm.engine.kernels.choices:
        assert any(name.startswith(f"{choice.op}.{choice.name}.") for name in called) or choice.op == "activation"
        reasons = sum(one.startswith(f"{choice.op}: {choice.name} ({choice.reason}") for one in told)
        assert reasons == 1 or choice.op == "activation"
    assert f"KV cache {llm.engine.dtype.dtype} (as the computation)" in " ".join(told)
    places = {span.name: span.decided for span in flat(root) if span.decided}
    assert places["layers.0"].startswith(llm.engine.dtype.dtype) and not any("gather" in name for name in places)


def test_products_say_where_numbers_are_quantized() -> None:
    """The text names the file and line that decide, and lies at the call that computes."""
    with LLM(async_depth=1, quantization="fp8", **OPTIONS) as llm:
        root = trace(llm, PROMPT, max_tokens=2)
    products = [span for span in flat(root) if span.name.startswith("linear.") and span.way]
    assert len(products) >= 2 * 4 * 8, "four products of each layer, in both steps"
    for span in products:
        assert span.way.startswith("weight of FP8 in blocks of 128 x 128 ")
        assert "; activations quantized per token and 128 channels, " in span.way
        found = re.search(r" \((kernels/linear/\w+\.py):(\d+)\)$", span.way)
        assert found and (PACKAGE / found[1]).read_text().splitlines()[int(found[2]) - 1].startswith("def way(")
    assert not any(span.way for span in flat(root) if span.name.partition(".")[0] not in ("linear", "experts"))
    for shown, count in ((None, len(products)), (set(), 4 * 2)):  # a step in full, and a prompt's and a decode's layer
        assert sum("weight of FP8" in line for line in render(root, shown)) == count


@pytest.mark.parametrize("kernel", ["linear.quantized_ref", "experts.ref"])
def test_the_kernels_of_quantized_weights_and_of_experts_are_stops(
    kernel: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A layer has kernels of its own for its kind of weights, which are not those that the model names."""
    op, folder = kernel.partition(".")[0], ""
    if op == "experts":
        folder = str(request.getfixturevalue("shared") / "models" / "quire-tiny-moe")
    monkeypatch.setattr(assembly, "resolve_engine", partial(assembly.resolve_engine, forced={op: "ref"}))
    with LLM(folder, async_depth=1, quantization="fp8", **OPTIONS) as llm:
        spans = [span for span in flat(trace(llm, PROMPT, max_tokens=1)) if span.name.startswith(f"{kernel}.run")]
    assert spans and all(span.way.startswith("weight of FP8 ") for span in spans)
    assert all(
        " dequantized to float32, 1,024 rows at a time; activations quantized per token" in span.way for span in spans
    )


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(llm: LLM, fails: bool) -> None:
    before = {(owner, name): vars(owner).get(name, "nothing") for owner, name, _ in engine_stops(llm)}
    assert len(before) > 200
    if fails:
        with pytest.raises(PromptTooLong), recording(llm) as root:
            assert not any(vars(owner)[name] is value for (owner, name), value in before.items())
            llm.generate([1] * 99_999, use_tqdm=False)
        assert names(root)[:2] == ["", "LLM.generate"] and root.inside[0].end
    else:
        trace(llm, PROMPT)
    assert all(vars(owner).get(name, "nothing") is value for (owner, name), value in before.items())
    assert not any(isinstance(one, HiddenTap) for one in llm.engine.worker.features.all)


def test_a_request_of_a_server_shows_the_same_stops(llm: LLM) -> None:
    core = llm.engine.core
    before = {(owner, name): vars(owner).get(name, "nothing") for owner, name, _ in engine_stops(llm)}
    found = traced(serve(core, asking(), Add((new(0, tokens=3),))))
    first, second, third = found.steps
    assert [one.kind for one in found.steps] == ["prefill", "decode", "decode"]
    runner = first.calls[-1]
    assert runner.name == "model runner" and [one.name for one in runner.inside] == [
        "StepRunner.submit",
        "StepRunner.collect",
    ]
    alone = {span.name for span in flat(trace(llm, PROMPT, max_tokens=2)) if span.where.startswith("kernels/")}
    called = {one.name for call in (*first.calls, *second.calls) for one in flat(call)}
    assert alone - called <= {"sampling.draw.draw_filtered"}, "the served request is greedy"
    assert "layers.1 to layers.7: the same stops, 7 in all" in called
    assert third.calls[-1].inside[0].again and not third.calls[-1].inside[0].inside
    assert all(vars(owner).get(name, "nothing") is value for (owner, name), value in before.items())
    assert not any(isinstance(one, HiddenTap) for one in llm.engine.worker.features.all)


def test_the_file_holds_complete_events_that_lie_in_each_other(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "trace.json"
    flags = ["--num-threads", "1", "--kv-cache-memory-bytes", str(1 << 24)]
    words = ["-p", "The quire", "--max-tokens", "5", "--temperature", "0", "--out", str(file)]
    assert main(["trace", *words, *flags]) == 0
    text = capsys.readouterr().out
    assert "draw_greedy" in text and "draw_filtered" not in text
    assert "layers.1 to layers.7: the same stops, 7 in all" in text and "(as before)" in text
    assert text.count("step 0: prefill") == text.count("step 1: decode") == 1 and "step 2 to step 3: the same" in text
    events = json.loads(file.read_text())["traceEvents"]
    assert all(e["ph"] == "X" and e["pid"] == e["tid"] == 1 and e["dur"] >= 0 and e["ts"] >= 0 for e in events)
    open_ones: list[dict[str, Any]] = []
    for event in events:  # in the order of their begins: each lies in the one that is open, or begins after its end
        while open_ones and event["ts"] > open_ones[-1]["ts"] + open_ones[-1]["dur"] - 1e-9:
            open_ones.pop()
        for outer in open_ones:
            assert event["ts"] + event["dur"] <= outer["ts"] + outer["dur"] + 1e-6
        open_ones.append(event)
    assert {e["cat"].partition(", ")[0] for e in events} >= {"entry", "step 0: prefill", "step 4: decode"}
    kernel = next(e for e in events if e["args"]["where"].startswith("kernels/") and e["args"]["gives"])
    assert kernel["cat"].startswith("step 0") and kernel["args"]["takes"]


def test_full_leaves_out_nothing(llm: LLM) -> None:
    root = trace(llm, PROMPT)
    full = list(render(root, None))
    assert sum(" ms  " in line for line in full) == len(list(flat(root)))
    assert not any("as before" in line or "the same" in line for line in full)
    assert len(list(render(root, set()))) < len(full) / 3


def test_a_file_that_cannot_be_written_is_the_users_to_know(capsys: Any) -> None:
    flags = ["--num-threads", "1", "--kv-cache-memory-bytes", str(1 << 24)]
    assert main(["trace", "", "Hello", "--max-tokens", "1", "--out", "/no/such/folder/trace.json", *flags]) == 3
    assert "--out: the folder of /no/such/folder/trace.json does not exist" in capsys.readouterr().err


def stepped(llm: LLM, commands: list[str], **given: Any) -> list[str]:
    """Lines that step mode prints."""
    lines: list[str] = []
    trace(llm, PROMPT, stepper=Stepper(llm, stop_names(llm), scripted(commands), lines.append), **given)
    return [line.strip() for line in "\n".join(lines).splitlines() if line.strip()]


def test_step_mode_shows_values_of_the_engine(llm: LLM) -> None:
    commands = [
        "b StepRunner.submit",
        "c",
        "b StepRunner.submit",
        "b embed",
        "c",
        "n",
        "b embed",
        "b layers.3.attention",
    ]
    commands += [
        "c",
        "p kv_slots",
        "p x",
        "p x[4, :2]",
        "p x[5]",
        "p x[a]",
        "p nothing",
        "p",
        "p result",
        "c 3",
        "# a comment",
        "b layers.99.attention",
        "b kernels/attention/native.py:1",
        "b AttentionImpl.forward",
        "w",
        "list",
        "b layers.3.*",
        "b head",
        "s",
        "b layers.3.attention",
        "b layers.3.*",
    ]
    lines = stepped(llm, [*commands, "c", "n", "p self", "n", "b", "", "what", "b head", "c"], max_tokens=2)
    told = "\n".join(lines)
    assert "step 0: prefill, 5 tokens" in lines and "step 1: decode, 1 token" not in lines, "c runs to the end"
    assert f"slot 0: request {llm.engine.core.scheduler.table.handle[0]}, tokens 0 to 5, block table: 1" in lines
    hidden = llm.engine.worker.model.embed(torch.tensor(PROMPT))
    (embedded,) = (line for at, line in enumerate(lines) if lines[at - 1].startswith("embed returns after "))
    assert f"[5,256]  norm {float(hidden.float().norm()):.5g}  [" in embedded
    at = next(line for line in lines if line.startswith("layers.3.attention  layers/attention.py:"))
    assert at.endswith("vLLM: Attention or MLAAttention, with the projections around it")
    block_size = llm.engine.core.facts.block_size
    slots = [line for line in lines if line.startswith("kv_slots ") or ".kv_slots " in line]
    assert any(f"i64[5]  [{', '.join(str(block_size + i) for i in range(5))}]" in line for line in slots)
    assert f"KV cache {llm.engine.dtype.dtype} (" in told and "nothing here is called 'nothing': x, " in told
    (best,) = (line for line in lines if line.startswith("best tokens of the last row: "))
    assert best.count(", ") >= 4 and "there is no command 'what': h lists them." in lines
    assert "halts at: layers.3.attention, layers.3.*" in lines and "self = LMHead()" in lines
    assert "p prints a value: give its name, such as p result." in lines and "[4]" in told
    assert "x[5]: bf16[5,256] has no such place (index 5 is out of bounds for dimension 0 with size 5)." in lines
    assert "x[a]: an index is of numbers: [5], [1,0], [2:4]." in lines
    assert any(re.fullmatch(r"x\[4,:2\] +bf16\[2\]  norm .*", line) for line in lines)
    assert "c takes no words, and '3' stands behind it: leave it out." in lines and not any(
        "'#'" in one for one in lines
    )
    assert re.search(r"no stop of this model is called 'layers.99.attention', .* Near: layers\.\d\.attention, ", told)
    assert "AttentionImpl.forward is a name of vLLM; here the stop is attention.*.paged_attention: give this." in lines
    assert "no stop of this model is called 'kernels/attention/native.py:1', so" in told
    assert "def forward(" in told and any(one.startswith("StepRunner.run  worker/") for one in lines)


@pytest.mark.parametrize(("typed", "code"), [("", 0), ("n\nq\n", 0), (None, 130)])
def test_step_mode_ends_with_its_commands_and_with_ctrl_c(
    llm: LLM, typed: str | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {(owner, name): vars(owner).get(name, "nothing") for owner, name, _ in engine_stops(llm)}

    class Keyboard(io.StringIO):
        def readline(self, size: int = -1) -> str:
            if typed is None:
                signal.raise_signal(signal.SIGINT)
            return super().readline(size)

    monkeypatch.setattr("sys.stdin", Keyboard(typed or ""))
    if code:
        with pytest.raises(KeyboardInterrupt):
            step_through(llm, "The", None, max_tokens=2)
    else:
        assert step_through(llm, "The", None, max_tokens=2) == 0
        assert capsys.readouterr().out.endswith("left: the request goes no further.\n")
    assert all(vars(owner).get(name, "nothing") is value for (owner, name), value in before.items())
    assert len(llm.generate(PROMPT, SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids) == 1


def test_commands_of_a_file(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "commands").write_text("# the last layer\nb layers.7\nb KVAllocator.trim\n\nc\nc\nc\n")
    (tmp_path / "wrong").write_text("n\nc 3\n")
    (tmp_path / "unmet").write_text("b layers.8\n")
    assert step_through(llm, "The", str(tmp_path / "commands"), max_tokens=2) == 0
    out = capsys.readouterr().out
    assert out.count("(step) c") == 3 and "(step) #" not in out
    assert out.endswith("the request has ended.\nit did not come to KVAllocator.trim.\n")
    with pytest.raises(ConfigError, match=r"--script: b layers.8: no stop of this model .* Near: layers\.[0-7]"):
        step_through(llm, "The", str(tmp_path / "unmet"), max_tokens=2)
    assert len(re.findall(r"^ +layers\.7  layers/decoder\.py:\d+  vLLM: Qwen3DecoderLayer", out, re.M)) == 2
    for words, said in (
        (["--script", "none", "--step"], "--script: none cannot be read (No such file or directory)"),
        (["--script", "none"], "--script has commands of --step: add --step."),
        (["no-model", "A", "--step", "--script", str(tmp_path / "wrong")], "wrong: c takes no words, and '3' stands"),
        (["-p", ""], "--prompt is an empty text: give it one, or leave it out."),
        (["--step", "--json"], "--step halts at stops of a request here: leave --json out."),
        (["--step", "-tp", "2"], "--step halts this process, and ranks are processes of their own"),
        (["--lanes", "-dp", "2"], "--lanes shows this process, and ranks are processes of their own"),
        (
            ["--lanes", "--step", "--after", "x"],
            "--lanes shows the steps of a request here: leave --step and --after out.",
        ),
    ):
        assert main(["trace", *words]) == 3
        assert said in " ".join(capsys.readouterr().err.split())


def test_the_cpu_plans_and_submits_a_step_while_the_device_runs_the_one_before() -> None:
    with LLM(async_depth=2, max_model_len=64, **OPTIONS) as llm:
        before = {(owner, name): vars(owner).get(name, "nothing") for owner, name, _ in engine_stops(llm)}
        root = trace_lanes(llm, PROMPT, max_tokens=4)
        assert all(vars(owner).get(name, "nothing") is value for (owner, name), value in before.items())
    cpu, device = root.inside
    assert [step.name for step in device.inside] == [
        "step 0: prefill, 5 tokens",
        *(f"step {number}: decode, 1 token" for number in (1, 2, 3)),
    ]
    calls = {span.name: span for span in flat(cpu)}
    order = names(cpu)
    for number, step in enumerate(device.inside):
        submitted, collected = (
            calls[f"EngineCore.submit of step {number}"],
            calls[f"InProcessExecutor.collect of step {number}"],
        )
        assert submitted.begin <= step.begin < step.end <= collected.end, "a step runs from its submit to its collect"
        assert calls[f"Finisher.apply of step {number}"].end <= calls[f"FrontEnd.apply of step {number}"].begin
        if number:
            assert device.inside[number - 1].end <= step.begin
            done = f"InProcessExecutor.collect of step {number - 1}"
            assert order.index(f"EngineCore.begin_step of step {number}") < order.index(done), "planned ahead"
    lines = list(lane_lines(root))
    told = [line for line in lines if "device idle before: " in line and "CPU works " in line]
    outermost = [name for name in calls if " of step " in name and not name.startswith("InProcessExecutor.submit")]
    assert len(told) == 4 and all(any(f"  {name}  " in line for line in lines) for name in outermost)
    tracks = {e["args"]["name"]: e["tid"] for e in events(root, root.begin) if e["ph"] == "M"}  # type: ignore[index]
    drawn = [e["name"] for e in events(root, root.begin) if e["ph"] == "X" and e["tid"] == tracks["device"]]
    assert drawn == [step.name for step in device.inside] and tracks.keys() == {"CPU", "device"}


OF_EXPERTS = {"layers.*.router*", "layers.*.experts", "experts.*.run*", "routing.*", "latent.*"}


@pytest.mark.parametrize("family", ["", *["deepseek_v3"] * FULL])
def test_names_of_vllm_stand_beside_stops_that_exist(llm: LLM, family: str, tmp_path: Path) -> None:
    """Every row fits a stop of the bundled model, or one of a small DeepSeek; docs/coming-from-vllm.md has its name."""
    stops = {name for _, _, name in engine_stops(llm)}
    known = {"layers.[0-9][0-9]"}
    if family:
        write_model(random_model(Tiny(family=family), 0), tmp_path, family)
        with LLM(tmp_path, async_depth=1, skip_tokenizer_init=True, **OPTIONS) as other:
            stops |= {name for _, _, name in engine_stops(other)}
            lines = stepped(other, ["b layers.1.mlp.experts", "c", "p ids", "c", "c"], max_tokens=2)
        assert sum(line.startswith("layers.1.mlp.experts  layers/moe.py:") for line in lines) == 2
        assert any(line.startswith("ids ") and "i32[5," in line for line in lines)
    else:
        known |= OF_EXPERTS
    missing = {pattern for pattern, _ in VLLM if not any(fnmatch(name, pattern) for name in stops)}
    assert missing <= known
    page = (PAGE.parent / "coming-from-vllm.md").read_text()
    assert not [name for _, name in VLLM if re.split(r"\W", name)[0] not in page]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "trace.md"
OF_A_CPU = ("kernels/", "quantization/", "layers/linear.py")  # files of stops that some kernels do without


def stops_of(lines: list[str]) -> list[str]:
    """Lines of a trace without what differs between machines: times, number types, line numbers."""
    bare = [re.sub(r"^ *[\d.]+ ms ", "", line) for line in lines]
    return [re.sub(r"\.(py|c):\d+", r".\1", re.sub(r"\b(bf16|f32)\b|bfloat16|float32", "float", line)) for line in bare]


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Every stop of the example comes in its order, at its depth, in its file and with its shapes."""
    page = PAGE.read_text()
    (command,) = re.findall(r"^    quire (trace -p .*?)   ", page, re.MULTILINE)
    assert main([*shlex.split(command), "--num-threads", "1", "--device", "cpu"]) == 0
    printed = stops_of(capsys.readouterr().out.splitlines())
    example = page.partition("behind each file, too):\n")[2].partition("\nA call that repeats")[0].splitlines()
    shown = [line.removesuffix("...").rstrip() for line in stops_of([line[4:] for line in example])]
    at = 0
    for line in filter(None, map(str.rstrip, shown)):
        if any(name in line for name in OF_A_CPU) and not any(line.split()[0] in other.split() for other in printed):
            continue
        at = next((i + 1 for i in range(at, len(printed)) if printed[i].startswith(line)), 0)
        assert at, f"the command does not print {line.strip()!r} there"
    assert sum("  " in line.strip() for line in shown) >= 15
    assert not re.search(r"\.(py|c):\d", page), "line numbers are wrong after the next change"


def test_the_executor_is_shown_where_it_does_its_work(llm: LLM) -> None:
    (first, *_) = (span for span in flat(trace(llm, PROMPT)) if span.name == "InProcessExecutor.submit")
    assert first.where.startswith("procs/in_process.py:") and [one.name for one in first.inside] == ["StepRunner.run"]


def test_a_prompt_in_the_place_of_the_model_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "no such model"]) == 3
    assert "'no such model' does not exist" in (said := capsys.readouterr().err) and "quire trace -p PROMPT" in said
    assert main(["trace", "no such model", "-p", "a prompt"]) == 3
    assert "quire trace -p" not in capsys.readouterr().err
