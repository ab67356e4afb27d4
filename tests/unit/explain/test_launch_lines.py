"""The launch line of a GLM-5-sized service, as people type it: each flag is answered, and explain plans the rest."""

import json
import re
import shlex
from pathlib import Path

import pytest

from quire.config.flags import server_config, settings_of
from quire.contracts.errors import ConfigError
from quire.entry.cli.main import build_parser, main

from .conftest import Models

DRAFTS = """--speculative_config '{"method": "mtp", "num_speculative_tokens": 3}'"""
LINE = (
    "-dp 8 -tp 1 --enable-expert-parallel -q fp8 --max-num-batched-tokens 128 --max-num-seqs 32 --block-size 64 "
    f"{DRAFTS} --kv-cache-dtype fp8 --all2all-backend deepep_low_latency --expert-placement-strategy linear "
    "--trust-remote-code --gpu-memory-utilization 0.92 --enable-auto-tool-choice --tool-call-parser glm47 "
    "--reasoning-parser glm45 --served-model-name glm --max-model-len 32k --api-server-count 4 "
    "--enable-dbo --no-enable-chunked-prefill --async-scheduling"
)
WORK = {
    "data_parallel_size": 8, "tensor_parallel_size": 1, "enable_expert_parallel": True, "quantization": "fp8",
    "max_num_batched_tokens": 128, "max_num_seqs": 32, "block_size": 64, "kv_cache_dtype": "fp8",
    "all2all_backend": "deepep_low_latency", "expert_placement_strategy": "linear", "trust_remote_code": True,
    "gpu_memory_utilization": 0.92, "tool_call_parser": "glm47",
    "reasoning_parser": "glm45", "served_model_name": ("glm",), "max_model_len": 32_000, "async_depth": 2,
    "api_server_count": 4, "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
}  # fmt: skip
NOTED = [
    "--enable-auto-tool-choice changes nothing: tool calls are always parsed when a request has tools.",
    "--no-enable-chunked-prefill changes nothing: long prompts are always computed in chunks.",
]
REFUSED = ["--enable-dbo"]


def words(model: str, command: str = "explain") -> list[str]:
    return shlex.split(f"{command} {model} {LINE}")


def test_every_flag_is_answered() -> None:
    """A flag works, or a note or a refusal names it: none is taken and forgotten."""
    found = settings_of(build_parser().parse_args(words("m")), server=True, planned=True)
    assert found.values == {"model": "m"} | WORK
    assert found.notes == NOTED
    assert [one.split()[0].rstrip(":") for one in found.refusals] == REFUSED
    given = {word.replace("_", "-") for word in words("m") if word.startswith("-")}
    answered = {origin.rpartition(" ")[2] for origin in found.origins.values()}
    told = {line.split()[0].rstrip(":") for line in (*found.notes, *found.refusals)}
    assert given == (answered - {"MODEL"}) | told
    server_config(found)


def test_the_table_of_the_documents_has_every_flag_with_its_answer() -> None:
    text = (Path(__file__).parents[3] / "docs" / "many.md").read_text()
    table = text.partition("## A launch line, flag by flag")[2].partition("\n## ")[0]
    assert " ".join(LINE.split()) in " ".join(table.split())
    rows = dict(re.findall(r"^\| `(-\S+?)(?: [^`]*)?` \| (.*) \|$", table, re.MULTILINE))
    assert list(rows) == [word for word in shlex.split(LINE) if word.startswith("-")]
    found = settings_of(build_parser().parse_args(words("m")), server=True, planned=True)
    for answers, begin in ((found.refusals, "refused: "), (found.notes, "changes nothing, with a note: ")):
        told = {line.split()[0].rstrip(":") for line in answers}
        assert told == {flag.replace("_", "-") for flag, answer in rows.items() if answer.startswith(begin)}


def test_serve_refuses_the_same_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        settings_of(build_parser().parse_args(words("m", "serve")), server=True)
    for name in REFUSED:
        assert name in str(refused.value)


def test_explain_plans_a_model_of_that_size(shallow: Models, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words(str(shallow("hf/GLM-4.5"))), "--device", "h200", "--json"]) == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert [one["feature"] for one in plan["missing"]] == [*REFUSED]
    assert len(plan["ranks"]) == 8 and plan["ranks"][7]["experts"] == [140, 160, 1] and "num_blocks" in plan["memory"]
    assert plan["memory"]["block_size"] == 64 and plan["memory"]["sequences"] == 32
    assert plan["moe"]["decode"]["decided"].startswith("asked for, decided in plan/dispatchers")
    assert [plan["moe"][phase]["dispatcher"] for phase in ("prefill", "decode")] == ["pull", "pull"]
    assert plan["moe"]["prefill"]["decided"].startswith("first that fits, decided in")
    for line in ("quire: refused by quire serve: --enable-dbo: ", *(f"quire: note: {note}" for note in NOTED)):
        assert line in err
    assert any("--all2all-backend deepep_low_latency is taken as" in note for note in plan["model"]["notes"])


@pytest.mark.parametrize("model", ["GLM-5", "GLM-5-FP8", "DeepSeek-V3.2"])
def test_kernels_of_sparse_attention(shallow: Models, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line lacks nothing else than for other models with experts."""
    assert main([*words(str(shallow(f"hf/{model}"))), "--device", "h200", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {one["feature"] for one in plan["missing"]} <= set(REFUSED)


@pytest.mark.parametrize(
    ("model", "costs"),
    [("Qwen3-0.6B", "1.11 GiB with k = 0, 1.11 GiB with k = 1, 1.11 GiB"), ("Qwen3-30B-A3B", "GiB with k = 3")],
)
def test_explain_tells_the_drafter_and_the_cost_of_k(
    shallow: Models, model: str, costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, '
        '"num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 64, 1]]}'
    )
    assert main(["explain", str(shallow(f"hf/{model}")), "-sc", given, "--device", "h200"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "speculation: ngram, 3 drafts per request, the last 2 tokens looked up (3 from 1 requests on, 1" in text
    assert "no weights and no part of the KV cache" in text and costs in text


@pytest.mark.parametrize(
    ("model", "sizes", "costs"),
    [
        ("DeepSeek-V3", "-tp 8", "10.83 GiB of weights and 1.1 KiB of the KV cache"),
        ("DeepSeek-V3", "-tp 4 -pp 2", "10.83 GiB of weights and 1.1 KiB of the KV cache"),  # of the last stage
        ("GLM-4.5-Air", "-tp 8", "4.42 GiB of weights and 512 B of the KV cache"),
    ],
)
def test_explain_tells_weights_and_cache_of_a_prediction_layer(
    shallow: Models, model: str, sizes: str, costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the real configurations, with the names of their tensors; the layer's copies of embedding and head stay."""
    given = '{"method": "deepseek_mtp", "num_speculative_tokens": 3}'
    folder = shallow(f"hf/{model}")
    layer = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert main(["explain", str(folder), "-sc", given, "--device", "h200", *sizes.split()]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "speculation: mtp, 3 drafts per request" in text and costs in text
    assert f"layer {layer}: drafts: " in text and f"{layer}.eh_proj.weight" in text
    assert "MTP) layers are skipped" not in text


def test_explain_tells_a_draft_model_and_its_part_of_a_page(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = '{"method": "draft_model", "model": "quire-tiny", "num_speculative_tokens": 2}'
    assert main(["explain", str(shared / "models" / "quire-tiny-moe"), "-sc", given, "--device", "h200"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "speculation: draft_model quire-tiny, 2 drafts per request" in text
    assert "16.0 MiB of weights and 4.0 KiB of the KV cache per token" in text
    assert "of the last 8, which draft: k" in text
