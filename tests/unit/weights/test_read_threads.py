"""The loader's threads: the same tensors whatever the chunks and threads, and faults while files are read."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.errors import WeightsError
from quire.plan.layout import layout
from quire.weights import read_threads as lanes
from quire.weights.load import LoadReport, load_weights
from quire.weights.read_threads import Chunk, Lanes, OpenUnit, ReadChunker
from quire.weights.units import LoadUnit

from ...support.filled_models import Taken, sliced, stored_tensors

CONFIG = {
    "model_type": "qwen3", "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
UNIT = LoadUnit("", 0, ())


def build(dtype: str) -> Any:
    args = parse_checkpoint_config(CONFIG)
    return Taken(args, layout(args), getattr(torch, dtype))


def write(folder: Path, dtypes: Sequence[torch.dtype]) -> dict[str, Tensor]:
    """Random tensors for every part, in two shards, with the dtypes in turn and one tensor that nobody needs."""
    made = stored_tensors(build("float32").layout)
    tensors = {name: tensor.to(dtypes[i % len(dtypes)]) for i, (name, tensor) in enumerate(made.items())}
    unread = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    for shard in range(2):
        part = dict(list((tensors | unread).items())[shard::2])
        save_file(part, folder / f"model-0000{shard + 1}-of-00002.safetensors")
    return tensors


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32, torch.float16)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("chunk", "threads"), [(8, 1), (64, 3), (1000, 2), (1 << 20, 8)])
def test_every_tensor_arrives(
    tmp_path: Path, dtypes: Sequence[torch.dtype], dtype: str, chunk: int, threads: int
) -> None:
    stored, model, seen = write(tmp_path, dtypes), build(dtype), list[tuple[int, int]]()
    report = load_weights(
        model, tmp_path, lambda done, total: seen.append((done, total)), num_threads=threads, chunk_bytes=chunk
    )
    assert model.tensors.keys() == {param.name for param in model.layout}
    for param in model.layout:
        expected = torch.cat([sliced(part, stored[part.stored]).to(model.dtype) for part in param.parts])
        assert torch.equal(model.tensors[param.name], expected), param.name
    size = sum(tensor.nbytes for tensor in stored.values())
    assert seen == sorted(seen) and seen[-1] == (size, size) == (report.num_bytes, report.num_bytes)


@pytest.mark.parametrize("size", [8, 100, 4096])
def test_chunks_are_runs_of_whole_elements(size: int) -> None:
    """Runs of two files, of types of 2 and 4 bytes, some of which go on where the one before them ends."""
    chunks: list[Chunk] = []
    writer, first, second = ReadChunker(chunks.append, size), Path("a"), Path("b")
    reads = [
        (first, 0, 60, torch.float32),
        (first, 60, 30, torch.bfloat16),
        (first, 100, 200, torch.bfloat16),
        (second, 300, 4, torch.float32),
    ]
    units, targets = [], []
    for file, offset, length, dtype in reads:
        units.append(OpenUnit(UNIT, {}, length))
        targets.append(torch.zeros(length // dtype.itemsize, dtype=dtype))
        writer.add(units[-1], file, [(offset, length)], targets[-1], dtype)
    writer.flush()
    assert sum(chunk.num_bytes for chunk in chunks) == 294
    for chunk in chunks:
        assert 0 < chunk.num_bytes <= size and chunk.num_bytes == sum(length for _, length in chunk.runs)
        starts = [sum(piece.num_bytes for piece in chunk.pieces[:i]) for i in range(len(chunk.pieces))]
        assert [piece.start for piece in chunk.pieces] == starts
        assert all(offset + length <= after for (offset, length), (after, _) in zip(chunk.runs, chunk.runs[1:]))  # noqa: B905
    if size == 4096:
        assert [chunk.runs for chunk in chunks] == [[(0, 90), (100, 200)], [(300, 4)]]
        assert [len(chunk.pieces) for chunk in chunks] == [3, 1]


def test_neighbours_in_a_file_that_are_neighbours_of_a_target_are_one_piece() -> None:
    """Gate and up of an expert, unless their types differ."""
    chunks: list[Chunk] = []
    writer, target, unit = ReadChunker(chunks.append, 1 << 10), torch.zeros(12), OpenUnit(UNIT, {}, 44)
    writer.add(unit, Path("a"), [(8, 16)], target, torch.float32, first=2)
    writer.add(unit, Path("a"), [(24, 16)], target, torch.float32, first=6)
    writer.add(unit, Path("a"), [(40, 4)], target, torch.bfloat16, first=10)
    writer.flush()
    (chunk,) = chunks
    assert chunk.runs == [(8, 36)] and [(piece.first, piece.count) for piece in chunk.pieces] == [(2, 8), (10, 2)]


def test_columns_are_one_piece_of_many_runs() -> None:
    chunks: list[Chunk] = []
    writer = ReadChunker(chunks.append, 1 << 10)
    writer.add(OpenUnit(UNIT, {}, 24), Path("a"), [(8, 8), (40, 8), (72, 8)], torch.zeros(6), torch.float32)
    writer.flush()
    (chunk,) = chunks
    assert chunk.runs == [(8, 8), (40, 8), (72, 8)] and [piece.count for piece in chunk.pieces] == [6]


def test_what_is_missing_is_found_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, (torch.float32,))
    save_file({"model.norm.weight": torch.ones(16)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(Lanes, "read", lambda *_: pytest.fail("a byte was read"))
    with pytest.raises(WeightsError, match="lacks "):
        load_weights(build("float32"), tmp_path)


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_a_chunk_is_read_into_many_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """In as many calls as the system's limit asks for, each of which may end early."""
    write(tmp_path, (torch.float32,))
    model, real, calls = build("float32"), os.preadv, list[int]()

    def short(handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return real(handle, [*buffers[:2], *(buffer[:7] for buffer in buffers[2:3])], offset)

    monkeypatch.setattr(lanes, "MOST_VIEWS", most)
    monkeypatch.setattr(lanes.os, "preadv", short)
    load_weights(model, tmp_path)
    assert max(calls) == 1 if most == 1 else 1 < max(calls) <= most
    stored = stored_tensors(model.layout)
    for param in model.layout:
        expected = torch.cat([sliced(part, stored[part.stored]) for part in param.parts])
        assert torch.equal(model.tensors[param.name], expected), param.name


def test_at_most_two_of_the_largest_units_are_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted when a unit is opened and when its layer has packed it."""
    write(tmp_path, (torch.float32,))
    model, live, most = build("float32"), 0, 0
    real, take = lanes.OpenUnit.__init__, model.take

    def opened(self: OpenUnit, unit: LoadUnit, *given: Any) -> None:
        nonlocal live, most
        live += unit.num_bytes(4)
        most = max(most, live)
        real(self, unit, *given)

    def taken(module: str, place: int, tensors: dict[str, Tensor]) -> None:
        nonlocal live
        take(module, place, tensors)
        live -= sum(tensor.nbytes for tensor in tensors.values())

    monkeypatch.setattr(lanes.OpenUnit, "__init__", opened)
    model.take = taken
    load_weights(model, tmp_path, chunk_bytes=64)
    largest = max(
        sum(4 * p.shape[0] * (p.shape[1] if p.shape[1:] else 1) for p in model.layout if p.module == module)
        for module in {param.module for param in model.layout}
    )
    assert live == 0 and largest < most <= 2 * largest < sum(t.nbytes for t in model.tensors.values())


@pytest.mark.parametrize("fault", [0, OSError(5, "Input/output error")])
def test_a_file_that_fails_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int | OSError
) -> None:
    write(tmp_path, (torch.float32,))
    reads = iter(range(10**6))
    real = os.preadv

    def failing(handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        if next(reads) < 20:
            return real(handle, [buffers[0][:5]], offset)  # short reads go on
        if isinstance(fault, OSError):
            raise fault
        return fault

    monkeypatch.setattr(lanes.os, "preadv", failing)
    with pytest.raises(WeightsError, match="model-0000.-of-00002.safetensors (ended at byte|cannot be read)") as caught:
        load_weights(build("float32"), tmp_path, num_threads=3, chunk_bytes=256)
    assert "\n" not in str(caught.value)


def test_a_report_tells_the_rate() -> None:
    assert str(LoadReport(16_000_000_000, 0.5)) == "16.00 GB in 0.50 s (32.0 GB/s)"
