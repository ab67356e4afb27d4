"""Launch lines of vLLM: every flag of theirs is understood, and what cannot be met is named before anything starts."""

import argparse
import functools
import re
import shlex
from collections.abc import Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.flags import (
    FlagParser,
    engine_options,
    flag_names,
    keyword_config,
    server_config,
    settings_of,
)
from quire.config.option_parsers import FORMATS_LACK, REFUSED_FORMATS
from quire.config.peer_flags import MEANINGS, NARGS, OFF, ON, PEER_FLAGS, PeerFlag, has_no_effect
from quire.config.serve import ServerConfig, server_names
from quire.config.sources import Settings
from quire.contracts.errors import ConfigError
from quire.entry.cli import serve
from quire.entry.cli.main import build_parser

TABLE = {name: flag for flag in PEER_FLAGS for name in flag.names}
# How the list of their flags shortens a few of them.
SHORTENED = {
    "-num-in-group": "--offload-num-in-group",
    "-prefetch-step": "--offload-prefetch-step",
    "-model": "--spec-model",
    "-tokens": "--spec-tokens",
    "--ssl-": "--ssl-keyfile",
    "--h11-max-": "--h11-max-header-count",
    "-O2": "-O",
}


@functools.cache
def make_parser() -> FlagParser:
    parser = FlagParser(prog="quire serve")
    serve.configure(parser)
    return parser


def settings(args: Sequence[str]) -> Settings:
    return settings_of(make_parser().parse_args(list(args)), server=True)


def listed_flags(text: str) -> set[str]:
    """Every flag that a section of prose names: `--long-name`, `-tp=1`, `-O2 default`, `-q/--quantization`."""
    found = set()
    for match in re.finditer(r"(?<![\w-])--?[A-Za-z][\w-]*", text):
        found.add(SHORTENED.get(match.group(), match.group()))
    return found


@pytest.fixture(scope="module")
def documented(shared: Path) -> set[str]:
    """The flags in the description of their engine that lies with the shared test data."""
    page = shared / "facts" / "peer_engine.md"
    if not page.is_file():
        pytest.skip("the description of the other engine's flags is not there")
    section = page.read_text().split("### 2.6")[1].split("### 2.7")[0]
    return listed_flags(section)


def test_every_flag_of_theirs_is_in_the_table(documented: set[str]) -> None:
    assert len(documented) > 190
    assert documented - set(TABLE) == set()


def test_no_name_is_there_twice_and_every_kind_is_known() -> None:
    assert {flag.meaning for flag in PEER_FLAGS} == set(MEANINGS) and {flag.takes for flag in PEER_FLAGS} == set(NARGS)
    names = [name for flag in PEER_FLAGS for name in flag.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("flag", [f for f in PEER_FLAGS if f.meaning == "works"], ids=lambda flag: flag.name)
def test_what_works_is_a_flag_of_ours(flag: PeerFlag) -> None:
    visible = {
        name
        for action in make_parser().actions()
        if action.help is not argparse.SUPPRESS
        for name in action.option_strings
    }
    assert set(flag.names) <= visible


def given(flag: PeerFlag, name: str, text: str) -> list[str]:
    if flag.takes != "switch":
        return [name, text]
    return [name if text == ON else f"--no-{flag.name[2:]}"]


@pytest.mark.parametrize("name", [n for n, f in TABLE.items() if f.meaning != "works"])
def test_each_of_the_others_behaves_as_the_table_says(name: str) -> None:
    flag = TABLE[name]
    texts = [ON, OFF] if flag.takes == "switch" else [*flag.values] or ["1", "2"]
    asking = next(text for text in texts if not has_no_effect(flag, text))
    if flag.meaning == "no-op":
        found, (spelling, *_) = settings(given(flag, name, asking)), given(flag, name, asking)
        assert found.values == {} and found.notes == [f"{spelling} changes nothing: {flag.why}."]
        for text in flag.neutral:
            assert settings(given(flag, name, text)) == Settings(values={}, origins={})
    elif flag.meaning == "alias":
        found = settings(given(flag, name, asking))
        assert set(found.values) == {flag.option} and flag.option in server_names()
        server_config(found)
    else:
        with pytest.raises(ConfigError, match=re.escape(flag.why)):
            settings(given(flag, name, asking))
        for text in (*flag.neutral, *(() if flag.takes == "switch" else ("none", "None"))):
            assert settings(given(flag, name, text)) == Settings(values={}, origins={})
        for text in flag.idle:
            assert settings(given(flag, name, text)).notes == [f"{name} {text} changes nothing: {flag.why}."]


def test_a_note_says_why_as_a_sentence() -> None:
    for flag in PEER_FLAGS:
        assert flag.meaning == "works" or flag.why and not flag.why.endswith("."), flag.name


@pytest.mark.parametrize(
    ("args", "values"),
    [
        (["--async-scheduling"], {"async_depth": 2}),
        (
            ["--data-parallel-address", "10.0.0.1", "-dpp", "13345", "-dpl", "2", "-dpr", "2"],
            {"master_addr": "10.0.0.1", "master_port": 13345}
            | {"data_parallel_size_local": 2, "data_parallel_start_rank": 2},
        ),
        (["--no-async-scheduling"], {"async_depth": 1}),
        (["--allow-async-output-proc"], {"async_depth": 2}),
        (["--disable-async-output-proc"], {"async_depth": 1}),
        (["--no-disable-async-output-proc"], {"async_depth": 2}),
        (["--disable-uvicorn-access-log"], {"access_log": False}),
        (["--max_num_queued_reqs", "2k"], {"max_waiting": 2000}),
        (["--async-scheduling", "--async-depth", "1"], {"async_depth": 1}),
        (
            ["--cuda-graph-sizes", "1", "2", "[4, 8]", "--cudagraph_capture_sizes", "16,32"],
            {"cudagraph_capture_sizes": (1, 2, 4, 8, 16, 32)},
        ),
        (
            ["--gpu-memory-utilization", "0.5", "--enforce-eager", "--max-cudagraph-capture-size", "256"],
            {"gpu_memory_utilization": 0.5, "enforce_eager": True, "max_cudagraph_capture_size": 256},
        ),
        (["-O2", "-O", "3", "-cc.mode=3", "--compilation-config.mode", "0"], {}),
        (
            ["-pcp", "1.0", "--data-parallel-size-local", "1", "-asc", "2"],
            {"data_parallel_size_local": 1, "api_server_count": 2},
        ),
        (
            ["--tensor_parallel_size=2", "-pp", "3", "-ep"],
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "enable_expert_parallel": True},
        ),
        (["-sc", '{"method": "ngram"}'], {"speculative_config": {"method": "ngram"}}),
        (["--hf-overrides", "{ }", "--structured-outputs-config", '{"backend":"auto"}'], {"hf_overrides": {}}),
        (["-pcp", "2", "-pcp", "1"], {}),
        (["--runner", "pooling", "--convert", "embed", "--task=embed"], {}),
        (["--override-pooler-config", '{"pooling_type": "MEAN"}'], {"pooler_config": {"pooling_type": "MEAN"}}),
        (["--pooler-config.pooling_type", "CLS"], {"pooler_config": {"pooling_type": "CLS"}}),
    ],
)
def test_values(args: list[str], values: dict[str, object]) -> None:
    assert settings(args).values == values


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (
            {
                "prefill_context_parallel_size": 1,
                "quantization": None,
                "enable_prompt_adapter": None,
                "rope_scaling": {},
            },
            {},
        ),
        ({"async_scheduling": True}, {"async_depth": 2}),
        ({"allow_async_output_proc": True}, {"async_depth": 2}),
        ({"disable_async_output_proc": True}, {"async_depth": 1}),
        ({"cudagraph_capture_sizes": [1, 2, 64]}, {"cudagraph_capture_sizes": (1, 2, 64)}),
        ({"async_scheduling": True, "async_depth": 1}, {"async_depth": 1}),
        ({"disable_log_stats": True, "served_model_name": "x", "port": 8000, "uds": None}, {}),
        ({"max_num_queued_reqs": 5, "max_num_seqs": 4}, {"max_waiting": 5, "max_num_seqs": 4}),
    ],
)
def test_keyword_arguments_mean_what_flags_mean(given: dict[str, Any], options: dict[str, Any]) -> None:
    assert keyword_config("m", given) == EngineConfig.from_flat(model="m", **options)


def test_a_keyword_that_changes_nothing_is_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    assert keyword_config("", {"swap_space": 4, "performance_mode": "x"}) == EngineConfig()
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("swap_space changes nothing: preempted requests")
    assert second.startswith("performance_mode changes nothing: nothing is compiled but kernels")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prefill_context_parallel_size": 2}, "^prefill_context_parallel_size 2: a prompt is not divided"),
        (
            {"enable_prompt_adapter": True, "quantization_config": {"a": 1}},
            "enable_prompt_adapter: adapters .*; quantization_config .*: the q",
        ),
        ({"enable_prompt_adapter": "yes"}, "enable-prompt-adapter: must be true or false"),
        ({"tensor_paralel_size": 2}, "Quire has no option 'tensor_paralel_size'"),
        ({"restart": 1}, "Quire has no option 'restart' here: it belongs to the server. Use `quire serve`"),
        ({"port": 1}, "Quire has no option 'port' here: it belongs to the server. Use `quire serve`"),
        ({"zzz": 1}, "`quire serve --help` lists what there is"),
    ],
)
def test_keyword_arguments_that_cannot_be_met(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        keyword_config("", given)


def test_everything_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        settings(["m", "-pcp", "2", "--enable-prompt-adapter", "--enforce-eager", "--num-speculative-tokens", "3"])
    assert str(caught.value) == (
        "-pcp 2: a prompt is not divided among devices by its tokens: use -tp, or -pp with chunks of prompts "
        "(--max-num-batched-tokens); "
        "--enable-prompt-adapter: adapters are LoRA alone; "
        "--num-speculative-tokens 3: speculative decoding has one flag, --speculative-config, a JSON object."
    )


# Lines as the other engine's README, documentation and examples for Kubernetes and Docker have them, in spirit.
WORKING = [
    "serve facebook/opt-125m --port 8000",
    "serve Qwen/Qwen2.5-1.5B-Instruct --dtype auto --api-key token-abc123",
    "serve mistralai/Mistral-7B-Instruct-v0.3 --trust-remote-code --enable-chunked-prefill "
    "--max_num_batched_tokens 1024",
    "serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 1 --gpu-memory-utilization 0.95 "
    "--max-model-len 32768",
    "serve --model Qwen/Qwen3-0.6B --host 0.0.0.0 --served-model-name qwen3 default --swap-space 16 "
    "--disable-log-requests",
    "serve Qwen/Qwen3-8B --max-num-seqs 64 --max-num-batched-tokens 8192 --enable-prefix-caching --block-size 16 "
    "--kv-cache-dtype auto --seed 42",
    "serve meta-llama/Llama-3.2-1B-Instruct --max-model-len -1 --enforce-eager --no-enable-prefix-caching "
    "--uvicorn-log-level warning --disable-uvicorn-access-log",
    "serve /models/llama --load-format safetensors --download-dir /cache --revision main "
    "--distributed-executor-backend mp --nnodes 2 -r 0 --master-addr 10.0.0.1 --generation-config vllm "
    "--override-generation-config '{\"temperature\": 0.6}'",
    "serve m --allowed-origins '[\"*\"]' --ssl-keyfile key.pem --ssl-certfile cert.pem --root-path /llm "
    "--enable-force-include-usage --shutdown-timeout 60 --stream-interval 2",
    "serve Qwen/Qwen3-8B --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 "
    "--exclude-tools-when-tool-choice-none --default-chat-template-kwargs '{\"enable_thinking\": false}' "
    "--structured-outputs-config.backend guidance --chat-template-content-format auto",
    "serve m --scheduling-policy priority --async-scheduling --optimization-level 2 --cudagraph-capture-sizes 1 2 4 8 "
    "--port 9000",
    'serve m --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq"}\' '
    "--no-guided-decoding-disable-any-whitespace",
    "serve meta-llama/Llama-3.1-8B-Instruct --enable-lora --lora-modules sql=/adapters/sql law=someone/law "
    "--max-loras 4 --max-lora-rank 64 --max-cpu-loras 16 --fully-sharded-loras --lora-target-modules q_proj v_proj",
]
# Flags that say which part does the work, or how fast: nothing that a user gets depends on them.
NOTED = [
    ("--guided-decoding-backend xgrammar", "--guided-decoding-backend xgrammar changes nothing: llguidance makes"),
    ("--structured-outputs-config.backend xgrammar", '--structured-outputs-config {"backend": "xgrammar"} changes'),
    ('--structured-outputs-config \'{"backend": "outlines", "enable_in_reasoning": false}\'', "outlines"),
    ("--num-scheduler-steps 8", "--num-scheduler-steps changes nothing: a step makes one token"),
    ("--attention-backend FLASHINFER", "Quire chooses kernels itself; forcing one is not supported"),
    ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill changes nothing: long prompts"),
    ("--long-prefill-token-threshold 512", "--max-num-batched-tokens bounds the chunks"),
    ("--model-loader-extra-config.enable_multithread_load true", "each file is read once"),
    ("--guided-decoding-backend auto:no-fallback", "--guided-decoding-backend auto:no-fallback changes nothing"),
    ("--guided-decoding-disable-fallback", "--guided-decoding-disable-fallback changes nothing: llguidance makes"),
]
REFUSED = [
    (
        "serve meta-llama/Llama-3.3-70B-Instruct --prefill-context-parallel-size 2 --gpu-memory-utilization 0.95 "
        "--max-model-len 32768",
        "--prefill-context-parallel-size 2: a prompt is not divided among devices by its tokens: use -tp",
    ),
    (
        "serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-expert-parallel --trust-remote-code -dph",
        "-dph: all replicas are behind one port, and the engine balances them: leave it out, or",
    ),
    ("serve m -tp 2 --enable-dbo", "--enable-dbo: a step is not split into two batches: leave it out"),
    (
        'serve Qwen/Qwen3-8B --structured-outputs-config \'{"backend": "xgrammar", "disable_any_whitespace": true}\'',
        '"disable_any_whitespace": true}: llguidance makes every mask, and its options are fixed',
    ),
    ("serve m --guided-decoding-backend xgrammar:disable-any-whitespace", "--guided-decoding-backend xgrammar:disable"),
    ("serve m --guided-decoding-disable-any-whitespace", "--guided-decoding-disable-any-whitespace: llguidance makes"),
    ("serve m --guided-decoding-disable-additional-properties", "-disable-additional-properties: llguidance makes"),
    ("serve m --kv-cache-dtype-skip-layers 0 1", "0 1: all layers have a KV cache of one type"),
    ("serve m --enable-lora --enable-lora-bias", "--enable-lora-bias: biases of adapters are not implemented"),
    ("serve m --speculative-model x --num-speculative-tokens 4", "speculative decoding has one flag, --spec"),
    ("serve BAAI/bge-reranker-v2-m3 --task classify", "--task classify: one engine generates text and embeds it"),
]


def parse_line(line: str) -> Settings:
    return settings_of(build_parser().parse_args(shlex.split(line)), server=True)


@pytest.mark.parametrize("line", WORKING)
def test_launch_lines_that_work(line: str) -> None:
    config = server_config(parse_line(line))
    assert isinstance(config, ServerConfig) and config.engine.model.model


@pytest.mark.parametrize(("flags", "words"), NOTED)
def test_flags_that_change_nothing_start_with_one_note(flags: str, words: str) -> None:
    found = parse_line(f"serve m {flags}")
    (note,) = found.notes
    assert words in note and found.values == {"model": "m"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend xgrammar changes nothing"),
        ({"structured_outputs_config": {"backend": "xgrammar"}}, '{"backend": "xgrammar"} changes nothing'),
        ({"num_scheduler_steps": 8}, "num_scheduler_steps changes nothing"),
    ],
)
def test_keywords_that_change_nothing_are_noted(
    given: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert keyword_config("", given) == EngineConfig()
    (record,) = caplog.records
    assert words in record.getMessage()


@pytest.mark.parametrize("option", [option for _, option in engine_options()], ids=lambda option: option.name)
def test_every_flag_of_the_engine_is_a_keyword_under_each_name(option: Field[Any]) -> None:
    value = {"model": "m", "dtype": "float32", "load_format": "dummy", "device": "cpu"}.get(option.name, option.default)
    for flag in (flag for flag in flag_names(option) if flag.startswith("--")):
        name = flag[2:].replace("-", "_")
        found = keyword_config(*(("m", {}) if name == "model" else ("", {name: value})))
        assert found == EngineConfig.from_flat(**{option.name: value})


def test_a_keyword_is_given_once() -> None:
    assert keyword_config("", {"num_blocks": 7}).cache.num_gpu_blocks_override == 7
    with pytest.raises(ConfigError, match="num_blocks and num_gpu_blocks_override are the same option: give one"):
        keyword_config("", {"num_blocks": 7, "num_gpu_blocks_override": 8})


@pytest.mark.parametrize("load_format", ["bitsandbytes", "gguf"])
def test_load_formats_of_other_quantizations_are_refused(load_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    why = f"{load_format!r} is not implemented ({REFUSED_FORMATS[load_format]}): {FORMATS_LACK}"
    with pytest.raises(SystemExit):
        settings(["--load-format", load_format])
    assert why in capsys.readouterr().err
    with pytest.raises(ConfigError, match=re.escape(f"argument load_format: {why}.")):
        keyword_config("", {"load_format": load_format})


def test_other_readers_of_safetensors_read_safetensors() -> None:
    assert settings(["--load-format", "runai_streamer"]).values == {"load_format": "safetensors"}


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_launch_lines_that_need_something_that_is_not_there(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        server_config(parse_line(line))
    assert message in str(caught.value)


def test_what_a_launch_line_comes_to() -> None:
    config = server_config(parse_line(WORKING[4]))
    assert config.engine.model.model == "Qwen/Qwen3-0.6B" and config.http.host == "0.0.0.0"
    assert config.serve.served_model_name == ("qwen3", "default")
    config = server_config(parse_line(WORKING[6]))
    assert config.engine.model.max_model_len is None and not config.engine.cache.enable_prefix_caching


def test_a_flag_that_nobody_has_gets_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        settings(["--tensor-paralel-size", "2"])
    assert stop.value.code == 2
    assert "Did you mean --tensor-parallel-size?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag", "meant"),
    [
        ("serve", "--tp-size", "--tensor-parallel-size"),
        ("explain", "--tp-size", "--tensor-parallel-size"),
        ("explain", "--tp_size=2", "--tensor-parallel-size"),
        ("serve", "--dp", "--data-parallel-size"),
        ("serve", "--ep-size", "--enable-expert-parallel"),
        ("complete", "--max-model-length", "--max-model-len"),
    ],
)
def test_an_abbreviation_gets_the_flag_with_that_short_form(
    command: str, flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([command, flag, "2"])
    assert f"Did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["chat"], ["bench", "latency"], ["complete", "a"]])
def test_an_abbreviation_of_a_flag_that_a_command_lacks_gets_no_hint(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([*command, "--dpa", "2"])
    assert "unknown flag --dpa. (" in capsys.readouterr().err


def test_keywords_and_keys_of_files_get_the_same_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no option 'tp_size'. Did you mean 'tensor_parallel_size'"):
        keyword_config("", {"tp_size": 2})
    (tmp_path / "c.yaml").write_text("tp-size: 2")
    with pytest.raises(ConfigError, match="tp-size is not known. Did you mean tensor-parallel-size"):
        settings(["--config", str(tmp_path / "c.yaml")])
