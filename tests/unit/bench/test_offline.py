"""Runs through `LLM` with the smallest model there is: the row format, and what is refused before anything runs."""

import json
from pathlib import Path

import pytest

from quire.entry.cli.main import main
from quire.entry.exit_codes import REFUSED

ROW = {"workload", "requests", "seconds", "input_tokens", "output_tokens", "output_tokens_per_s", "total_tokens_per_s"}
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    return str(folder)


def engine_flags(model: str) -> list[str]:
    return [model, "--load-format", "dummy", "--skip-tokenizer-init", "--max-num-seqs", "4", "--num-threads", "1"]


TOKEN_TIMES = {"inter_token_p50_ms", "inter_token_p99_ms"}


def test_throughput_writes_the_shared_format(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert (
        main(
            [
                "bench",
                "throughput",
                *engine_flags(model),
                "--only",
                "decode_b64,shared_prefix",
                "--scale",
                "0.05",
                "--max-len",
                "12",
                "--repeat",
                "2",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    result = json.loads(out.read_text())
    assert result.keys() == {"engine", "model", "engine_args", "device", "import_s", "construct_s", "runs"}
    assert result["model"] == "small" and result["engine"].startswith("quire ")
    assert result["engine_args"] == {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_num_seqs": 4,
        "num_threads": 1,
    }
    assert [row["workload"] for row in result["runs"]] == ["decode_b64", "shared_prefix"]
    assert all(row.keys() == ROW | TOKEN_TIMES | {"first_seconds"} for row in result["runs"])
    assert all(
        0 < row["inter_token_p50_ms"] <= row["inter_token_p99_ms"] < 1000 * row["first_seconds"]
        and row["seconds"] <= row["first_seconds"]
        for row in result["runs"]
    )
    assert [(row["requests"], row["input_tokens"], row["output_tokens"]) for row in result["runs"]] == [
        (3, 36, 36),
        (13, 13 * 24, 13 * 12),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("workload") and lines[4].startswith("decode_b64")


def test_edits_are_measured_with_drafts_and_without(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    assert (
        main(
            [
                "bench",
                "throughput",
                *engine_flags(model),
                "--only",
                "edits_b8",
                "--max-len",
                "48",
                "--repeat",
                "1",
                "--speculative-config",
                drafts,
                "--json",
            ]
        )
        == 0
    )
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row.keys() == ROW | TOKEN_TIMES | {
        "first_seconds",
        "plain_output_tokens_per_s",
        "tokens_per_step",
        "drafts_accepted",
    }
    assert row["requests"] == 8 and 1 <= row["tokens_per_step"] <= 4 and 0 <= row["drafts_accepted"] <= 1
    assert row["plain_output_tokens_per_s"] > 0


def test_latency_adds_token_times(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", *engine_flags(model), "--max-len", "8", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row.keys() == ROW | TOKEN_TIMES | {"first_token_ms"}
    assert (row["workload"], row["requests"], row["output_tokens"]) == ("latency_b1", 1, 8)
    assert 0 < row["first_token_ms"] <= 1000 * row["seconds"]


def test_a_workload_that_does_not_fit_is_refused_first(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", *engine_flags(model), "--only", "latency_b1"]) == REFUSED
    err = capsys.readouterr().err
    assert "latency_b1 needs a context of 768 tokens, this engine has 256" in err and "--max-len" in err


def test_startup_in_a_process_of_its_own(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", *engine_flags(model), "--repeat", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    phases = result["phases"]
    assert {"python", "import", "weights", "first token", "total"} <= phases.keys()
    parts = sum(seconds for name, seconds in phases.items() if name != "total")
    assert parts <= phases["total"] + 0.01 and min(phases.values()) >= 0  # each is rounded to a millisecond
    assert result["totals"] == [phases["total"]]


def test_startup_of_a_model_that_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", str(tmp_path), "--repeat", "1"]) == REFUSED
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and str(tmp_path) in err[0]
