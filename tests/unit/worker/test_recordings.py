"""Layers from a recording against the same layers run one by one: the same bits, whatever the step looks like."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch import Tensor

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.blocks import first_seen
from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.native import recording as recording_module
from quire.kernels.native.library import loaded, missing
from quire.kernels.native.recording import CHUNK, Buffers, KernelRecording
from quire.kernels.norm import native as norm
from quire.layers.context import StepContext
from quire.layers.stack import Model, embedded, run_layers
from quire.weights.dummy import load_dummy
from quire.worker import recordings
from quire.worker.recordings import LayerRecordings, not_recordable

from ...support import compared
from ...support.filled_models import built, fill, normal

BLOCK, HEADS, DIM, HIDDEN, BLOCKS = 16, 2, 32, 64, 200
needs_native = pytest.mark.skipif(bool(missing()), reason=missing() or "runs")


def make_model(
    dtype: str = "bfloat16", kind: str = "qwen3", forced: dict[str, str] | None = None, **more: object
) -> Model:
    config = {
        "model_type": kind,
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 4096,
    }
    model = built(parse_checkpoint_config(config | more), dtype, forced=forced)
    load_dummy(model, 0)
    return model


def make_step(model: Model, kv: list[KVView], starts: Sequence[int], tokens: Sequence[int]) -> StepContext:
    """Sequences of `starts` tokens so far that go on by `tokens`; sequence i has blocks i, i + S, i + 2 S, ..."""
    lengths = [start + count for start, count in zip(starts, tokens, strict=True)]
    table = torch.arange(1, BLOCKS // len(starts) * len(starts) + 1, dtype=torch.int32).view(-1, len(starts)).T
    where = [(s, p) for s, start in enumerate(starts) for p in range(start, lengths[s])]
    meta = AttentionMeta(
        query_start=list(itertools.accumulate(tokens, initial=0)),
        seq_lens=lengths,
        block_tables=table[:, : -(-max(lengths) // BLOCK)].clone(memory_format=torch.contiguous_format),
        kv_slots=torch.tensor([int(table[s, p // BLOCK]) * BLOCK + p % BLOCK for s, p in where]),
    )
    return StepContext(torch.tensor([p for _, p in where]), (meta,), kv)


def make_grouped_step(model: Model, kv: list[KVView], starts: Sequence[int], tokens: Sequence[int]) -> StepContext:
    """As `make_step`, with a second KV group: other blocks, and none behind its window or chunks."""
    step = make_step(model, kv, starts, tokens)
    (first,) = step.attention
    tables, size = BLOCKS + 1 - first.block_tables, BLOCK
    slots = (BLOCKS + 1 - first.kv_slots // size) * size + first.kv_slots % size
    window = next(layer.attention.window for layer in model.layers if layer.attention.group == 1)
    for s, start in enumerate(starts):
        tables[s, : first_seen(start, window) // size] = 0
    second = replace(first, block_tables=tables, kv_slots=slots, kv_group=1, plans={})
    return replace(step, attention=(first, second))


def make_cache(model: Model, seed: int) -> list[KVView]:
    random = torch.Generator().manual_seed(seed)
    size = (2, BLOCKS + 1, HEADS, BLOCK, DIM)
    return [KVView(*torch.randn(size, generator=random).to(model.dtype)) for _ in model.layers]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KernelRecording]]:
    """The recordings that were replayed, one entry each time."""
    seen: list[KernelRecording] = []
    replay = KernelRecording.replay
    monkeypatch.setattr(KernelRecording, "replay", lambda recording: (seen.append(recording), replay(recording))[1])
    yield seen


STEPS = [
    ([5], [1]), ([6], [1]), ([511], [1]), ([512], [1]), ([1500], [1]), ([7], [1]),  # one part, several, one
    ([9, 700, 33], [1, 1, 1]), ([600, 3, 900], [1, 1, 1]),  # another number of rows
    ([40], [1]), ([0], [3]), ([64], [3]),  # few rows of one sequence are three rows
]  # fmt: skip


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@torch.inference_mode()
def test_a_replayed_step_has_the_bits_of_one_that_was_run(
    kind: str, dtype: str, replays: list[KernelRecording]
) -> None:
    model = make_model(dtype, kind)
    direct, replayed = make_cache(model, 0), make_cache(model, 0)
    layers = LayerRecordings()
    random = torch.Generator().manual_seed(1)
    for starts, tokens in STEPS:
        hidden = torch.randn(sum(tokens), HIDDEN, generator=random).to(model.dtype)
        expected = run_layers(model, hidden, make_step(model, direct, starts, tokens))
        found = layers.run_layers(model, hidden, make_step(model, replayed, starts, tokens))
        assert torch.equal(found, expected), (starts, tokens)
        for one, other in zip(direct, replayed, strict=True):
            assert torch.equal(one.k, other.k) and torch.equal(one.v, other.v), (starts, tokens)
    assert layers.obstacles == {} and layers.counts == {"recorded": 2, "replayed": len(replays)}
    assert len(replays) == len(STEPS) - 2  # all but the first of one row and of three
    assert len({id(recording) for recording in replays}) == 2


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("window", [1, 20, 600, -20, -64])
@torch.inference_mode()
def test_a_replayed_step_of_two_groups_has_the_bits_of_one_that_was_run(
    window: int, dtype: str, replays: list[KernelRecording]
) -> None:
    """Every other layer has a window or chunks, and other blocks."""
    args = compared.model_args(num_hidden_layers=4, head_dim=DIM, hidden_size=HIDDEN, intermediate_size=96)
    model = compared.make_model(args, dtype=dtype, window=window)
    caches = direct, replayed = make_cache(model, 0), make_cache(model, 0)
    for one in (*direct, *replayed):
        one.k[0] = one.v[0] = float("nan")  # no block of any sequence
    layers, random = LayerRecordings(), torch.Generator().manual_seed(1)
    for starts, tokens in STEPS:
        hidden = torch.randn(sum(tokens), HIDDEN, generator=random).to(model.dtype)
        expected, found = (
            run(model, hidden, make_grouped_step(model, kv, starts, tokens))
            for run, kv in zip((run_layers, layers.run_layers), caches, strict=True)
        )
        assert torch.equal(found, expected) and found.isfinite().all(), (starts, tokens)
        for one, other in zip(direct, replayed, strict=True):
            assert torch.equal(one.k[1:], other.k[1:]) and torch.equal(one.v[1:], other.v[1:]), (starts, tokens)
    assert layers.counts == {"recorded": 2, "replayed": len(replays)} and len(replays) == len(STEPS) - 2


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@torch.inference_mode()
def test_a_replayed_step_reads_its_own_inputs_of_layers(dtype: str, replays: list[KernelRecording]) -> None:
    """Gemma 4 E2B: embeddings of each token for each layer, and a layer that reads the KV of another one."""
    model = make_model(
        dtype,
        "gemma4_text",
        layer_types=["full_attention"] * 3,
        num_kv_shared_layers=1,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=64,
        global_head_dim=DIM,
        hidden_activation="gelu_pytorch_tanh",
    )
    fill(model, normal(0.3))
    direct, replayed = make_cache(model, 0), make_cache(model, 0)
    direct[2], replayed[2] = direct[1], replayed[1]
    layers, random = LayerRecordings(), torch.Generator().manual_seed(1)
    for starts, tokens in STEPS:
        ids = torch.randint(64, (sum(tokens),), generator=random)
        expected = run_layers(model, *embedded(model, ids, make_step(model, direct, starts, tokens)))
        found = layers.run_layers(model, *embedded(model, ids, make_step(model, replayed, starts, tokens)))
        assert torch.equal(found, expected), (starts, tokens)
    assert layers.counts == {"recorded": 2, "replayed": len(replays)} and len(replays) == len(STEPS) - 2


@needs_native
@torch.inference_mode()
def test_layers_of_a_group_may_differ_in_their_query_heads() -> None:
    """Parts of contexts have room for the most of them."""
    args = compared.model_args(num_hidden_layers=3, head_dim=DIM, hidden_size=HIDDEN, intermediate_size=96)
    few, many, last = args.layers
    many = structs.replace(many, mixer=structs.replace(many.mixer, num_heads=12))
    model = compared.make_model(replace(args, layers=(few, many, last)))
    direct, replayed, layers = make_cache(model, 0), make_cache(model, 0), LayerRecordings()
    for start in (1500, 3000, 2000):
        hidden = torch.randn(1, HIDDEN)
        expected = run_layers(model, hidden, make_step(model, direct, [start], [1]))
        step = make_step(model, replayed, [start], [1])
        assert torch.equal(layers.run_layers(model, hidden, step), expected)
        (plan,) = step.attention[0].plans.values()
        assert plan.partial.nbytes == -(-start // 512) * 12 * (DIM + 2) * 4
    assert layers.counts == {"recorded": 1, "replayed": 2}


@needs_native
@torch.inference_mode()
def test_weights_that_stay_bfloat16_give_the_bits_of_float32() -> None:
    """Embedding, layers and a tied head."""
    config = {
        "model_type": "qwen3",
        "vocab_size": 70,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    args, found = parse_checkpoint_config(config), []
    for weights in ("", "bfloat16"):
        model = built(args, weights=weights)
        numbers = normal(0.2)
        fill(model, lambda raw, make=numbers: make(raw).bfloat16())
        for starts, tokens in (([0], [9]), ([5, 7], [1, 1])):
            ids = torch.arange(sum(tokens))
            hidden = run_layers(model, model.embed(ids), make_step(model, make_cache(model, 0), starts, tokens))
            found.append(model.head(model.norm(hidden)))
    for one, other in zip(found[:2], found[2:], strict=True):
        assert torch.equal(one, other) and one.dtype == torch.float32


@needs_native
@torch.inference_mode()
def test_prompts_and_many_rows_are_not_recorded(replays: list[KernelRecording]) -> None:
    model = make_model()
    layers, kv = LayerRecordings(), make_cache(model, 0)
    for starts, tokens in [([0], [9]), ([0] * 17, [1] * 17)]:
        for _ in range(2):
            layers.run_layers(model, torch.zeros(sum(tokens), HIDDEN).bfloat16(), make_step(model, kv, starts, tokens))
    assert replays == [] and layers.obstacles == {} and layers.counts == {"run": 4}


@needs_native
@torch.inference_mode()
def test_another_number_of_threads_is_another_recording(
    replays: list[KernelRecording], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    layers, kv = LayerRecordings(), make_cache(model, 0)

    def step() -> int:
        layers.run_layers(model, torch.zeros(1, HIDDEN).bfloat16(), make_step(model, kv, [4], [1]))
        return len(replays)

    assert [step(), step()] == [0, 1]
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert [step(), step()] == [1, 2]


@needs_native
@torch.inference_mode()
def test_more_kernels_than_there_is_room_for_are_no_recording(
    monkeypatch: pytest.MonkeyPatch, replays: list[KernelRecording]
) -> None:
    monkeypatch.setattr(recordings, "KERNELS", 2)
    model = make_model()
    layers, direct, replayed = LayerRecordings(), make_cache(model, 0), make_cache(model, 0)
    hidden = torch.randn(1, HIDDEN).bfloat16()
    for _ in range(2):
        expected = run_layers(model, hidden, make_step(model, direct, [4], [1]))
        assert torch.equal(layers.run_layers(model, hidden, make_step(model, replayed, [4], [1])), expected)
    assert replays == [] and "more kernels" in layers.unrecorded()["1 row"]


@torch.inference_mode()
def test_a_model_with_foreign_kernels_is_run_as_ever(replays: list[KernelRecording]) -> None:
    model = make_model("float32", forced={"linear": "cpu"})
    layers, direct, replayed = LayerRecordings(), make_cache(model, 0), make_cache(model, 0)
    hidden = torch.randn(1, HIDDEN)
    for _ in range(2):
        expected = run_layers(model, hidden, make_step(model, direct, [4], [1]))
        assert torch.equal(layers.run_layers(model, hidden, make_step(model, replayed, [4], [1])), expected)
    assert replays == [] and "not native" in layers.unrecorded()["1 row"]
    assert not_recordable(model.kernels) == "linear is cpu, whose operations are PyTorch's"


@needs_native
@torch.inference_mode()
def test_memory_of_one_step_is_not_kept_with_the_recording() -> None:
    """Room for the parts of long contexts was, once for each layer: it grows with the context, buffers do not."""
    model = make_model()
    layers, kv = LayerRecordings(), make_cache(model, 0)
    step = make_step(model, kv, [1500, 1200], [1, 1])
    layers.run_layers(model, torch.randn(2, HIDDEN).bfloat16(), step)
    (buffers,) = layers._buffers._used
    assert buffers < 2 * 3 * 4096
    (plan,) = step.attention[0].plans.values()
    assert plan.partial.nbytes == (3 + 3) * 4 * (DIM + 2) * 4


@needs_native
@torch.inference_mode()
def test_an_obstacle_belongs_to_steps_of_its_kind(
    monkeypatch: pytest.MonkeyPatch, replays: list[KernelRecording]
) -> None:
    """Steps of one row, and of three, are replayed before and after one of two rows could not be recorded."""
    model = make_model()
    layers, kv = LayerRecordings(), make_cache(model, 0)

    def step(rows: int) -> None:
        context = make_step(model, kv, [4] * rows, [1] * rows)
        layers.run_layers(model, torch.randn(rows, HIDDEN).bfloat16(), context)

    step(1)
    with monkeypatch.context() as few:
        few.setattr(recordings, "KERNELS", 2)
        step(2)
    for rows in (2, 1, 3, 3):
        step(rows)
    assert list(layers.obstacles) == [(2, False, 0, False)] and len(replays) == 2 == len(layers)
    assert layers.counts == {"recorded": 2, "replayed": 2, "run": 2}


@needs_native
@torch.inference_mode()
def test_nothing_is_kept_where_nothing_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "KERNELS", 2)
    model = make_model()
    layers, kv = LayerRecordings(), make_cache(model, 0)
    layers.run_layers(model, torch.randn(2, HIDDEN).bfloat16(), make_step(model, kv, [4, 4], [1, 1]))
    assert layers.obstacles and not len(layers) and not layers._buffers._chunks


@needs_native
def test_an_interrupt_ends_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes: a kernel that runs later would be written into a recording that may be gone."""
    library = loaded()

    class Interrupting:
        def __getattr__(self, name: str) -> object:
            def record(address: int | None) -> None:
                library.quire_record(address)
                if address:
                    raise KeyboardInterrupt

            return record if name == "quire_record" else getattr(library, name)

    def interrupted() -> None:
        raise KeyboardInterrupt

    recording = KernelRecording(4, Buffers())
    with pytest.raises(KeyboardInterrupt):
        recording.record(interrupted)
    monkeypatch.setattr(recording_module, "loaded", Interrupting)
    with pytest.raises(KeyboardInterrupt):
        recording.record(lambda: None)
    norm.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5)
    assert len(recording) == 0 and recording.obstacle


@needs_native
@pytest.mark.parametrize("change", [lambda x: x + 1, lambda x: x.add_(1), lambda x: x.T.flatten()])
def test_what_pytorch_computes_is_noticed(change: object) -> None:
    recording = KernelRecording(4, Buffers())

    def make() -> Tensor:
        x = torch.empty(3, 5)
        x.view(15).unsqueeze(0)
        return x

    x = recording.record(make)
    assert recording.obstacle == "" and len(recording) == 0
    assert callable(change)
    recording.record(lambda: change(x))
    assert "not native" in recording.obstacle


def test_buffers_are_given_out_again_and_never_twice() -> None:
    buffers = Buffers()

    def take() -> list[Tensor]:
        return [buffers.empty([size], torch.uint8) for size in (3, 64, 5 << 20, 1)]

    first = take()
    for value, tensor in enumerate(first):
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(first))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in first)
    buffers.rewind()
    assert [tensor.data_ptr() for tensor in take()] == [tensor.data_ptr() for tensor in first]


@pytest.mark.parametrize("order", [range(1, 17), range(16, 0, -1)], ids=["more and more", "fewer and fewer"])
@pytest.mark.parametrize("size", [CHUNK // 64, CHUNK // 8, CHUNK], ids=str)
def test_buffers_of_many_recordings_hold_little_more_than_the_largest(size: int, order: Sequence[int]) -> None:
    buffers = Buffers()
    for rows in order:
        buffers.rewind()
        for _ in range(5):
            buffers.empty([rows, 100], torch.uint8)
            buffers.empty([rows, size], torch.uint8)
    assert sum(map(len, buffers._chunks)) <= 3 * 5 * 16 * size + CHUNK
