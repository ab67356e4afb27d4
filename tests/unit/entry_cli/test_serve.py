"""`quire serve` up to the point where it starts: what it prints, what it warns of, what it hands on."""

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import quire.entry.http
from quire.config.exposure import bind_warnings
from quire.config.serve import ServerConfig
from quire.entry.cli.main import main


@pytest.fixture
def started_servers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put a server that only remembers in the real one's place."""
    module, seen = types.ModuleType("quire.entry.http.server"), []

    def run(config: ServerConfig, console: Any) -> int:
        seen.append(config)
        console.note("started")
        return 0

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quire.entry.http.server", module)
    monkeypatch.setattr(quire.entry.http, "server", module, raising=False)
    return seen


def test_the_configuration_is_handed_on(started_servers: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "a/b", "--port", "9", "--use-fp64-gumbel"]) == 0
    assert started_servers == [ServerConfig.from_flat(model="a/b", port=9)]
    assert capsys.readouterr().err.splitlines() == [
        "quire: note: --use-fp64-gumbel changes nothing: noise is drawn in one way, by counter.",
        "quire: note: started",
    ]


def test_print_config_starts_nothing(started_servers: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "a/b", "--api-key", "secret", "--print-config"]) == 0
    out, err = capsys.readouterr()
    assert 'model: "a/b"' in out and "# argument MODEL" in out and "secret" not in out
    assert "the API key is printed as ***" in err and "secret" not in err
    assert started_servers == []


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "max-waiting: 2048 # default: 8 x max_num_seqs, at least 1024"),
        (["--max-num-seqs", "4"], "max-waiting: 1024 # default: 8 x max_num_seqs, at least 1024"),
        (["--max-waiting", "7"], "max-waiting: 7 # flag --max-waiting"),
    ],
)
def test_print_config_shows_the_bound_of_the_queue(
    args: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--print-config", *args]) == 0
    assert line in [" ".join(printed.split()) for printed in capsys.readouterr().out.splitlines()]


def test_print_config_refuses_what_cannot_work(started_servers: list[Any]) -> None:
    assert main(["serve", "--print-config", "--ssl-keyfile", "k"]) == 3
    assert started_servers == []


def test_print_config_tells_of_flags_that_change_nothing(
    started_servers: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--print-config", "--use-fp64-gumbel"]) == 0
    assert "quire: note: --use-fp64-gumbel changes nothing" in capsys.readouterr().err


@pytest.mark.parametrize(("args", "code"), [([], 3), (["--api-key", "k"], 0), (["--print-config"], 0)])
def test_a_key_for_vllm_opens_no_server(
    args: list[str],
    code: int,
    started_servers: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert main(["serve", *args]) == code
    assert ("set QUIRE_API_KEY or --api-key" in capsys.readouterr().err.replace("Set", "set")) == (code == 3)
    assert len(started_servers) == (args == ["--api-key", "k"])


@pytest.mark.parametrize("command", [["serve"], ["route", "--backend", "http://h"]])
def test_check_reads_the_files_and_starts_nothing(
    command: list[str], tmp_path: Path, started_servers: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "keys.toml").write_text(f'[keys.a]\nsha256 = "{"0" * 64}"')
    assert main([*command, "--check", "--api-key-file", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"1 API keys are in {file}."]
    file.write_text("[keys.a]")
    assert main([*command, "--check", "--api-key-file", str(file)]) == 3
    file.write_text("no certificate")
    assert main([*command, "--check", "--ssl-certfile", str(file), "--ssl-keyfile", str(file)]) == 3
    err = capsys.readouterr().err
    assert "key 'a': give key or sha256" in err and f"--ssl-certfile='{file}'" in err and not started_servers


@pytest.mark.parametrize(
    ("command", "good", "told"),
    [
        (["serve", "--warmup-requests"], '{"custom_id": "a", "url": "/v1/completions", "body": {}}', "1 requests are"),
        (["route", "--backend-file"], "http://h:8000\nhttp://i", "2 backends are in"),
        (["route", "--backend", "http://h", "--state-file"], '{"draining": ["http://h:80"]}', "1 backends are drained"),
    ],
)
def test_check_reads_the_files_that_only_a_start_would_read(
    command: list[str], good: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    for text, code in ((good, 0), ("nonsense nonsense", 3)):
        file.write_text(text)
        assert main([*command, str(file), "--check"]) == code
    assert told in capsys.readouterr().out


def test_check_reads_the_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing adapter and one of another model end the check, as they would end a start."""
    for name, width in (("good", 256), ("other", 264)):
        (folder := tmp_path / "all" / name).mkdir(parents=True)
        (folder / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
        matrices = {"A": np.zeros((4, width), np.float32), "B": np.zeros((256, 4), np.float32)}
        at = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
        save_file({at.format(side): one for side, one in matrices.items()}, folder / "adapter_model.safetensors")
    good, other, none = (tmp_path / "all" / name for name in ("good", "other", "none"))
    command = ["serve", "--check", "--enable-lora"]
    assert main([*command, "--lora-modules", f"sql={good}", "--lora-folder", str(good.parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [f"The adapter sql is in {good}.", f"2 adapters are in {good.parent}."]
    assert lines[3].startswith("The adapter other cannot be used: ") and len(lines) == 4
    for folder, words in ((other, "use an adapter of this model"), (none, "does not exist")):
        assert main([*command, "--lora-modules", f"sql={folder}"]) == 3
        assert words in capsys.readouterr().err
    for model in (["--device=mock"], ["--model=org/model", "--offline"]):  # whose layers are not known here
        assert main([*command, *model, "--lora-modules", f"sql={other}"]) == 0


@pytest.mark.parametrize(
    ("variable", "empty", "args", "code"),
    [
        ("QUIRE_API_KEY", "", ["serve"], 3),
        ("QUIRE_API_KEY", " , ", ["serve"], 3),
        ("QUIRE_API_KEY_FILE", "", ["serve"], 3),
        ("QUIRE_API_KEY", "", ["serve", "--api-key", "k"], 0),
        ("QUIRE_API_KEY_FILE", "", ["route", "--backend", "http://h"], 3),
        ("QUIRE_BACKEND_API_KEY", "", ["route", "--backend", "http://h"], 3),
    ],
)
def test_an_empty_key_in_the_environment_opens_no_server(
    variable: str,
    empty: str,
    args: list[str],
    code: int,
    started_servers: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, empty)
    assert main(args) == code
    assert (f"{variable} is set, but empty" in capsys.readouterr().err) == (code == 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, []),
        ({"host": "0.0.0.0"}, ["everyone who can reach 0.0.0.0:8000 can use this server: set --api-key"]),
        ({"host": "0.0.0.0", "api_key": ("k",)}, ["travel unencrypted"]),
        ({"host": "0.0.0.0", "api_key": ("k",), "ssl_keyfile": "k", "ssl_certfile": "c"}, []),
        ({"host": "0.0.0.0", "uds": "/s"}, []),
        ({"allowed_origins": ("*",)}, ["lets any web page"]),
        ({"allowed_hosts": ("*",)}, ["--allowed-hosts * without"]),
        ({"allowed_hosts": ("a",)}, []),
        ({"allowed_hosts": ("a",), "api_key": ("k",)}, ["--allowed-hosts has no effect here"]),
        ({"allowed_hosts": ("a",), "uds": "/s"}, ["--allowed-hosts has no effect here"]),
        ({"allowed_origins": ("*",), "api_key": ("k",)}, []),
    ],
)
def test_warnings_about_who_can_come_in(options: dict[str, Any], words: list[str]) -> None:
    found = bind_warnings(ServerConfig.from_flat(**options))
    assert len(found) == len(words) and all(word in line for word, line in zip(words, found, strict=True))


def test_a_refused_value_is_told_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--max-num-seqs", "0"), ("--watermark", "3"), ("--root-path", "x")):
        assert main(["serve", f"{flag}={value}"]) == 3
        assert f"quire: error: {flag}=" in capsys.readouterr().err
