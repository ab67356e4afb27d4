"""A reference in a file: what is written is read, damage is told, and so is another checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.contracts.errors import ConfigError
from quire.explain.verify.against import compared
from quire.explain.verify.recording import Recording
from quire.explain.verify.request import Made
from quire.explain.verify.stored import StoredReference, check_checkpoint, check_dump, projected, read, take

PROMPT, TOKENS, VOCAB = [3, 1, 4], [1, 5], 40
SIGNS = ["1001000101011111", "0101111011001110", "0010000010001100"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two tensors."""
    found = tmp_path / "model"
    found.mkdir()
    (found / "config.json").write_text(json.dumps({"rope_theta": 10000, "transformers_version": "5"}))
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 2)}, found / "model.safetensors", {"format": "pt"})
    return found


def stages() -> dict[str, torch.Tensor]:
    """Results of a model without layers, whose greedy tokens are TOKENS."""
    found = {"embed": torch.randn(4, 64, generator=torch.manual_seed(0)), "logits": torch.zeros(4, VOCAB)}
    found["logits"][2, TOKENS[0]] = found["logits"][3, TOKENS[1]] = 8.0
    found["logits"][3, 7] = 7.992
    return found


@pytest.fixture
def stored(folder: Path) -> StoredReference:
    return take("tiny", folder, [*PROMPT, *TOKENS], len(PROMPT), stages(), coded=False)


def test_the_signs_of_projections_are_the_same_everywhere() -> None:
    signs = (4 * projected(torch.eye(3)) > 0).int()
    assert ["".join(map(str, row)) for row in signs.tolist()] == SIGNS
    rows = torch.randn(200, 512)
    ratio = projected(rows).norm(dim=-1) / rows.norm(dim=-1)
    assert 0.95 < ratio.square().mean() < 1.05 and ratio.min() > 0.4


def test_a_reference_is_read_as_it_was_written(stored: StoredReference, folder: Path, tmp_path: Path) -> None:
    stored.write(tmp_path / "file")
    found = read(tmp_path / "file")
    assert {name: value for name, value in vars(found).items() if not isinstance(value, torch.Tensor)} == {
        name: value for name, value in vars(stored).items() if not isinstance(value, torch.Tensor)
    }
    assert torch.equal(found.projections, stored.projections) and torch.equal(found.logits, stored.logits)
    assert {"transformers", "torch", "python"} < found.versions.keys()
    check_checkpoint(found, folder, tmp_path / "file")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-40], "the file is cut, or none of safetensors"),
        (lambda data: data[:4], "the file is cut, or none of safetensors"),
        (lambda data: b"{}" * 40, "the file is cut, or none of safetensors"),
        (lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "the file is damaged"),
        (lambda data: data.replace(b"rope_theta", b"rope_thata"), "the file is damaged"),
        (lambda data: data.replace(b"quire reference", b"quite reference"), "the file is no reference"),
        (lambda data: None, "there is no such file"),
    ],
    ids=["cut", "short", "text", "bit", "letter", "other", "none"],
)
def test_a_damaged_file_is_told(stored: StoredReference, tmp_path: Path, damage: Any, words: str) -> None:
    where = tmp_path / "file"
    stored.write(where)
    changed = damage(where.read_bytes())
    where.unlink() if changed is None else where.write_bytes(changed)
    with pytest.raises(ConfigError, match=words):
        read(where)


def test_another_form_of_the_file_is_told(stored: StoredReference, tmp_path: Path) -> None:
    StoredReference(**vars(stored) | {"version": 2}).write(tmp_path / "file")
    with pytest.raises(ConfigError, match="has form 2, and this version of Quire reads form 1"):
        read(tmp_path / "file")


def test_another_checkpoint_is_told(stored: StoredReference, folder: Path) -> None:
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "6"}))
    check_checkpoint(stored, folder, Path("file"))
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 10010}))
    with pytest.raises(ConfigError, match="config.json has rope_theta 10010 here and 10000 there"):
        check_checkpoint(stored, folder, Path("file"))
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(file)
    for changed, words in (
        (tensors | {"b": tensors["b"] + 1}, "tensor b has other numbers, as do 0 more"),
        ({"a": tensors["a"]}, "tensor b is not here"),
        (tensors | {"c": tensors["a"].clone()}, "tensor c is not there"),
        ({"a": tensors["a"].double(), "b": tensors["b"] + 1}, "tensor a has other numbers, as do 1 more"),
    ):
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(ConfigError, match=words):
            check_checkpoint(stored, folder, Path("file"))


@pytest.mark.parametrize(
    ("tokens", "change", "ok", "words"),
    [
        (TOKENS, 0.0, True, "all 2 equal"),
        (TOKENS, 1e-2, False, "differs: embed is the first stage beyond rounding"),
        ([1, 6], 0.0, False, "first difference at token 1: Quire 6, reference 5"),
        ([2, 6], 0.0, False, "first difference at token 0: Quire 2, reference 1"),
        ([1, 7], 0.0, True, "Quire 7, reference 5 (margin 0.008; a tie, not an error)"),
    ],
    ids=["equal", "stage", "token", "first", "tie"],
)
def test_stages_and_tokens_are_compared(
    stored: StoredReference, tokens: list[int], change: float, ok: bool, words: str
) -> None:
    """Rows behind another token are not compared."""
    recording = Recording()
    for stage, rows in stages().items():
        rows = rows.clone()
        rows[3] += 9.0 * (tokens[0] != TOKENS[0])
        recording.keep(stage, "sum", rows * (1 + change * (stage == "embed")))
    recording.positions = [torch.arange(4)]
    found = compared("m", "file", stored, Made(tokens, recording), "float32 on cpu", 1e-3)
    assert found.ok == ok and words in found.render(), found.render()
    assert found.rows == (3 if tokens[0] != TOKENS[0] else 4)


def test_a_stage_that_the_engine_lacks_is_told(stored: StoredReference) -> None:
    recording = Recording()
    for stage, rows in list(stages().items())[1:]:
        recording.keep(stage, "sum", rows)
    recording.positions = [torch.arange(4)]
    found = compared("m", "file", stored, Made(TOKENS, recording), "float32 on cpu", 1e-3)
    assert not found.ok and "not compared: embed: this engine has no such stages" in found.render()


def test_a_reference_is_written_over_no_other_file(stored: StoredReference, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "weights.safetensors")
    stored.write(tmp_path / "reference")
    check_dump(tmp_path / "reference")
    for path, words in (
        (tmp_path / "weights.safetensors", "is no reference of `quire verify`, and stays"),
        (tmp_path, "this is a folder"),
        (Path(""), "this is a folder"),
        (tmp_path / "none" / "x", "there is no folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_dump(path)
    with pytest.raises(ConfigError, match="this is a folder: give a file of --dump"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="the file cannot be written"):
        stored.write(tmp_path / "none" / "x")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model", "reference", "weights.safetensors"]
