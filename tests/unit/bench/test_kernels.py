"""The benchmark of kernels on the CPU, with a tiny model: its cases compute what the library computes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.bench import kernels as bench
from quire.bench.kernel_cases import OPERATIONS, Setup
from quire.bench.kernels import Rates, measure_kernels, measure_rates, relative_error
from quire.config.checkpoint import parse_checkpoint_config
from quire.contracts.errors import ConfigError
from quire.entry.cli.main import main
from quire.kernels.select import select_kernels

CONFIG = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
RATES = Rates(1e9, 1e10)


def setup(**changes: object) -> Setup:
    kernels = select_kernels("cpu", "float32", head_dim=16)
    return Setup(args=parse_checkpoint_config(CONFIG | changes), device=torch.device("cpu"), dtype=torch.float32,
                 kernels=kernels, block_size=8, rows=(1, 5), steps=((3, 1, 17), (2, 9, 9), (1, 4, 21)))


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_case_computes_what_the_library_computes(op: str) -> None:
    rows = list(measure_kernels(setup(), RATES, [op]))
    assert rows and all(row["wrong"] == "" and row["us"] > 0 and row["library_us"] > 0 for row in rows)
    assert {row["op"] for row in rows} == {op}


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
    attention = [c for c in OPERATIONS["attention"](setup()) if c.shape.startswith("1 x 4 of 21")][0]
    assert attention.flops == 4 * 4 * 16 * (18 + 19 + 20 + 21)


def test_a_reference_that_loops_over_rows_is_not_timed() -> None:
    forced = select_kernels("cpu", "float32", head_dim=16, forced={"attention": "ref"})
    row = next(measure_kernels(replace(setup(), kernels=forced), RATES, ["attention"]))
    assert row["us"] is None and "only the reference" in row["wrong"]


def test_rates_and_errors() -> None:
    rates = measure_rates(torch.device("cpu"), torch.float32, 64)
    assert rates.memory > 0 and rates.matrix > 0
    assert relative_error(torch.tensor([1.0, 2.2]), torch.tensor([1.0, 2.0])) == pytest.approx(0.2 / 5**0.5, rel=1e-5)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(bench, "make_setup", lambda model, device: setup())
    monkeypatch.setattr(bench, "measure_rates", lambda device, dtype: RATES)
    args = ["bench", "kernels", "--models", "qwen3-8b", "--only", "norm", "--rows", "3", "--device", "cpu"]
    assert main([*args, "--json", "--out", str(tmp_path / "out.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out.json").read_text())
    assert [(row["model"], row["shape"]) for row in printed["rows"]] == [("qwen3-8b", "3 x 64")]
    assert main(args) == 0
    assert "F.rms_norm" in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "said"), [(["--only", "nothing"], "there is no operation 'nothing'"),
                                             (["--models", "gpt"], "there is no 'gpt'"),
                                             (["--rows", "0"], "--rows 0: give whole numbers")])
def test_mistakes_are_named(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cpu", *flags]) == 3
    assert said in capsys.readouterr().err


def test_unknown_operations_are_a_user_s_error() -> None:
    with pytest.raises(ConfigError):
        bench.choose_operations(["norms"])
