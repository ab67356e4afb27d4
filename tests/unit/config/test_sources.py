"""The command line wins over the environment, the environment over the file, the file over the default."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.config.flags import FlagParser, server_config, server_options, settings_of
from quire.config.option_parsers import read_value
from quire.config.serve import ServerConfig
from quire.config.sources import Settings
from quire.contracts.errors import ConfigError
from quire.entry.cli import serve


def parse(args: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(prog="quire serve")
    serve.configure(parser)
    return parser.parse_args(list(args))


def settings(args: Sequence[str]) -> Settings:
    return settings_of(parse(args), server=True)


@pytest.fixture
def config_file(tmp_path: Path) -> Any:
    """Write a file, get the flags that name it."""

    def write(text: str) -> list[str]:
        (tmp_path / "config.yaml").write_text(text)
        return ["--config", str(tmp_path / "config.yaml")]

    return write


def test_each_source_wins_over_the_next(config_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config_file("port: 1\nhost: a\nmax-num-seqs: 1\n")
    monkeypatch.setenv("QUIRE_PORT", "2")
    monkeypatch.setenv("QUIRE_HOST", "b")
    found = settings([*file, "--port", "3"])
    assert {name: found.values[name] for name in ("port", "host", "max_num_seqs")} == {
        "port": 3,
        "host": "b",
        "max_num_seqs": 1,
    }
    assert found.origins["port"] == "flag --port"
    assert found.origins["host"] == "environment variable QUIRE_HOST"
    assert found.origins["max_num_seqs"] == f"file {file[1]}"
    config = server_config(found)
    assert (config.http.port, config.http.host, config.engine.scheduler.max_num_seqs) == (3, "b", 1)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--api-key", "a", "b"], {"api_key": ("a", "b")}),
        (["--api-key", "a", "--api-key", "b"], {"api_key": ("a", "b")}),
        (["--served-model-name=x", "--port", "0"], {"served_model_name": ("x",), "port": 0}),
        (["--allowed-origins", '["https://a", "https://b"]'], {"allowed_origins": ("https://a", "https://b")}),
        (["--allowed_origins", "*"], {"allowed_origins": ("*",)}),
        (["--allowed-hosts", "a", "b", "--allowed-hosts", "*"], {"allowed_hosts": ("a", "b", "*")}),
        (["--request-timeout", "5"], {"request_timeout": 5.0}),
        (["--max-body-bytes", "1M"], {"max_body_bytes": 1 << 20}),
        (["--no-access-log"], {"access_log": False}),
        (["--h11-max-header-count", "9"], {"max_headers": 9}),
    ],
)
def test_flags_of_the_server(args: list[str], expected: dict[str, Any]) -> None:
    assert settings(args).values == expected


def test_lists_in_the_environment_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "a, b,")
    monkeypatch.setenv("QUIRE_ALLOWED_HOSTS", "llm,host.docker.internal")
    names = {"allowed_hosts": ("llm", "host.docker.internal")}
    assert settings([]).values == {"api_key": ("a", "b")} | names
    assert settings(["--api-key", "c"]).values == {"api_key": ("c",)} | names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "model: a/b\nmax_model_len: 32k\nenable-prefix-caching: false",
            {"model": "a/b", "max_model_len": 32_000, "enable_prefix_caching": False},
        ),
        (
            "max-model-len: -1\nmax-num-seqs: 8\nwatermark: 0",
            {"max_model_len": None, "max_num_seqs": 8, "watermark": 0.0},
        ),
        ("no-enable-prefix-caching: true", {"enable_prefix_caching": False}),
        ("num-blocks: 7\napi-key: [a, b]", {"num_gpu_blocks_override": 7, "api_key": ("a", "b")}),
        ("served-model-name: one,two", {"served_model_name": ("one,two",)}),
        ("override-generation-config: {temperature: 0.5}", {"override_generation_config": {"temperature": 0.5}}),
        ("override-generation-config: '{\"top_k\": 1}'", {"override_generation_config": {"top_k": 1}}),
        ("tokenizer: null", {"tokenizer": None}),
        ("", {}),
        ("# nothing", {}),
        ("max-num-queued-reqs: 5\nprefill-context-parallel-size: 1", {"max_waiting": 5}),
        ("tensor-parallel-size: 2", {"tensor_parallel_size": 2}),
    ],
)
def test_what_a_file_holds(config_file: Any, text: str, expected: dict[str, Any]) -> None:
    assert settings(config_file(text)).values == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modl-len: 5", "max-modl-len is not known. Did you mean max-model-len?"),
        ("zzzzzzzzz: 5", "zzzzzzzzz is not known. `quire serve --help`"),
        ("tensor-paralel-size: 2", "Did you mean tensor-parallel-size?"),
        ("prefill-context-parallel-size: 2", "config.yaml: prefill-context-parallel-size 2: a prompt is not divided"),
        ("enable-prompt-adapter: true", "config.yaml: enable-prompt-adapter: adapters"),
        ("enable-expert-parallel: 2", "enable-expert-parallel: 2 is neither true nor false"),
        ("max-num-seqs: lots", "max-num-seqs: 'lots' is not a whole number"),
        ("max-num-seqs: 1.5", "max-num-seqs: '1.5' is not a whole number"),
        ("max-num-seqs: true", "max-num-seqs: 'true' is not a whole number"),
        ("max-num-seqs: {a: 1}", "max-num-seqs: '{\"a\": 1}' is not a whole number"),
        ("revision: 1234", "revision: 1234 is not a text: put it in quotes"),
        ("api-key: [1]", "api-key: '[1]' is not a list of strings"),
        ("offline: 1", "offline: 1 is neither true nor false"),
        ("dtype: int3", "dtype='int3': must be one of"),
        ("port: 1\nport: 2", "port appears twice"),
        ("port: 1\nmax_num_seqs: 1\nmax-num-seqs: 2", "max-num-seqs appears twice"),
        ("config: other.yaml", "config.yaml: a file cannot name another: put all options into one."),
        ("- a", "must hold one `option: value` per line"),
        ("a: [", "the file is not YAML"),
        ("!!python/object/apply:os.system ['true']", "the file is not YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(config_file: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        server_config(settings(config_file(text)))
    assert message in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no.yaml: No such file"):
        settings(["--config", str(tmp_path / "no.yaml")])


def test_a_refused_key_can_be_overruled(config_file: Any) -> None:
    file = config_file("prefill-context-parallel-size: 2\nasync-scheduling: true")
    assert settings([*file, "-pcp", "1", "--no-async-scheduling"]).values == {"async_depth": 1}


def test_the_environment_wins_over_an_alias_in_a_file(config_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ASYNC_DEPTH", "1")
    file = config_file("async-scheduling: true")
    assert settings(file).values == {"async_depth": 1}
    assert settings([*file, "--async-scheduling"]).values == {"async_depth": 2}


def test_a_model_swallowed_by_a_list_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--api-key takes every text that follows") as caught:
        settings(["--api-key", "secret", "org/name"])
    assert "secret" not in str(caught.value)
    assert settings(["m", "--api-key", "secret", "org/name"]).values["model"] == "m"
    monkeypatch.setenv("QUIRE_MODEL", "m")
    assert settings(["--served-model-name", "a", "org/name"]).values["served_model_name"] == ("a", "org/name")


def test_what_is_printed_can_be_read_again(config_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_DTYPE", "float32")
    first = settings(
        [
            "a/b",
            "--max-model-len",
            "32K",
            "--served-model-name",
            "x",
            "y: # z",
            "--no-offline",
            "--override-generation-config",
            '{"temperature": 0.5}',
            "--request-timeout",
            "1.5",
            "--queue-timeout",
            "inf",
        ]
    )
    printed = first.describe(server_options())
    assert "queue-timeout: .inf " in printed
    monkeypatch.delenv("QUIRE_DTYPE")
    assert server_config(settings(config_file(printed))) == server_config(first)
    lines = [line.split("#") for line in printed.splitlines() if line and not line.startswith("#")]
    origins = {line[0].partition(":")[0]: line[-1].strip() for line in lines}
    assert origins["dtype"] == "environment variable QUIRE_DTYPE" and origins["port"] == "default"
    assert origins["model"] == "argument MODEL" and origins["offline"] == "flag --no-offline"


def test_secrets_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hub-secret")
    printed = settings(["--api-key", "one-secret", "two-secret"]).describe(server_options())
    assert "secret" not in printed
    assert 'api-key: "***"' in printed and "flag --api-key" in printed and "environment variable HF_TOKEN" in printed


def test_a_printed_file_does_not_lose_its_secrets(config_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config_file(settings(["--api-key", "one", "--hf-token", "two"]).describe(server_options()))
    with pytest.raises(ConfigError, match=r"config.yaml: api-key: \*\*\* stands .* set QUIRE_API_KEY or --api-key"):
        settings([*file, "--hf-token", "t"])
    with pytest.raises(ConfigError, match=r"hf-token: \*\*\* .* set HF_TOKEN"):
        settings([*file, "--api-key", "k"])
    monkeypatch.setenv("HF_TOKEN", "token")
    monkeypatch.setenv("QUIRE_API_KEY", "key")
    found = settings(file).values
    assert (found["api_key"], found["hf_token"]) == (("key",), "token")


def test_a_token_flag_without_a_value_takes_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(["--hf-token", "--port", "1"]).values == {"port": 1}
    monkeypatch.setenv("HF_TOKEN", "stored")
    assert settings(["--port", "1", "--hf-token"]).values == {"port": 1, "hf_token": "stored"}
    assert settings(["--hf-token", "given"]).values == {"hf_token": "given"}


def test_nothing_given_is_the_default_server() -> None:
    assert server_config(settings([])) == ServerConfig()


@pytest.mark.parametrize("value", [[[1, 2]], 1, [1.5], ["1"], [True]], ids=str)
def test_counts_are_a_list_of_whole_numbers(value: object) -> None:
    (option,) = (option for _, option in server_options() if option.name == "cudagraph_capture_sizes")
    with pytest.raises(ValueError, match="whole numbers"):
        read_value(option, value)
    assert read_value(option, [1, 2]) == (1, 2)
