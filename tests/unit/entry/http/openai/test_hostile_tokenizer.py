"""A tokenizer that panics, or makes any text of a short one, fails the request alone; others are answered."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import RequestFailed, UnsupportedModel
from quire.text import tokenizer as module
from quire.text.load import load_text
from quire.text.normalizer_limits import growth_of
from quire.text.tokenizer import Backend, Tokenizer

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


class PanicException(BaseException):
    """A panic of a library in Rust."""


class Panics:
    """A backend whose calls all panic."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise PanicException("called `Option::unwrap()` on a `None` value")

        return call


def folder_with(tmp_path: Path, normalizer: Any) -> Path:
    for path in bundled_model().iterdir():
        if path.suffix in (".json", ".jinja"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"normalizer": normalizer}))
    return tmp_path


def test_a_panic_is_an_error_of_the_request(
    mock_engine: Any, make_client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, text = make_client(mock_engine), mock_engine.text.tokenizer
    monkeypatch.setattr(text, "_backend", Panics())
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a " * 9000}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        reply = asyncio.run(client.post(path, body))
        assert reply.status == 500 and "tokenizer failed on this text" in reply.error["message"], path
    with pytest.raises(RequestFailed):
        text.encode_batch(["a", "b"])


def test_a_panic_while_loading_is_a_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Backend", Panics())
    with pytest.raises(UnsupportedModel, match="tokenizer.json cannot be read"):
        Tokenizer.load(bundled_model())


@pytest.mark.parametrize(
    ("normalizer", "growth"),
    [
        (None, 1),
        ({"type": "NFC"}, 1),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}, 1),
        ({"type": "Prepend", "prepend": "\u2581"}, 1),
        ({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}, 1),
        (DOUBLE, 2),
        ({"type": "Replace", "pattern": {"Regex": ""}, "content": "bc"}, 3),
        ({"type": "Sequence", "normalizers": [DOUBLE] * 20}, 2**20),
        ({"type": "Sequence", "normalizers": [DOUBLE] * 90}, 2**40),
    ],
)
def test_growth_of_a_text(tmp_path: Path, normalizer: Any, growth: float) -> None:
    folder = folder_with(tmp_path, normalizer)
    assert growth_of(Backend.from_file(str(folder / "tokenizer.json"))) == growth


def test_a_text_that_grows_without_end_fails_in_time_and_others_are_answered(
    mock_engine: Any, make_client: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHILD_MEMORY", 2**26)
    folder = folder_with(tmp_path, {"type": "Sequence", "normalizers": [DOUBLE] * 40})
    mock_engine.text = load_text(EngineConfig(), folder, apart=True)
    seen: list[int] = []
    original = module.encode_apart

    def watched(*args: Any) -> list[int]:
        seen.append(threading.get_ident())
        return original(*args)

    monkeypatch.setattr(module, "encode_apart", watched)
    reply = asyncio.run(make_client(mock_engine).post("/v1/completions", {"prompt": "a cat", "max_tokens": 1}))
    assert reply.status == 500 and "could not be encoded: the process for it ended" in reply.error["message"]
    assert seen and threading.get_ident() not in seen


@pytest.mark.parametrize(
    ("seconds", "words"), [(1e-3, "it took more than 0 s"), (30, "the model's tokenizer makes more than 65552 tokens")]
)
def test_limits_of_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, words: str) -> None:
    monkeypatch.setattr(module, "CHILD_SECONDS", seconds)
    monkeypatch.setattr(module, "APART", 1)
    folder = folder_with(tmp_path, {"type": "Sequence", "normalizers": [DOUBLE] * 15})
    tokenizer = Tokenizer.load(folder)
    tokenizer.apart = folder
    with pytest.raises(RequestFailed, match=words):
        tokenizer.encode("aaaa", False)
