"""Launch lines of vLLM, as its documentation and its recipes of models have them, behind `quire serve`.

Each line is parsed without a refusal, and its engine is planned whole for H200 GPUs: with the published config.json
where the shared test data has it, else with transformers' default sizes of the family.
"""

import json
import shlex
from pathlib import Path

import pytest

from quire.config.flags import FlagParser, server_config, settings_of
from quire.config.serve import ServerConfig
from quire.contracts.errors import ConfigError
from quire.entry.cli import serve
from quire.explain.describe import plan_engine

from ...support.default_configs import default_configs
from ...support.full import full_rows, only_full

GLM = "--tool-call-parser glm47 --reasoning-parser glm45 --enable-auto-tool-choice"
MINIMAX = "--tool-call-parser minimax_m2 --reasoning-parser minimax_m2 --enable-auto-tool-choice"
TOOLS = "--reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder"
MTP = "--speculative-config.method mtp --speculative-config.num_speculative_tokens"
TWO_HOSTS = "--data-parallel-size 4 --data-parallel-size-local 2 --data-parallel-address 10.99.48.128"
BALANCED = '--enable-eplb --eplb-config \'{"window_size":1000,"step_interval":3000,"num_redundant_experts":8}\''
# (folder of a published config.json, flags). The first line of each folder is planned in every run.
PUBLISHED = [
    ("DeepSeek-R1", "--trust-remote-code --tensor-parallel-size 8 --enable-expert-parallel"),
    ("DeepSeek-R1", "--trust-remote-code --data-parallel-size 8 --enable-expert-parallel"),
    ("DeepSeek-V3", f"--tensor-parallel-size 1 --data-parallel-size 8 --enable-expert-parallel {BALANCED}"),
    ("DeepSeek-V3", "--enable-expert-parallel --tensor-parallel-size 8 --served-model-name ds31"),
    (
        "DeepSeek-V3",
        "--tensor-parallel-size 1 --enable-expert-parallel --data-parallel-size 16 --data-parallel-size-local 8 "
        "--data-parallel-address 192.168.1.100 --data-parallel-rpc-port 13345 --api-server-count=8",
    ),
    ("DeepSeek-V3.2", '-tp 8 --reasoning-parser deepseek_v3 -sc \'{"method":"mtp","num_speculative_tokens":3}\''),
    ("DeepSeek-V3.2", "-dp 8 --enable-expert-parallel"),
    ("GLM-4.5", f"--tensor-parallel-size 4 {MTP} 1 {GLM}"),
    ("GLM-4.5", f"-tp 8 --gpu-memory-utilization 0.9 --disable-log-requests --no-enable-prefix-caching {GLM}"),
    ("GLM-4.5-Air", f"--tensor-parallel-size 8 {GLM}"),
    (
        "GLM-5-FP8",
        f"--tensor-parallel-size 8 {MTP} 3 {GLM} --chat-template-content-format=string --served-model-name glm",
    ),
    ("GLM-5.2-FP8", f"--kv-cache-dtype fp8 --tensor-parallel-size 8 {MTP} 5 {GLM} --served-model-name glm-5.2-fp8"),
    (
        "GLM-5.2-FP8",
        f"--kv-cache-dtype fp8_e4m3 --tensor-parallel-size 8 {MTP} 5 {GLM} --gpu-memory-utilization 0.80 "
        "--max-model-len 524288 --max-num-seqs 32 --linear-backend aiter --moe-backend aiter",
    ),
    ("Llama-3.1-8B-Instruct", f"{TWO_HOSTS} --data-parallel-rpc-port 13345"),
    (
        "Llama-3.1-8B-Instruct",
        f"{TWO_HOSTS} --headless --data-parallel-start-rank 2 --data-parallel-rpc-port 13345",
    ),
    ("Llama-3.1-8B-Instruct", "--data-parallel-size 4 --data-parallel-size-local 2 --data-parallel-backend=ray"),
    ("Llama-3.1-8B-Instruct", "--data-parallel-size 4 --tensor-parallel-size 2"),
    ("Llama-3.1-8B-Instruct", "--enable-lora --lora-modules sql-lora=/adapters/sql --max-lora-rank 64"),
    (
        "Llama-3.1-8B-Instruct",
        '--enable-lora --lora-modules \'{"name": "sql-lora", "path": "/l", "base_model_name": "meta-llama/Llama"}\'',
    ),
    (
        "Llama-3.1-8B-Instruct",
        '-sc \'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}\'',
    ),
    ("Llama-3.1-8B-Instruct", "--runner pooling --max-model-len 8192"),
    ("Llama-3.3-70B-Instruct", "-tp 8 -pp 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1"),
    ("Llama-3.3-70B-Instruct", "-tp 8 -pp 2 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --headless"),
    ("Llama-3.3-70B-Instruct", "-tp 8 -pp 2 --distributed-executor-backend ray"),
    (
        "Llama-3.3-70B-Instruct",
        "--kv-cache-dtype fp8 --async-scheduling --no-enable-prefix-caching --max-num-batched-tokens 8192 -tp 1",
    ),
    ("Meta-Llama-3.1-8B-Instruct-quantized.w8a8", ""),
    ("Mistral-7B-Instruct-v0.3", "--tokenizer_mode hf --config_format hf --load_format hf --tool-call-parser mistral"),
    ("Mixtral-8x7B-Instruct-v0.1", "--tensor-parallel-size 2 --enable-expert-parallel"),
    ("Qwen2.5-7B-Instruct-AWQ", "--quantization awq --max-model-len 32768"),
    (
        "Qwen3-235B-A22B",
        "-tp 4 --swap-space 16 --distributed-executor-backend mp --max-model-len 32768 --trust-remote-code",
    ),
    ("Qwen3-30B-A3B", f"--tensor-parallel-size 2 --enable-expert-parallel {BALANCED}"),
    ("Qwen3-30B-A3B-FP8", f"--max-model-len 32000 --enable-expert-parallel -dp 8 {TOOLS}"),
    ("Qwen3-8B", "--kv_offloading_backend native --kv_offloading_size 10"),
    (
        "Qwen3-8B",
        "--host 0.0.0.0 --port 8000 --seed 42 --tensor-parallel-size 2 --data-parallel-size 1 --max-model-len 9216 "
        "--max-num-batched-tokens 4096 --max-num-seqs 135 --gpu-memory-utilization 0.98 --block-size 256 "
        "--kv-cache-dtype fp8 --no-enable-prefix-caching --async-scheduling",
    ),
    ("Qwen3-8B", "--reasoning-parser qwen3 --default-chat-template-kwargs '{\"enable_thinking\": false}'"),
    (
        "gpt-oss-20b",
        "--tensor-parallel-size 2 --data-parallel-size 4 --max-model-len 9216 --max-num-batched-tokens 16384 "
        "--max-num-seqs 2048 --gpu-memory-utilization 0.86 --kv-cache-dtype fp8 --load-format runai_streamer "
        "--no-enable-prefix-caching --async-scheduling",
    ),
    (
        "gpt-oss-20b",
        "--tensor-parallel-size 8 --attention-backend ROCM_AITER_UNIFIED_ATTN -cc.pass_config.fuse_rope_kvcache=True "
        "-cc.use_inductor_graph_partition=True --gpu-memory-utilization 0.95 --block-size 64",
    ),
    ("gpt-oss-20b", "--tool-call-parser openai --enable-auto-tool-choice"),
]
# (family, flags): planned with default sizes, in the full run.
FAMILIES = [
    (
        "gemma4_text",
        '-tp 2 --max-model-len 32768 --limit-mm-per-prompt \'{"image": 0, "audio": 0}\' --async-scheduling',
    ),
    ("kimi_linear", "--port 8000 --tensor-parallel-size 4 --max-model-len auto --trust-remote-code"),
    ("lfm2", "--enable-auto-tool-choice --tool-call-parser lfm2 --host 0.0.0.0 --port 8000"),
    ("lfm2", "--optimization-level 3 --no-enable-prefix-caching"),
    (
        "minimax_m2",
        f"--tensor-parallel-size 4 --enable-expert-parallel {MINIMAX} --compilation-config "
        '\'{"mode":3,"pass_config":{"fuse_minimax_qk_norm":true}}\'',
    ),
    ("minimax_m2", f"--data-parallel-size 8 --enable-expert-parallel {MINIMAX}"),
    (
        "nemotron_h",
        "--max-num-seqs 8 --max-num-batched-tokens 16384 --kv-cache-dtype fp8 --mamba-cache-mode align "
        "--mamba-ssm-cache-dtype float32 --enable-prefix-caching --load-format fastsafetensors",
    ),
    ("qwen3_next", "--tensor-parallel-size 4 --served-model-name qwen3-next --enable-prefix-caching"),
    ("qwen3_5_text", f"--language-model-only --enable-prefix-caching {TOOLS}"),
    ("qwen3_5_moe_text", "-dp 8 --enable-expert-parallel --mm-encoder-tp-mode data --mm-processor-cache-type shm"),
    ("seed_oss", "--tensor-parallel-size 8 --enable-auto-tool-choice --tool-call-parser seed_oss --trust-remote-code"),
]
# Drafters are not at hand: these are parsed alone.
DRAFTED = [
    '-tp 4 --gpu-memory-utilization 0.8 -sc \'{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}\'',
    '-sc \'{"model":"RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3","method":"eagle3","num_speculative_tokens":3}\'',
]
# Lines that are refused: (flags, words of the reason, which tell what to do).
REFUSED = [
    ("--tokenizer-mode deepseek_v32", "--chat-template"),
    ("--tokenizer_mode mistral --config_format mistral", "config.json is read, which most repositories have, too"),
    ("--load_format mistral", "leave out --load-format, --config-format and --tokenizer-mode"),
    ("--data-parallel-size 2 --data-parallel-rank 1", "quire route"),
    ("--data-parallel-hybrid-lb", "quire route"),
    ("--tool-server demo", "calls are the client's to carry out"),
]


def parsed(model: str, line: str) -> ServerConfig:
    parser = FlagParser(prog="quire serve")
    serve.configure(parser)
    settings = settings_of(parser.parse_args([model, *shlex.split(line)]), server=True)
    return server_config(settings)


def test_documented_lines_are_taken() -> None:
    assert len(PUBLISHED) + len(FAMILIES) > 45
    for model, line in PUBLISHED + FAMILIES + [("m", line) for line in DRAFTED]:
        parsed(model, line)


@pytest.mark.parametrize(("line", "words"), REFUSED)
def test_the_reason_of_a_refused_line_tells_what_to_do(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ConfigError, SystemExit)) as refused:
        parsed("m", line)
    assert words in " ".join(f"{refused.value} {capsys.readouterr().err}".split())


def check_plan(folder: Path, line: str) -> None:
    report = plan_engine(parsed(str(folder), line).engine, "h200")
    lacking = [one.feature for one in report.plan.missing if not one.feature.startswith("a dispatcher for")]
    assert not lacking  # a dispatcher: replicas of several hosts exchange rows outside of CUDA graphs


FIRST = [row for at, row in enumerate(PUBLISHED) if row[0] not in {folder for folder, _ in PUBLISHED[:at]}]


@pytest.mark.parametrize(
    ("folder", "line"), [*FIRST, *full_rows(row for row in PUBLISHED if row not in FIRST)], ids=lambda one: ""
)
def test_a_published_model_is_planned_whole(folder: str, line: str, shared: Path) -> None:
    check_plan(shared / "hf" / folder, line)


@only_full
@pytest.mark.parametrize(("family", "line"), FAMILIES, ids=lambda one: "")
def test_a_family_is_planned_whole(family: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(default_configs(family)[0]))
    check_plan(tmp_path, line)
