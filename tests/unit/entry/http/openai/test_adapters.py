"""Adapters as a server knows them: names in requests and in /v1/models, the routes that change them, the folder."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.config.serve import ServerConfig
from quire.contracts.errors import ConfigError
from quire.engine.mock_core import build_mock_core

ASKED = {"prompt": [3, 4, 5], "max_tokens": 4, "seed": 1, "return_token_ids": True, "ignore_eos": True}
FLAGS: dict[str, Any] = {"enable_lora": True, "max_loras": 2}


def write(folder: Path, value: float = 1.0) -> Path:
    """Write an adapter of one module."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 1}))
    name = "base_model.model.model.layers.0.mlp.up_proj"
    tensors = {f"{name}.lora_A.weight": torch.full((1, 4), value), f"{name}.lora_B.weight": torch.ones(4, 1)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def client(mock_engine: Any, make_client: Any, text_side: Any) -> Any:
    """Makes a client of a mock engine with adapters; its options are those of the server."""

    def make(**options: Any) -> Any:
        mock_engine.core = build_mock_core(EngineConfig.from_flat(**FLAGS), bundled_model())
        made = make_client(mock_engine, **FLAGS, **options)
        asyncio.run(mock_engine.adapters.start())
        return made

    return make


def ids(client: Any, model: str | None) -> list[int]:
    reply = asyncio.run(client.post("/v1/completions", ASKED | {"model": model}))
    assert reply.status == 200, reply.body
    assert reply.json["model"] == (model or "tiny")
    return list(reply.json["choices"][0]["token_ids"])


def test_a_request_names_its_adapter_as_the_model(client: Any, tmp_path: Path) -> None:
    sql, law = write(tmp_path / "sql"), write(tmp_path / "law", 2.0)
    one = client(lora_modules=(f"sql={sql}", json.dumps({"name": "law", "path": str(law), "base_model_name": "x"})))
    answers = [ids(one, name) for name in (None, "tiny", "sql", "law", "sql")]
    assert answers[0] == answers[1] and answers[2] == answers[4]
    assert len({tuple(answer) for answer in answers}) == 3, "each has answers of its own"
    cards = {card["id"]: card for card in asyncio.run(one.get("/v1/models")).json["data"]}
    assert list(cards) == ["tiny", "alias", "sql", "law"]
    assert (cards["sql"]["parent"], cards["sql"]["root"], cards["tiny"]["parent"]) == ("tiny", str(sql), None)
    assert asyncio.run(one.get("/v1/models/law")).json == cards["law"]
    unknown = asyncio.run(one.post("/v1/completions", ASKED | {"model": "art"}))
    assert unknown.status == 404 and "use tiny, alias, sql, law" in unknown.error["message"]


def test_names_change_only_with_the_flag(client: Any, tmp_path: Path) -> None:
    load = {"lora_name": "sql", "lora_path": str(write(tmp_path / "sql"))}
    for path, body in (("/v1/load_lora_adapter", load), ("/v1/unload_lora_adapter", {"lora_name": "sql"})):
        reply = asyncio.run(client().post(path, body))
        assert reply.status == 404 and "--allow-runtime-lora-updating" in reply.error["message"]


def test_adapters_are_loaded_replaced_and_unloaded(client: Any, tmp_path: Path) -> None:
    one = client(allow_runtime_lora_updating=True)
    folder = write(tmp_path / "sql")

    def load(**more: Any) -> Any:
        return asyncio.run(one.post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": str(folder)} | more))

    assert load().status == 200
    first = ids(one, "sql")
    again = load()
    assert again.status == 400 and "send load_inplace true to replace it" in again.error["message"]
    write(folder, 3.0)
    assert ids(one, "sql") == first, "the name stands for the content that was read"
    assert load(load_inplace=True).status == 200 and ids(one, "sql") != first
    for more, words in (
        ({"lora_name": "tiny-quire", "lora_path": str(tmp_path / "gone")}, "does not exist: give the folder"),
        ({"lora_name": "quire-tiny"}, "has the name of the served model"),
        ({"lora_name": "odd", "lora_path": str(write(tmp_path / "odd"))}, "it does not fit"),
        ({"lora_name": ""}, "1 to 256 printable characters"),
    ):
        reply = load(**more)
        assert reply.status == 400 and words in reply.error["message"], reply.body
    gone = asyncio.run(one.post("/v1/unload_lora_adapter", {"lora_name": "sql"}))
    assert gone.status == 200 and asyncio.run(one.post("/v1/completions", ASKED | {"model": "sql"})).status == 404
    twice = asyncio.run(one.post("/v1/unload_lora_adapter", {"lora_name": "sql"}))
    assert twice.status == 404 and "is not loaded" in twice.error["message"]


def test_any_folder_in_the_folder_of_adapters_is_a_name(client: Any, tmp_path: Path) -> None:
    write(tmp_path / "in" / "sql"), write(tmp_path / "secret")
    one = client(lora_folder=str(tmp_path / "in"))
    assert ids(one, "sql") != ids(one, None)
    for name in ("../secret", "art", ".", "..", "in/sql", "x" * 300, "a\0b", str(tmp_path / "secret")):
        assert asyncio.run(one.post("/v1/completions", ASKED | {"model": name})).status == 404, name
    (tmp_path / "in" / "sick").mkdir()
    (tmp_path / "in" / "sick" / "adapter_config.json").write_text("{")
    sick = asyncio.run(one.post("/v1/completions", ASKED | {"model": "sick"}))
    assert sick.status == 400 and "is not a JSON object" in sick.error["message"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_modules": ("sql=/a",), "enable_lora": False}, "lora_modules needs enable_lora"),
        ({"lora_folder": "/a", "enable_lora": False}, "lora_folder needs enable_lora"),
        ({"lora_modules": ("sql",)}, "lora_modules='sql': give NAME=PATH, or"),
        ({"lora_modules": ("sql=/a", "sql=/b")}, "names 'sql' twice"),
        ({"lora_modules": ("m=/a",), "served_model_name": ("m",)}, "'m' is the name of the served model"),
        ({"lora_modules": ('{"name": "a"}',)}, "give NAME=PATH"),
        ({"allow_runtime_lora_updating": True, "api_server_count": 2}, "one of 2 HTTP processes would learn"),
        ({"max_lora_rank": 512}, "must be at most 256"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras=2 is below max_loras=4"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig.from_flat(**{"enable_lora": True} | options)
