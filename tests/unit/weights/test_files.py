"""Safetensors headers and folders: what is read, and one clear line for each kind of damage."""

import json
from pathlib import Path

import pytest

from quire.contracts.errors import WeightsError
from quire.weights.files import INDEX, read_checkpoint, stored_in


def write(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A safetensors file from (dtype, shape, bytes) by name."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def two_shards(folder: Path, index: bool = True) -> None:
    write(folder / "model-00001-of-00002.safetensors", {"a": ("F32", [2], bytes(8)), "b": ("BF16", [3], bytes(6))})
    write(folder / "model-00002-of-00002.safetensors", {"c": ("F16", [1, 1], bytes(2))})
    if index:
        placed = {name: f"model-0000{1 + (name == 'c')}-of-00002.safetensors" for name in "abc"}
        (folder / INDEX).write_text(json.dumps({"weight_map": placed}))


@pytest.mark.parametrize("index", [True, False])
def test_shards(tmp_path: Path, index: bool) -> None:
    two_shards(tmp_path, index)
    checkpoint = read_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["a", "b", "c"] and checkpoint.num_bytes == 16
    b = checkpoint.tensors["b"]
    assert (b.dtype, b.shape, b.num_bytes, b.file.name) == ("BF16", (3,), 6, "model-00001-of-00002.safetensors")
    assert b.offset == checkpoint.tensors["a"].offset + 8


@pytest.mark.parametrize("index", [True, False])
def test_names_of_a_model_without_head_are_those_of_a_whole_one(tmp_path: Path, index: bool) -> None:
    names = ["embed_tokens.weight", "layers.0.input_layernorm.weight", "norm.weight"]
    write(tmp_path / "model.safetensors", {name: ("F32", [2], bytes(8)) for name in names})
    if index:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    full = [f"model.{name}" for name in names]
    found = read_checkpoint(tmp_path).tensors
    assert list(found) == [stored.name for stored in found.values()] == full
    assert stored_in(tmp_path) == dict.fromkeys(full, "model.safetensors")


def test_second_copies_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": ("F32", [1], bytes(4))})
    write(tmp_path / "consolidated.safetensors", {"x": ("F32", [1], bytes(4))})
    assert list(read_checkpoint(tmp_path).tensors) == ["a"]


def damage(folder: Path, kind: str) -> str:
    """Break the two shards in one way; returns what the message must name."""
    first, second = (folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    match kind:
        case "truncated":
            first.write_bytes(first.read_bytes()[:-1])
            return "model-00001-of-00002.safetensors is truncated: b ends"
        case "cut in the header":
            first.write_bytes(first.read_bytes()[:20])
            return "model-00001-of-00002.safetensors is truncated"
        case "empty":
            first.write_bytes(b"")
            return "model-00001-of-00002.safetensors is truncated"
        case "not safetensors":
            first.write_bytes((5).to_bytes(8, "little") + b"{bad}" + bytes(99))
            return "damaged header"
        case "missing shard":
            second.unlink()
            return "model-00002-of-00002.safetensors is missing"
        case "missing shard without index":
            second.unlink()
            (folder / INDEX).unlink()
            return "model-00002-of-00002.safetensors is missing"
        case "tensor missing":
            write(second, {"d": ("F16", [1], bytes(2))})
            return "has no tensor c"
        case "tensor twice":
            write(second, {"c": ("F16", [1], bytes(2)), "a": ("F32", [2], bytes(8))})
            return "a is in both"
        case "wrong length":
            write(second, {"c": ("F16", [3], bytes(2))})
            return "c [3] F16 needs 6 bytes"
        case "unknown dtype":
            write(second, {"c": ("Q4", [4], bytes(2))})
            return "entry of c"
        case "offsets of text" | "offsets of fractions" | "negative shape":
            changes = {
                "offsets of text": {"data_offsets": ["0", "2"]},
                "offsets of fractions": {"data_offsets": [0.0, 2.0]},
                "negative shape": {"shape": [-1, -1]},
            }
            entry = {"dtype": "F16", "shape": [1, 1], "data_offsets": [0, 2]} | changes[kind]
            text = json.dumps({"c": entry}).encode()
            second.write_bytes(len(text).to_bytes(8, "little") + text + bytes(2))
            return "model-00002-of-00002.safetensors: the header entry of c is damaged"
        case "shared bytes" | "gap":
            offset = 0 if kind == "shared bytes" else 4
            entries = {"c": ("F16", [1, 1], bytes(2)), "e": ("F16", [1, 1], bytes(2))}
            write(second, entries)
            data = second.read_bytes().replace(b"[2, 4]", f"[{offset}, {offset + 2}]".encode())
            second.write_bytes(data + bytes(2))
            return "e begins at byte"
        case "bytes behind":
            second.write_bytes(second.read_bytes() + bytes(3))
            return "model-00002-of-00002.safetensors has 3 bytes behind its last tensor"
        case "pointer of Git LFS":
            second.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
            return "model-00002-of-00002.safetensors is a pointer of Git LFS"
        case "damaged index":
            (folder / INDEX).write_text('{"weight_map": {"a": "../../etc/passwd"}}')
            return f"{INDEX} is damaged"
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "truncated",
        "cut in the header",
        "empty",
        "not safetensors",
        "missing shard",
        "missing shard without index",
        "tensor missing",
        "tensor twice",
        "wrong length",
        "unknown dtype",
        "offsets of text",
        "offsets of fractions",
        "negative shape",
        "shared bytes",
        "gap",
        "bytes behind",
        "pointer of Git LFS",
        "damaged index",
    ],
)
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    two_shards(tmp_path)
    named = damage(tmp_path, kind)
    with pytest.raises(WeightsError) as error:
        read_checkpoint(tmp_path)
    message = str(error.value)
    assert named in message and "\n" not in message
    assert "download it again" in message or "remove one" in message or "git lfs pull" in message


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin.*save_pretrained"):
        read_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(WeightsError, match=r"no \.safetensors file"):
        read_checkpoint(tmp_path)
