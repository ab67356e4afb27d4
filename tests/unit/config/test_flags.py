"""Flags are the options of the dataclasses, what is given wins over the environment, and mistakes are answered."""

import dataclasses
import functools
from collections.abc import Sequence

import pytest

from quire.config.engine import EngineConfig, flat_names
from quire.config.flags import (
    FlagParser,
    add_engine_flags,
    add_flags,
    add_model_argument,
    engine_config,
    error_text,
    given_options,
    keyword_config,
    option_warnings,
    server_options,
    settings_of,
    with_objects,
)
from quire.config.option_parsers import parse_bool, parse_size
from quire.contracts.errors import ConfigError, ModelError

# The command line is a promise: a flag that goes or changes its name breaks somebody's script.
FLAGS = """
--model --tokenizer --skip-tokenizer-init --no-skip-tokenizer-init --trust-remote-code --no-trust-remote-code --revision
--model-impl
--dtype --max-model-len --generation-config --override-generation-config --hf-overrides
--seed --max-logprobs --chat-template
--enable-prompt-embeds --no-enable-prompt-embeds
--pooler-config --override-pooler-config
--load-device --weights-load-device --quantization -q --cpu-offload-gb
--load-format --routing --download-dir --offline --no-offline --hf-token --use-tqdm-on-load --no-use-tqdm-on-load
--block-size --kv-cache-dtype --kv-offload-gb --kv-offloading-size --kv-offload-policy --kv-offload-dir
--kv-offload-dir-gb --kv-offload-dir-shared --no-kv-offload-dir-shared --kv-transfer-config --kv-events-config
--kv-share --kv-peers --kv-cache-memory-bytes
--gpu-memory-utilization --num-gpu-blocks-override --num-blocks
--enable-prefix-caching --no-enable-prefix-caching --state-checkpoint --state-memory-fraction --mamba-ssm-cache-dtype
--max-num-batched-tokens --max-num-seqs --max-waiting --scheduling-policy --watermark
--speculative-config -sc
--device --num-threads --async-depth --mock-step-ms
--enforce-eager --no-enforce-eager --cudagraph-capture-sizes --cuda-graph-sizes --max-cudagraph-capture-size
--batch-invariant --no-batch-invariant
--tensor-parallel-size -tp --pipeline-parallel-size -pp --pipeline-layer-partition --data-parallel-size -dp
--decode-context-parallel-size -dcp
--enable-eplb --no-enable-eplb --eplb-config
--enable-cache-blend --no-enable-cache-blend --blend-ratio --blend-separator
--enable-expert-parallel --no-enable-expert-parallel -ep
--all2all-backend --expert-placement-strategy
--check-collectives --no-check-collectives --disable-custom-all-reduce --no-disable-custom-all-reduce
--enable-sleep-mode --no-enable-sleep-mode --weight-transfer-config --restart
--enable-lora --no-enable-lora --max-loras --max-lora-rank --max-cpu-loras --lora-target-modules
--fully-sharded-loras --no-fully-sharded-loras
--nnodes -n --node-rank -r --master-addr --master-port --distributed-executor-backend --data-parallel-size-local -dpl
--data-parallel-start-rank -dpr
""".split()


@functools.cache
def make_parser() -> FlagParser:
    parser = FlagParser(prog="quire test")
    add_model_argument(parser)
    add_engine_flags(parser)
    return parser


def options(args: Sequence[str]) -> dict[str, object]:
    return given_options(make_parser().parse_args(args))


def test_the_flags_are_these() -> None:
    flags = {flag for action in make_parser().actions() for flag in action.option_strings} - {"-h", "--help"}
    assert flags == set(FLAGS)


def test_nothing_given_is_the_default_configuration() -> None:
    assert options([]) == {}
    assert engine_config(make_parser().parse_args([])) == EngineConfig()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--max-model-len", "4096"], {"max_model_len": 4096}),
        (["--max_model_len=32k"], {"max_model_len": 32_000}),
        (["--max-model-len", "1m"], {"max_model_len": 1_000_000}),
        (["--max-model-len", "-1"], {"max_model_len": None}),
        (["--max-model-len", "auto"], {"max_model_len": None}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--no_enable_prefix_caching"], {"enable_prefix_caching": False}),
        (["--enable-prefix-caching"], {"enable_prefix_caching": True}),
        (["--dtype", "bfloat16"], {"dtype": "bfloat16"}),
        (["--num-blocks", "7"], {"num_gpu_blocks_override": 7}),
        (["--kv_cache_memory_bytes", "4G"], {"kv_cache_memory_bytes": 4 << 30}),
        (["--watermark", "0.25"], {"watermark": 0.25}),
        (["some/model"], {"model": "some/model"}),
        (["--model", "some/model_a"], {"model": "some/model_a"}),
        (["m", "--model", "m"], {"model": "m"}),
        (["--chat-template", "{{ a_b }}"], {"chat_template": "{{ a_b }}"}),
    ],
)
def test_what_is_given_is_what_comes_out(args: list[str], expected: dict[str, object]) -> None:
    assert options(args) == expected
    config = engine_config(make_parser().parse_args(args))
    flat = {f.name: getattr(getattr(config, part), f.name) for f, part in _fields()}
    assert {name: flat[name] for name in expected} == expected


def _fields() -> list[tuple[dataclasses.Field, str]]:
    parts = dataclasses.fields(EngineConfig)
    return [(f, part.name) for part in parts for f in dataclasses.fields(type(part.default))]


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if not flag.startswith("--no-")])
def test_every_flag_reaches_its_option(flag: str) -> None:
    """Whatever the type of a field, its flag parses to a value of that type."""
    texts = {
        "--dtype": "half",
        "--model-impl": "quire",
        "--load-format": "dummy",
        "--load-device": "cpu",
        "--weights-load-device": "cpu",
        "--routing": "uniform",
        "--all2all-backend": "nixl_ep",
        "--expert-placement-strategy": "round_robin",
        "--kv-cache-dtype": "fp8",
        "--mamba-ssm-cache-dtype": "bfloat16",
        "--scheduling-policy": "priority",
        "--device": "cpu",
        "--override-generation-config": '{"top_k": 5}',
        "--hf-overrides": '{"rope_theta": 5e4}',
        "--pooler-config": '{"pooling_type": "MEAN"}',
        "--override-pooler-config": '{"pooling_type": "MEAN"}',
        "--speculative-config": '{"method": "ngram"}',
        "-sc": '{"method": "ngram"}',
        "--eplb-config": '{"window_size": 5}',
        "--kv-offload-policy": "write_through",
        "--kv-transfer-config": '{"kv_connector": "LMCacheConnectorV1"}',
        "--weight-transfer-config": '{"backend": "gloo"}',
        "--kv-events-config": '{"topic": "kv"}',
        "--distributed-executor-backend": "ray",
    }
    boolean = f"--no-{flag[2:]}" in FLAGS or flag == "-ep"
    args = [flag] if boolean else [flag, texts.get(flag, "1")]
    ((name, value),) = options(args).items()
    assert name in flat_names()
    field = next(f for f, _ in _fields() if f.name == name)
    assert isinstance(value, next((t for t in (dict, tuple) if t.__name__ in str(field.type)), field.type))


def test_after_two_dashes_nothing_is_changed() -> None:
    assert options(["--", "--my_model"]) == {"model": "--my_model"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-modl-len", "5"], "unknown flag --max-modl-len. Did you mean --max-model-len?"),
        (["--gpu-memory", "5"], "unknown flag --gpu-memory. Did you mean --gpu-memory-utilization?"),
        (["--nonsense", "5"], "unknown flag --nonsense. ("),
        (["--enable-prefix-caching=maybe"], "it takes no value, but here is 'maybe'"),
        (["--enable_prefix_cachin"], "unknown flag --enable-prefix-cachin. Did you mean --enable-prefix-caching?"),
        (["--max-model"], "unknown flag --max-model."),  # no abbreviations: they break when a flag is added
        (["--zzzzzz=4"], "unknown flag --zzzzzz."),
        (["a", "b"], "unexpected argument 'b'"),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--max-num-seqs", "many"], "'many' is not a whole number"),
        (["--max-num-seqs", "1.5"], "'1.5' is not a whole number"),
        (["--watermark", "x"], "'x' is not a number"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        options(args)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("quire: error: ") and message in lines[0]


def test_two_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a' and --model 'b'"):
        options(["a", "--model", "b"])


def test_values_that_cannot_work_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="block_size=0"):
        engine_config(make_parser().parse_args(["--block-size", "0"]))


def test_other_flags_of_a_command_are_not_options() -> None:
    parser = FlagParser(prog="quire test")
    add_engine_flags(parser, skip=("seed",))
    parser.add_argument("--seed", type=int, dest="seed")
    assert given_options(parser.parse_args(["--seed", "4"])) == {}


def test_only_some_flags() -> None:
    parser = FlagParser(prog="quire test")
    add_engine_flags(parser, only=("revision", "offline"))
    assert given_options(parser.parse_args(["--revision", "v1", "--offline"])) == {"revision": "v1", "offline": True}
    with pytest.raises(SystemExit):
        parser.parse_args(["--dtype", "half"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-1", -1),
        ("32768", 32768),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5k", 1500),
        ("32KiB", 32_768),
        ("32kB", 32_000),
        ("2g", 2 * 10**9),
        ("2GiB", 2 << 30),
        ("2GB", 2 << 30),
        ("1T", 1 << 40),
        (" 7 ", 7),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1e3", "0x10", "12 34", "32kk", "5B", "0.0001k", "nan", "--5"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_size(text)


def test_help_names_every_flag_and_its_default() -> None:
    text = make_parser().format_help()
    assert all(flag in text for flag in FLAGS)
    assert "token budget of a step (default: 2048 on a CPU, 8192 on a GPU; in LLM" in " ".join(text.split())


def test_the_environment_gives_what_flags_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "8k")
    monkeypatch.setenv("QUIRE_ENABLE_PREFIX_CACHING", "off")
    monkeypatch.setenv("QUIRE_DTYPE", "")
    monkeypatch.setenv("QUIRE_MODEL", "from/environment")
    assert options([]) == {"max_model_len": 8000, "enable_prefix_caching": False, "model": "from/environment"}
    assert options(["--max-model-len", "16", "given"])["max_model_len"] == 16
    assert options(["given"])["model"] == "given"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("QUIRE_MAX_NUM_SEQS", "lots", "environment variable QUIRE_MAX_NUM_SEQS: 'lots' is not a whole number"),
        ("QUIRE_OFFLINE", "perhaps", "environment variable QUIRE_OFFLINE: 'perhaps' is neither 1/true"),
    ],
)
def test_a_bad_value_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=message):
        options([])


def test_booleans() -> None:
    assert [parse_bool(t) for t in ("1", "True", "YES", "on")] == [True] * 4
    assert [parse_bool(t) for t in ("0", "false", "No", "off")] == [False] * 4


def test_the_hub_token_comes_from_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert options([]) == {"hf_token": "secret"}
    monkeypatch.setenv("QUIRE_HF_TOKEN", "ours")
    assert options([]) == {"hf_token": "ours"}
    assert options(["--hf-token", "given"]) == {"hf_token": "given"}


def test_batch_invariance_has_the_variable_of_vllm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert options([]) == {"batch_invariant": True} and option_warnings() == []
    assert options(["--no-batch-invariant"]) == {"batch_invariant": False}
    assert keyword_config("", {}).device.batch_invariant
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "0")
    assert options([]) == {"batch_invariant": False}


def test_variables_that_are_not_read_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert option_warnings() == []
    monkeypatch.setenv("QUIRE_FULL", "1")  # of the tests
    monkeypatch.setenv("QUIRE_WEATHER", "fine")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("VLLM_SOMETHING_ELSE", "1")
    foreign, peer = option_warnings()
    assert foreign == "QUIRE_WEATHER is not read by Quire."
    assert peer.startswith("VLLM_API_KEY, VLLM_CPU_KVCACHE_SPACE, VLLM_SOMETHING_ELSE are not read by Quire.")
    assert "VLLM_API_KEY: QUIRE_API_KEY or --api-key" in peer and "--kv-cache-memory-bytes" in peer
    assert "secret" not in peer


def test_a_misspelt_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_MODEL_LENGTH", "1")
    with pytest.raises(ConfigError, match="QUIRE_MAX_MODEL_LENGTH is not known: did you mean QUIRE_MAX_MODEL_LEN?"):
        options([])


def test_what_kubernetes_sets_for_a_service_named_quire_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "QUIRE_PORT": "tcp://10.0.0.7:8000",
        "QUIRE_SERVICE_HOST": "10.0.0.7",
        "QUIRE_SERVICE_PORT": "1",
        "QUIRE_SERVICE_PORT_HTTP": "1",
        "QUIRE_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "QUIRE_PORT_8000_TCP_ADDR": "10.0.0.7",
        "QUIRE_PORT_8000_TCP_PROTO": "tcp",
        "VLLM_SERVICE_HOST": "10.0.0.8",
        "VLLM_PORT": "tcp://10.0.0.8:8000",
    }.items():
        monkeypatch.setenv(name, text)
    parser = FlagParser(prog="quire test")
    add_flags(parser, server_options())
    assert settings_of(parser.parse_args([]), server=True).values == {}
    (warning,) = option_warnings()
    assert warning == "QUIRE_PORT holds tcp://10.0.0.7:8000, which Kubernetes sets for a service of this name: ignored."


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["m", "--a.b", "1", "--x", "y", "--a.c.d=z"], ["m", '--a={"b": 1, "c": {"d": "z"}}', "--x", "y"]),
        (["-cc.mode=3"], ['-cc={"mode": 3}']),
        (["--temperature", "-0.5", "-1.5", "./a.b", "--x=a.b"], ["--temperature", "-0.5", "-1.5", "./a.b", "--x=a.b"]),
        (["--", "--a.b", "1"], ["--", "--a.b", "1"]),
        (["--a.b"], ['--a={"b": ""}']),
    ],
)
def test_dotted_flags_are_one_object(args: list[str], expected: list[str]) -> None:
    assert with_objects(args) == expected


def test_a_dotted_flag_reaches_its_option() -> None:
    found = options(["--override-generation-config.temperature", "0.5", "--override_generation_config.top_k=3"])
    assert found == {"override_generation_config": {"temperature": 0.5, "top_k": 3}}


def test_help_can_be_asked_for_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        make_parser().parse_args(["--help=kv_cache"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--kv-cache-memory-bytes" in text and "--dtype" not in text and "--help" not in text


def test_what_is_configured_later_is_there_when_needed() -> None:
    parser = FlagParser(prog="quire test", configure=add_model_argument)
    assert len(parser._actions) == 1
    assert parser.parse_args(["m"]).model_argument == "m"
    assert len(parser.actions()) == 2  # not added twice


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_num_seqs=0: must be at\n least 1.", "--max-num-seqs=0: must be at least 1."),
        ("lower max_num_seqs or max_model_len.", "lower --max-num-seqs or --max-model-len."),
        ("use dtype=float32, or another device", "use --dtype=float32, or another device"),
        ("api_key: a key must be", "--api-key: a key must be"),
        ("no option 'max_num_seqs' (--max_model_len)", "no option 'max_num_seqs' (--max_model_len)"),
        (
            "a/generation_config.json: override_generation_config",
            "a/generation_config.json: --override-generation-config",
        ),
        ("generation_config.json, hf_token_x=1, my_seed=2", "generation_config.json, hf_token_x=1, my_seed=2"),
    ],
)
def test_a_configurations_error_names_flags(text: str, told: str) -> None:
    assert error_text(ConfigError(text)) == told
    assert error_text(ModelError(text)) == " ".join(text.split())  # may name keys of a model's files
