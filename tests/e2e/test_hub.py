"""Models of the hub: all that can be refused is refused before the first byte of the weights."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import ModelNotFound, UserError
from quire.entry.cli.main import main
from quire.entry.obtain import obtain_model

from ..support.fake_hub import FakeHub, fake_hub
from .serving import SOURCE

NAME = "quire/tiny"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
HEADER_BYTES = 110_000  # of a file's beginning, as the hub's client asks for it
BIG = 7_000_000  # less than either file of the weights


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with quire/tiny, which is the bundled model."""
    shutil.copytree(bundled_model(), tmp_path / "tiny")
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with fake_hub() as found:
        found.repos[NAME] = tmp_path / "tiny"
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("PYTHONPATH", str(SOURCE))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            found.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield found


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_header(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace the entries of a safetensors file; each takes the bytes behind the old header that it names."""
    data, body = path.read_bytes(), b""
    end = 8 + int.from_bytes(data[:8], "little")
    changed = change(json.loads(data[8:end]))
    for entry in (entry for name, entry in changed.items() if name != "__metadata__"):
        taken = data[slice(*(end + offset for offset in entry["data_offsets"]))]
        entry["data_offsets"] = [len(body), len(body) + len(taken)]
        body += taken
    header = json.dumps(changed).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)


def without_index(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Another header in the first file, and no index that would speak against it."""
    (folder / INDEX).unlink()
    edit_header(folder / SHARDS[0], change)


def only_pickles(folder: Path) -> None:
    for name in (*SHARDS, INDEX):
        (folder / name).unlink()
    (folder / "pytorch_model.bin").write_bytes(bytes(BIG))


def drop_one(header: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in header.items() if name != "model.embed_tokens.weight"}


def add_one(header: dict[str, Any]) -> dict[str, Any]:
    return header | {"surplus.weight": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}


def retype(header: dict[str, Any]) -> dict[str, Any]:
    return {name: entry if name == "__metadata__" else entry | {"dtype": "I16"} for name, entry in header.items()}


REFUSALS: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "architecture": (lambda f: edit(f, model_type="gpt9", architectures=["Gpt9"]), {}, "'gpt9' is not implemented"),
    "quantized": (lambda f: edit(f, quantization_config={"quant_method": "hqq"}), {}, "asks for 'hqq'"),
    "context": (lambda f: None, {"max_model_len": 10**6}, "exceeds the model's context"),
    "dtype": (lambda f: None, {"dtype": "float16", "device": "cpu"}, "dtype=float16 is not implemented on a CPU"),
    "routing": (lambda f: None, {"routing": "uniform", "load_format": "dummy"}, "is for models with experts"),
    "chat template": (lambda f: None, {"chat_template": "/no/such.jinja"}, "/no/such.jinja"),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), {}, "tokenizer.json"),
    "pickles": (only_pickles, {}, "quire/tiny has only pytorch_model.bin"),
    "shard": (lambda f: (f / SHARDS[1]).unlink(), {}, f"quire/tiny: {SHARDS[1]} is missing"),
    "shape": (lambda f: edit(f, intermediate_size=96), {}, "config.json makes it [256, 96]"),
    "missing tensor": (lambda f: without_index(f, drop_one), {}, "quire/tiny lacks model.embed_tokens.weight"),
    "surplus tensor": (lambda f: without_index(f, add_one), {}, "surplus.weight"),
    "stored type": (lambda f: edit_header(f / SHARDS[0], retype), {}, "is stored as I16"),
    "damaged header": (
        lambda f: (f / SHARDS[0]).write_bytes(b"\x20" + bytes(7) + b"nothing here" * 999),
        {},
        "has a damaged header",
    ),
    "cut short": (lambda f: (f / SHARDS[1]).write_bytes((f / SHARDS[1]).read_bytes()[:99_999]), {}, "is truncated"),
    "last bytes": (lambda f: (f / SHARDS[1]).write_bytes((f / SHARDS[1]).read_bytes()[:-9]), {}, "is truncated"),
    "few blocks": (lambda repo: None, {"num_blocks": 2, "max_model_len": 4096}, "max_model_len=4096 needs"),
    "large cache": (lambda repo: None, {"kv_cache_memory_bytes": 9 << 40}, "asks for 9216.00 GiB of KV cache"),
    "memory": (lambda f: None, {"device": "cpu"}, "does not hold one block"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_can_be_refused_is_refused_before_the_weights(
    hub: FakeHub, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, options, said = REFUSALS[name]
    prepare(hub.repos[NAME])
    if name == "memory":
        monkeypatch.setattr("quire.plan.memory.GIB", 1)
        monkeypatch.setattr("quire.platforms.cpu._memory", lambda: (1000, 1000), raising=False)
    with pytest.raises(UserError) as error:
        LLM(NAME, **options)
    assert said in str(error.value) and "\n" not in str(error.value) and "download it again" not in str(error.value)
    assert str(hub.repos[NAME].parent) not in str(error.value) or name in ("architecture", "quantized", "tokenizer")
    assert hub.weight_bytes() <= 2 * HEADER_BYTES


@pytest.mark.parametrize(
    "command",
    [
        ("serve",),
        ("complete", "-p", "a"),
        ("chat", "-q", "a"),
        ("trace", "-p", "a"),
        ("verify",),
        ("bench", "latency"),
        ("bench", "throughput"),
        ("bench", "startup"),
        ("run-batch",),
    ],
)
def test_every_command_refuses_before_the_weights(
    hub: FakeHub, tmp_path: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    edit(hub.repos[NAME], intermediate_size=96)
    (tmp_path / "in.jsonl").write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'
    )
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")) if command == ("run-batch",) else ()
    words = [*command, *files, "--model", NAME, "--device", "cpu"]
    if command[0] in ("serve", "run-batch") or "startup" in command:  # with processes of their own
        told = subprocess.run(
            [sys.executable, "-m", "quire", *words], capture_output=True, text=True, env=os.environ, timeout=120
        )
        code, said = told.returncode, told.stderr
    else:
        code, said = main(words), capsys.readouterr().err
    assert code == 3, said
    errors = [line for line in said.splitlines() if "error:" in line]
    assert len(errors) == 1 and "config.json makes it [256, 96]" in errors[0]
    assert "Traceback" not in said and hub.weight_bytes() <= 2 * HEADER_BYTES


def test_a_model_of_the_hub_answers(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small files come first, every file once; then nothing more is asked, online or offline."""
    asked = SamplingParams(max_tokens=4, temperature=0.0)
    with LLM(NAME, device="cpu") as llm, LLM(device="cpu") as bundled:
        assert (
            llm.generate(["The json"], asked)[0].outputs[0].text
            == bundled.generate(["The json"], asked)[0].outputs[0].text
        )
    names = [name for name, count in hub.sent if count > HEADER_BYTES and name.endswith(".safetensors")]
    assert sorted(names) == list(SHARDS)
    first = next(i for i, (name, _) in enumerate(hub.sent) if name.endswith(".safetensors"))
    assert {name for name, _ in hub.sent[:first]} >= {"config.json", "tokenizer.json", INDEX}
    hub.sent.clear()
    with LLM(NAME, device="cpu"):
        assert not hub.sent
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with LLM(NAME, device="cpu", offline=True):
        assert not hub.sent


def test_a_cache_of_a_part_gets_the_rest(hub: FakeHub, tmp_path: Path) -> None:
    with LLM(NAME, device="cpu") as llm:
        folder = llm.engine.folder
    (folder / SHARDS[1]).unlink()
    hub.sent.clear()
    with LLM(NAME, device="cpu"):
        assert {name for name, _ in hub.sent} <= {SHARDS[1]}
    (folder / SHARDS[1]).unlink()
    with pytest.raises(ModelNotFound, match="in the cache without all of its weights: run it once without --offline"):
        LLM(NAME, device="cpu", offline=True)


def test_random_weights_need_no_download(hub: FakeHub) -> None:
    with LLM(NAME, device="cpu", load_format="dummy"):
        assert not hub.weight_bytes()


def test_made_up_tokens_need_no_weights(hub: FakeHub) -> None:
    obtain_model(EngineConfig.from_flat(model=NAME, device="mock"))
    assert hub.sent and not hub.weight_bytes()


def test_a_tokenizer_comes_without_weights(hub: FakeHub) -> None:
    with LLM(device="cpu", tokenizer=NAME):
        assert not hub.weight_bytes()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("weights", NAME), "model.embed_tokens.weight"),
        (("explain", NAME, "--json"), SHARDS[1]),
        (("explain", NAME, "--device", "h200", "-tp", "2"), "cuda (described"),
    ],
)
def test_weights_and_explain_read_headers(
    hub: FakeHub, command: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (hub.repos[NAME] / INDEX).unlink()
    assert main(list(command)) == 0
    assert said in capsys.readouterr().out
    assert 0 < hub.weight_bytes() <= 2 * HEADER_BYTES


@pytest.mark.parametrize(
    "name",
    ["pickles", "shard", "shape", "missing tensor", "surplus tensor", "stored type", "damaged header", "cut short"],
)
def test_explain_says_what_would_not_load(hub: FakeHub, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    REFUSALS[name][0](hub.repos[NAME])
    with pytest.raises(UserError) as error:
        LLM(NAME, device="cpu")
    assert main(["explain", NAME, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["load_error"] == str(error.value)
    assert main(["explain", NAME, "--load-format", "dummy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["load_error"] == ""


def test_explain_checks_a_whole_cache(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(NAME, device="cpu") as llm:
        folder = llm.engine.folder
    edit_header(folder / SHARDS[0], retype)
    for model in (NAME, str(folder)):
        assert main(["explain", model, "--offline", "--json"]) == 0
        assert "is stored as I16" in json.loads(capsys.readouterr().out)["load_error"]


def test_weights_of_the_hub_are_those_of_the_files(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for model in (NAME, str(hub.repos[NAME])):
        assert main(["weights", model, "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out) | {"model": ""})
    assert shown[0] == shown[1]


def test_a_tensor_of_a_whole_cache_is_read_without_the_hub(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(NAME, device="cpu"):
        hub.sent.clear()
    assert main(["weights", NAME, "--offline"]) == 0 and not hub.sent


def gate(hub: FakeHub) -> None:
    hub.gated.add(NAME)


def close(hub: FakeHub) -> None:
    hub.closed = True


@pytest.mark.parametrize(
    ("prepare", "options", "said"),
    [
        (gate, {}, "is gated: accept its terms at https://huggingface.co/quire/tiny and log in"),
        (close, {}, "log in with `hf auth login`"),
        (lambda hub: hub.repos.clear(), {}, "is neither a folder here nor a repository on the hub"),
        (lambda hub: None, {"revision": "v9"}, "has no revision 'v9'"),
        (lambda hub: None, {"offline": True}, "was not downloaded before: run it once without --offline"),
    ],
)
@pytest.mark.parametrize("command", ["weights", "explain", "complete"])
def test_hub_refusals_are_one_line(
    hub: FakeHub,
    prepare: Callable[[FakeHub], object],
    options: dict[str, Any],
    said: str,
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare(hub)
    given = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    assert main([command, NAME, *given, *(("-p", "a") if command == "complete" else ())]) == 3
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert said in line and NAME in line


def test_the_switch_in_the_environment_is_named(hub: FakeHub) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "quire", "weights", NAME],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        timeout=60,
    )
    assert told.returncode == 3 and "run it once without HF_HUB_OFFLINE" in told.stderr


def adapter(folder: Path, **more: Any) -> Path:
    """An adapter for a layer of the bundled model."""
    folder.mkdir()
    config: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | more))
    at, made = "base_model.model.model.layers.0.self_attn.q_proj", {"lora_A": (2, 256), "lora_B": (256, 2)}
    save_file({f"{at}.{name}.weight": torch.ones(shape) for name, shape in made.items()}, folder / ADAPTER)
    return folder


ADAPTER = "adapter_model.safetensors"


def test_adapters_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    """Their config is checked before their weights are downloaded, and a second request downloads nothing."""
    hub.repos["quire/sql"] = adapter(tmp_path / "sql")
    hub.repos["quire/dora"] = adapter(tmp_path / "dora", use_dora=True)
    options = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 22, "enable_lora": True}
    with LLM(**options, use_tqdm_on_load=False) as llm:
        params = SamplingParams(max_tokens=2)
        with pytest.raises(UserError, match="DoRA"):
            llm.generate("a", params, lora_request=LoRARequest("dora", 1, "quire/dora"), use_tqdm=False)
        assert not hub.weight_bytes()
        for _ in range(2):
            llm.generate("a", params, lora_request=LoRARequest("sql", 2, "quire/sql"), use_tqdm=False)
            assert hub.weight_bytes() == (tmp_path / "sql" / ADAPTER).stat().st_size
        with pytest.raises(ModelNotFound, match="quire/none"):
            llm.generate("a", params, lora_request=LoRARequest("none", 3, "quire/none"), use_tqdm=False)
