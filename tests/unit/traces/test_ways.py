"""`quire trace --from start|load|flag`: beside the engine's own objects, and what cannot be shown."""

import json
import re
from pathlib import Path

import pytest
import torch

from quire import LLM
from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.entry.cli.main import main
from quire.kernels.experts.weights import ExpertWeights
from quire.observe.calls import PACKAGE, Span
from quire.traces.decisions import decisions_of, with_decisions
from quire.traces.flag_trace import flag_way, readers
from quire.traces.load_trace import _tensors, load_lines
from quire.weights.files import read_checkpoint

SMALL = ("--num-threads", "1", "--kv-cache-memory-bytes", "4M", "--max-model-len", "64")
TENSOR = "model.layers.2.mlp.up_proj"


def test_a_start_has_its_phases_and_its_reasons(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["trace", "--from", "start", "--out", str(tmp_path / "start.json"), *SMALL]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[2].rstrip(","): line for line in out.splitlines()}
    indents = {name: len(line) - len(line[12:].lstrip()) for name, line in lines.items()}
    for outer, inner in (("LLM", "assemble"), ("assemble", "load_text"), ("assemble", "resolve_engine")):
        assert indents[outer] < indents[inner], out
    assert {"load_weights", "build_model"} <= lines.keys()
    assert re.search(r"resolve_dtype  plan/dtype\.py:\d+  -> bfloat16 \(as in the checkpoint\)", out)
    assert re.search(r"choose_kernels .* linear: \w+", out)
    assert re.findall(r"DecoderBlock(?:, (\d+) times)?", out) in (["8"], [])  # all, or too fast to be shown
    places = re.findall(r" ([\w.]+)(?:, \d+ times)?  ([\w/]+\.py):(\d+)", out)
    assert len(places) > 10
    for name, file, number in places:
        source = (PACKAGE / file).read_text().splitlines()[int(number) - 1 : int(number) + 4]
        assert any(name.rpartition(".")[2] in one or "__init__" in one for one in source), (name, file, number)
    events = json.loads((tmp_path / "start.json").read_text())["traceEvents"]
    assert {"assemble", "load_weights"} <= {one["name"] for one in events}


def test_a_tensor_ends_in_the_kernel_s_memory() -> None:
    options = {"num_threads": 1, "kv_cache_memory_bytes": 4 << 20, "max_model_len": 64, "use_tqdm_on_load": False}
    with LLM(str(bundled_model()), **options) as llm:
        lines = list(load_lines(llm, TENSOR))
        layer = llm.engine.runner.model.layers[2].mlp.gate_up  # type: ignore[union-attr]
        address = layer.packed.weight.data_ptr() if hasattr(layer.packed.weight, "data_ptr") else None
    header = read_checkpoint(bundled_model()).tensors[TENSOR + ".weight"]
    assert f"bytes {header.offset:,} to {header.offset + header.num_bytes:,} of {header.file.name}" in lines[0]
    assert "rows 768 to 1,536 of layers.2.mlp.gate_up.weight" in lines[1]
    assert any(
        re.match(r"  pack  quire\.kernels\.linear\.\w+\.pack_gated  kernels/linear/\w+\.py:\d+", one) for one in lines
    )
    memory = [one for one in lines if one.startswith("  memory")]
    assert memory and (address is None or f"0x{address:x} on cpu" in memory[0])


@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "a list"])
def test_an_expert_s_tensor_ends_in_one_place(listed: bool) -> None:
    matrices = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)  # of three experts
    packed: object = ExpertWeights(*matrices)
    if listed:
        packed = [ExpertWeights(*matrices[:, place]) for place in range(3)]
    (one,) = _tensors(packed, "down", 2, 3)
    assert torch.equal(one, matrices[1, 2])
    assert len(list(_tensors(packed))) == (6 if listed else 2)


def test_the_way_of_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig.from_flat(model=str(bundled_model()), quantization="fp8", device="cpu")
    way = flag_way(config, "quantization", "flag -q")
    assert way.field.startswith("LoadConfig.quantization: str | None, default None  config/engine.py:")
    assert any(one.where.startswith("assemble/obtain.py:") for one in way.readers)
    assert any(path == "model.format" and other == "online fp8" for path, _, other in way.changes)
    for one in (reader for reader in way.readers if not reader.depth):
        file, _, line = one.where.partition(":")
        assert ".quantization" in (PACKAGE / file).read_text().splitlines()[int(line) - 1]
    (run,) = [use for use in way.uses if use.function.endswith(".run")]
    assert re.fullmatch(r"quire\.kernels\.linear\.\w+\.run", run.function)
    file, _, line = run.where.partition(":")
    assert (PACKAGE / file).read_text().splitlines()[int(line) - 1].startswith("def run(")
    assert any(caller.startswith("Linear.forward (layers/linear.py:") for caller in run.callers)
    assert main(["trace", "--from", "flag", "--scheduling-policy", "priority"]) == 0
    out = capsys.readouterr().out
    assert "--scheduling-policy = 'priority', from flag --scheduling-policy" in out
    assert "changes nothing in the plan" in out


def test_every_option_of_an_engine_is_read() -> None:
    """A flag that nothing reads would be accepted and ignored; `trace --from flag` would show no reader."""
    found = {one.function for one in readers("scheduler", "SchedulerConfig", "max_num_seqs")}
    assert {"SchedulerConfig.sequences", "Scheduler.__init__", "Scheduler._step_budget", "Scheduler.plan"} <= found
    assert not list(readers("scheduler", "SchedulerConfig", "no_such_option"))


def test_what_a_plan_has_under_the_name_of_an_option_is_no_option() -> None:
    """`engine.device.device` is the device that was found; `device.device` is that of a tensor."""
    sources = [one.line for one in readers("device", "DeviceConfig", "device")]
    assert len(sources) > 5 and all("config.device.device" in line for line in sources), sources


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "flag"], "add one"),
        (["--tensor", "x"], "add --from load"),
        (["--url", "http://127.0.0.1:1", "--request", ""], "--request is an empty text"),
        (["--max-tokens", "0"], "give 1 or more"),
        (["--top-p", "0.5", "--from", "load"], "--top-p is of a request"),
        (["--from", "flag", "--attention-backend", "X"], "--attention-backend changes nothing: Quire chooses kernels"),
        (["--enable-dbo"], "a step is not split into two batches"),
        (["--from", "start", "--after", "x"], "a trace of a request"),
        (["--from", "load", "--out", "x.json"], "has no times"),
        (["--from", "load", "-p", "x"], "sends no prompt"),
        ([".", "x", "--from", "start"], "sends no prompt"),
        (["--from", "load", "--tensor", TENSOR + "x", *SMALL], "Near: " + TENSOR),
        (["--from", "load", "--tensor", "q_proj", *SMALL], "Near: model.layers.0.self_attn.q_proj.weight"),
        (["--from", "load", "--tensor", "layers.0.attention.qkv"], "is made of model.layers.0.self_attn.q_proj.weight"),
        (["--from", "load", "--tensor", "lm_head"], "The head is tied to the embedding"),
    ],
)
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *words]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_decision_stands_at_functions_that_a_kernel_takes_from_others() -> None:
    plan = {
        "memory": {"num_blocks": 1, "block_size": 1, "components": [], "cache_reason": "r"},
        "model": {"dtype": "bfloat16", "dtype_reason": "r"},
        "kernels": [{"op": "latent", "name": "native", "reason": "first", "rejected": [["triton", "runs on cuda"]]}],
        "moe": {
            "decode": {"experts": "panels", "dispatcher": "none", "decided": "fits", "candidates": [["a", "b", "c"]]}
        },
    }
    root = Span(
        "", "", inside=[Span("latent.cpu.absorbed", ""), Span("latent.ref.x", ""), Span("experts.panels.run", "")]
    )
    latent, other, experts = with_decisions(root, decisions_of(plan)).inside
    assert latent.decided.startswith("latent: native (first; not triton: runs on cuda), kernels/select.py:")
    assert not other.decided
    assert experts.decided == "experts in decode: dispatcher none, kernel panels (fits; not a with b: c)"


def test_equal_calls_are_counted_before_small_ones_are_dropped() -> None:
    """Each call of `pack` is below the limit, and `other` lies between; the reason is told once."""
    from quire.traces.start_trace import _prune

    calls = [Span("pack", "a:1", begin=10 * i, end=10 * i + 1) for i in range(3)]
    others = [Span("other", "a:2", begin=10 * i + 5, end=10 * i + 5) for i in range(3)]
    reasons = [Span("choose", "a:3", gives="bfloat16 (as asked)", begin=40 + i, end=40 + i) for i in range(2)]
    inside = [one for pair in zip(calls, others, strict=True) for one in pair]
    root = Span("", "", end=100, inside=[*inside, *reasons])
    _prune(root, 2e-9, set())
    assert [(one.name, one.joined) for one in root.inside] == [("pack", 3), ("choose", 0)]
    assert root.inside[0].seconds == pytest.approx(3e-9)


def test_events_of_joined_calls_do_not_overlap() -> None:
    from quire.observe.render_calls import events

    root = Span("", "", end=90, inside=[Span("pack", "", end=50, joined=3), Span("next", "", begin=20, end=60)])
    times = {one["name"]: (one["ts"], one["dur"]) for one in events(root, 0)}
    assert times["pack"] == (0, 0.02) and times["next"] == (0.02, 0.04)


def test_the_garbage_collector_is_off_while_calls_are_recorded() -> None:
    """It would walk the recorded calls, and its time would stand at any function of the engine."""
    import gc

    from quire.traces.start_trace import StartRecorder

    with StartRecorder("start"):
        during = gc.isenabled()
    assert not during and gc.isenabled()
