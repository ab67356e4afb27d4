"""The benchmark of kernels on the CPU, with a tiny model: its cases compute what the library computes."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.args.checkpoint import parse_checkpoint_config
from quire.bench import kernels as bench
from quire.bench.kernel_cases import OPERATIONS
from quire.bench.kernel_setup import Setup
from quire.bench.kernels import measure_kernels, relative_error
from quire.contracts.errors import ConfigError
from quire.entry.cli.main import main
from quire.kernels import triton_runtime
from quire.kernels.activation import triton as activation
from quire.kernels.attention import triton as attention
from quire.kernels.cases import timing
from quire.kernels.cases.timing import Rates, measure_rates
from quire.kernels.delta import triton as delta
from quire.kernels.heads import triton as heads
from quire.kernels.latent import triton as latent
from quire.kernels.linear import cuda as linear
from quire.kernels.mamba import triton as mamba
from quire.kernels.norm import triton as norm
from quire.kernels.select import select_kernels
from quire.kernels.shortconv import triton as shortconv
from quire.kernels.supports import DENSE
from quire.layers.linear import GatedLinear, Linear

from ...support.full import full_rows
from ...support.triton_interpreter import repair_interpreter

CONFIG = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
RATES = Rates(1e9, 1e10)


needs_interpreter = pytest.mark.skipif(not triton_runtime.INTERPRETED, reason="needs Triton's interpreter")


def setup(dtype: str = "float32", **changes: object) -> Setup:
    args = parse_checkpoint_config(CONFIG | changes)
    return Setup(
        args=args,
        device=torch.device("cpu"),
        dtype=getattr(torch, dtype),
        block_size=8,
        kernels=select_kernels("cpu", dtype, ops=(*DENSE, *bench.RECURRENT), head_dim=16),
        rows=(1, 5),
        steps=((3, 1, 17), (2, 9, 9), (1, 4, 21)),
        shared=((3, 21, 16),),
        recurrent=((2, 1), (1, 70)),
        latent=((3, 41),),
    )


def on_gpu(dtype: str) -> Setup:
    """With a GPU's kernels, in the interpreter."""
    plain = setup(dtype)
    return replace(
        plain,
        kernels=replace(
            plain.kernels,
            norm=norm,
            heads=heads,
            activation=activation,
            linear=linear,
            attention=attention,
            latent=latent,
            delta=delta,
            mamba=mamba,
            shortconv=shortconv,
        ),
    )


if triton_runtime.INTERPRETED:
    repair_interpreter()


def check(chosen: Setup, op: str) -> None:
    rows = list(measure_kernels(chosen, RATES, [op]))
    assert rows and [row["wrong"] for row in rows] == [""] * len(rows) and {row["op"] for row in rows} == {op}
    for row in rows:
        share = pytest.approx(100 * row["floor_us"] / row["us"], rel=0.5, abs=0.1)
        assert row["us"] > 0 and row["floor_percent"] == share
        unlike = op in ("step", "mamba", "shortconv", "latent") or op == "delta" and find_spec("fla") is None
        assert row["library_us"] is None if unlike else row["library_us"] > 0 and row["library"]


@pytest.mark.parametrize("op", [op for op in OPERATIONS if op not in bench.TRITON_ONLY])
def test_every_case_computes_what_the_library_computes(op: str) -> None:
    check(setup(), op)


@needs_interpreter
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *((op, "float32") for op in OPERATIONS if op not in ("delta", "mamba")),
        *(("layer", "bfloat16"), ("embedding", "bfloat16")),
        *full_rows([("linear", "bfloat16"), ("delta", "float32"), ("mamba", "float32")]),
    ],
)
def test_every_case_of_a_gpu(op: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SAMPLES", 1)
    check(on_gpu(dtype), op)


def test_what_only_a_gpu_has_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "INTERPRETED", False)
    rows = list(measure_kernels(setup(), RATES, bench.TRITON_ONLY))
    assert len(rows) == 1 + 8 + 3 and all(row["us"] is None and row["wrong"] == "only on a GPU" for row in rows)


def wrong(chosen: Setup, op: str) -> list[str]:
    rows = list(measure_kernels(chosen, RATES, [op]))
    assert all(row["us"] is row["library_us"] is None for row in rows if row["wrong"])
    return [row["wrong"] for row in rows]


@pytest.mark.parametrize("part", ["k", "v", "slot"])
def test_a_wrong_cache_has_no_speed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = setup()
    right = chosen.kernels.heads.prepare

    def prepare(qkv: Any, weight: Any, eps: Any, cos: Any, sin: Any, kv: Any, slots: Any) -> Any:
        q = right(qkv, weight, eps, cos, sin, kv, slots - int(part == "slot"))  # one more may be past the end
        if part != "slot":
            getattr(kv, part)[slots // 8, :, slots % 8] *= 1.1
        return q

    monkeypatch.setattr(chosen.kernels.heads, "prepare", prepare)
    assert all("differs by" in said for said in wrong(chosen, "heads"))


@needs_interpreter
@pytest.mark.parametrize(
    ("op", "owner", "name"),
    [
        ("sampler", "quire.kernels.sampling.triton.TritonSampling", "sample"),
        ("step", "quire.kernels.step.packed.operations", "apply_runs"),
        ("step", "quire.kernels.cases.operations.step", "build_inputs"),
        ("step", "quire.kernels.cases.operations.step", "finish_step"),
    ],
)
def test_what_does_nothing_has_no_speed(op: str, owner: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)  # one row's right token may be 0, which is what a sampler that does nothing leaves
    monkeypatch.setattr(f"{owner}.{name}", lambda *args, **named: None)
    assert all(said.startswith("differs by") and said.endswith("its reference") for said in wrong(setup(), op))


@needs_interpreter
def test_shared_blocks_are_read_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(OPERATIONS["shared"](on_gpu("float32")))
    assert case.num_bytes == 4 * (2 * 2 * 16 * (16 + 3 * 5) + 2 * 3 * 4 * 16)
    monkeypatch.setattr(attention, "prefix_kernel", {})  # which is launched by what is told of shared blocks, alone
    pair = case.make(1)[0]
    assert pair.baseline is not None and pair.baseline() is not None
    with pytest.raises(KeyError):
        pair.run()


@pytest.mark.parametrize("op", ["layer", "embedding"])
def test_a_wrong_layer_has_no_speed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = setup()
    if op == "embedding":
        from quire.bench.kernel_cases import VocabEmbedding

        right = VocabEmbedding.forward
        monkeypatch.setattr(VocabEmbedding, "forward", lambda self, ids: right(self, ids + 1 - 2 * (ids == 95)))
    else:
        for kind, name in ((Linear, "forward"), (Linear, "add"), (GatedLinear, "forward")):
            product = getattr(kind, name)
            monkeypatch.setattr(kind, name, lambda *given, product=product: product(*given) * 1.1)
    assert all("differs by" in said for said in wrong(chosen, op))


def test_a_wrong_kernel_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = setup()
    right = chosen.kernels.norm.rms_norm
    monkeypatch.setattr(chosen.kernels.norm, "rms_norm", lambda x, weight, eps: right(x, weight, eps) * 1.1)
    row = next(measure_kernels(chosen, RATES, ["norm"]))
    assert row["us"] is None and "differs by 1.0e-01 from F.rms_norm" in row["wrong"]
    monkeypatch.setattr(chosen.kernels.norm, "rms_norm", lambda x, weight, eps: x * float("nan"))
    assert "differs" in next(measure_kernels(chosen, RATES, ["norm"]))["wrong"]


def test_floors_count_every_byte_once() -> None:
    case = next(c for c in OPERATIONS["linear"](setup()) if c.shape == "down 5 x 96 -> 64")
    assert case.num_bytes == 4 * (96 * 64 + 5 * 96 + 5 * 64) and case.flops == 2 * 5 * 96 * 64
    assert RATES.floor(case) == case.num_bytes / 1e9
    chunk = [c for c in OPERATIONS["attention"](setup()) if c.shape.startswith("1 x 4 of 21")][0]
    assert chunk.flops == 4 * 4 * 16 * (18 + 19 + 20 + 21)


def test_a_reference_that_loops_over_rows_is_not_timed() -> None:
    forced = select_kernels("cpu", "float32", head_dim=16, forced={"attention": "ref"})
    row = next(measure_kernels(replace(setup(), kernels=forced), RATES, ["attention"]))
    assert row["us"] is None and "only the reference" in row["wrong"]


def test_rates_and_errors() -> None:
    rates = measure_rates(torch.device("cpu"), torch.float32, 64)
    assert rates.memory > 0 and rates.matrix > 0
    assert relative_error(torch.tensor([1.0, 2.2]), torch.tensor([1.0, 2.0])) == pytest.approx(0.2 / 5**0.5, rel=1e-5)
    assert relative_error(torch.ones(2, 1), torch.ones(2)) == float("inf")
    assert relative_error(torch.tensor([0, 7]), torch.tensor([0, 0])) == 0.5


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(bench, "make_setup", lambda model, device: setup())
    monkeypatch.setattr(timing, "measure_rates", lambda device, dtype: RATES)
    args = ["bench", "kernels", "--models", "qwen3-8b", "--only", "norm", "--rows", "3", "--device", "cpu"]
    assert main([*args, "--json", "--out", str(tmp_path / "out.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out.json").read_text())
    assert [(row["model"], row["shape"]) for row in printed["rows"]] == [("qwen3-8b", "3 x 64")]
    assert main(args) == 0
    assert "F.rms_norm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only", "nothing"], "there is no operation 'nothing'"),
        (["--models", "gpt"], "'gpt': no such configuration"),
        (["--rows", "0"], "--rows 0: give whole numbers"),
    ],
)
def test_mistakes_are_named(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cpu", *flags]) == 3
    assert said in capsys.readouterr().err


def test_unknown_operations_are_a_user_s_error() -> None:
    with pytest.raises(ConfigError):
        bench.choose_operations(["norms"])


def test_models_with_latent_attention() -> None:
    """Projections are those of latents; operations on heads are refused by name."""
    sizes = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": None}
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    latent = setup(model_type="deepseek_v3", num_key_value_heads=CONFIG["num_attention_heads"], **sizes, **experts)
    heads = CONFIG["num_attention_heads"]
    assert latent.projections["qkv"] == (heads * 24 + 24 + 8, 64) and latent.projections["o"] == (64, heads * 12)
    for op in ("norm", "activation", "linear", "layer"):
        assert list(OPERATIONS[op](latent)), op
    with pytest.raises(ConfigError, match="leave out the operations heads, attention and shared"):
        list(OPERATIONS["heads"](latent))
