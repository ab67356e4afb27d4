"""Files that were made to harm: the loader refuses them in one line, and looks no further into them than it must."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.args import pooling
from quire.contracts.errors import ModelError, UnsupportedModel, WeightsError
from quire.text.special import read_json
from quire.weights import files
from quire.weights.files import INDEX, read_checkpoint, weight_files

NESTED, NINES = b"[" * 15_000_000, b"9" * 6000
ENTRY = b'{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": ' + ENTRY.replace(b"[0]", b"[" + NINES + b"]") + b"}", "the header entry of a is damaged"),
        (b'{"a": ' + ENTRY.replace(b"0, 0", b"0, " + NINES) + b"}", "the header entry of a is damaged"),
        (NESTED, "damaged header"),
        (b'{"a": ' + NESTED, "damaged header"),
        (b'{"a":' * 3_000_000, "damaged header"),
        (b'{"__metadata__": {"a": ' + NESTED, "damaged header"),
        (b'{"a": ' + ENTRY.replace(b"[0]", b"[" + b"9" * 18 + b",9" * 100_000 + b"]") + b"}", "entry of a is damaged"),
        (b'{"' + b"a" * 2000 + b'": ' + ENTRY.replace(b"F32", b"Q4") + b"}", "damaged header"),
        (b'{"a": [1, 2]}', "the header entry of a is damaged"),
        (b'{"\xff": ' + ENTRY + b"}", "damaged header"),
    ],
    ids=["shape", "offset", "nested", "nested entry", "objects", "metadata", "axes", "name", "list", "UTF-8"],
)
def test_headers(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(text))
    with pytest.raises(WeightsError, match=words) as error:
        read_checkpoint(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_header_of_too_many_tensors_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.2 million empty tensors took 20 s."""
    text = b"{" + b",".join(b'"t%d": %b' % (i, ENTRY) for i in range(30)) + b', "__metadata__": {"a": "{"}}'
    (tmp_path / "model.safetensors").write_bytes(header(text))
    assert len(read_checkpoint(tmp_path).tensors) == 30
    monkeypatch.setattr(files, "MAX_TENSORS", 20)
    monkeypatch.setattr(files, "_HEADER", None)
    with pytest.raises(WeightsError, match="model.safetensors has a header of more than 20 tensors"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b'{"weight_map": ' + NESTED,
        b'{"metadata": ' + NESTED,
        b'{"weight_map": {"a": ' + NINES + b"}}",
        b'{"weight_map": ["a"]}',
        b"[]",
        b"\xff",
    ],
    ids=["map", "metadata", "number", "list", "top", "UTF-8"],
)
def test_indexes(tmp_path: Path, text: bytes) -> None:
    (tmp_path / INDEX).write_bytes(text)
    with pytest.raises(WeightsError, match=f"{INDEX} is damaged"):
        weight_files(tmp_path)


@pytest.mark.parametrize("most", ["MAX_HEADER", "MAX_NAMES"])
def test_an_index_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": "model.safetensors" for i in range(30)}}))
    monkeypatch.setattr(files, most, 20)
    with pytest.raises(WeightsError, match=f"{INDEX} is damaged"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("read", "kind"),
    [(read_json, UnsupportedModel), (lambda path: pooling._of_modules(pooling.PoolingPlan(width=1), path), ModelError)],
    ids=["tokenizer_config.json", "modules.json"],
)
def test_nested_settings(tmp_path: Path, read: Callable[[Path], Any], kind: type[Exception]) -> None:
    (tmp_path / "a.json").write_bytes(NESTED)
    with pytest.raises(kind):
        read(tmp_path / "a.json")
