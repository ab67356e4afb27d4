"""The GPU's loader without a GPU: the same bytes as the CPU's loader, whatever the chunks and threads."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.config.checkpoint import parse_checkpoint_config
from quire.contracts.errors import WeightsError
from quire.layers.stack import Model
from quire.models.registry import build_model
from quire.platforms.cpu import read_cpu_facts
from quire.weights import stream
from quire.weights.load import load_weights
from quire.weights.plan import LoadReport, plan_load
from quire.weights.stream import cut_chunks, stream_weights

CONFIG = {
    "model_type": "qwen3", "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


def build(dtype: str) -> Model:
    args = parse_checkpoint_config(CONFIG)
    model = build_model(args, dtype=dtype, device="cpu", platform=read_cpu_facts())
    for _, parameter in model.named_parameters():
        parameter.data.fill_(float("nan"))
    return model


def write(folder: Path, dtypes: Sequence[torch.dtype]) -> None:
    """Random tensors for every place, in two shards, with the dtypes in turn and one tensor that nobody needs."""
    model = build("float32")
    names = [(part.stored, (part.rows, *param.shape[1:])) for param in model.layout for part in param.parts]
    tensors = {name: torch.randn(shape).to(dtypes[i % len(dtypes)]) for i, (name, shape) in enumerate(names)}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    for shard in range(2):
        part = dict(list(tensors.items())[shard::2])
        save_file(part, folder / f"model-0000{shard + 1}-of-00002.safetensors")


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32, torch.float16)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("chunk", "threads"), [(7, 1), (64, 3), (1000, 2), (1 << 20, 8)])
def test_the_same_as_the_other_loader(
    tmp_path: Path, dtypes: Sequence[torch.dtype], dtype: str, chunk: int, threads: int
) -> None:
    write(tmp_path, dtypes)
    expected, model = build(dtype), build(dtype)
    load_weights(expected, tmp_path)
    seen: list[tuple[int, int]] = []
    report = stream_weights(model, tmp_path, lambda done, total: seen.append((done, total)), num_threads=threads,
                            chunk_bytes=chunk)
    for (name, a), (_, b) in zip(expected.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert seen == sorted(seen) and seen[-1] == (report.num_bytes, report.num_bytes)


@pytest.mark.parametrize("size", [8, 100, 4096, 1 << 20])
def test_chunks_are_runs_of_whole_elements(tmp_path: Path, size: int) -> None:
    write(tmp_path, (torch.bfloat16, torch.float32))
    plan = plan_load(build("bfloat16"), tmp_path)
    chunks = cut_chunks(plan, size)
    assert sum(chunk.num_bytes for chunk in chunks) == plan.num_bytes
    for chunk in chunks:
        assert 0 < chunk.num_bytes <= size
        assert [piece.start for piece in chunk.pieces] == [
            sum(piece.num_bytes for piece in chunk.pieces[:i]) for i in range(len(chunk.pieces))]
        assert all(piece.num_bytes == piece.target.numel() * piece.dtype.itemsize for piece in chunk.pieces)
    if size == 1 << 20:  # the tensor that nobody needs makes a gap in one file, unless it lies at an end
        assert len(chunks) <= 3
    places = [(str(chunk.file), chunk.offset) for chunk in chunks]
    assert places == sorted(places)


def test_what_is_missing_is_found_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, (torch.float32,))
    save_file({"model.norm.weight": torch.ones(16)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(stream, "_read", lambda *_: pytest.fail("a byte was read"))
    with pytest.raises(WeightsError, match="lacks "):
        stream_weights(build("float32"), tmp_path)


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

    monkeypatch.setattr(stream.os, "preadv", failing)
    with pytest.raises(WeightsError, match="model-0000.-of-00002.safetensors (ended at byte|cannot be read)") as caught:
        stream_weights(build("float32"), tmp_path, num_threads=3, chunk_bytes=256)
    assert "\n" not in str(caught.value)


def test_a_report_tells_the_rate() -> None:
    assert str(LoadReport(16_000_000_000, 0.5)) == "16.00 GB in 0.50 s (32.0 GB/s)"
