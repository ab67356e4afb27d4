"""Weights in host memory beside a GPU: the answers of weights on the device, in CUDA graphs and without; the memory.

`tests/unit/layers/test_streamed.py` has what follows what on the two streams, `tests/e2e/test_host_weights.py` the
features beside it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.bench.workload import model_folder
from quire.config.bundled import bundled_model
from quire.kernels.layer_copies import HostBlock, StreamCopies
from quire.layers.streamed import StreamedLayers

from ..support.full import full_rows
from ..support.tiny_models import Tiny, random_model, write_model
from .test_engine import TEXTS, make, run
from .test_ranks import layouts

HOST = {"cpu_offload_gb": 1.0}  # more than these models have
PARAMS = [SamplingParams(max_tokens=48, temperature=t, seed=7, ignore_eos=True) for t in (0.0, 0.8, 0.0)]
PROMPTS = [text * 9 for text in TEXTS[:6]]
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
ROWS: list[dict[str, Any]] = [
    {},
    {"enforce_eager": True},
    {"async_depth": 1, "max_num_batched_tokens": 64},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "fp8"},
    NGRAM,
    {"kv_offload_gb": 0.02, "kv_offload_policy": "write_through", "num_gpu_blocks_override": 64, "block_size": 16},
]
MORE = ["gpt_oss", "qwen3_next", "nemotron_h", "glm_moe_dsa", "gemma3_text"]
FAMILIES = ["qwen3_moe", "deepseek_v3", *full_rows(MORE)]


def streamed(llm: LLM) -> StreamedLayers:
    """Return the layers in host memory of an engine."""
    found = llm.engine.worker.model.streamed
    assert found is not None
    return found


def answers(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    """Return the tokens of requests together, and of one alone."""
    params = [PARAMS[number % len(PARAMS)] for number in range(len(prompts))]
    outputs = [*run(llm, prompts, params), *run(llm, prompts[:1], params[:1])]
    return [list(one.outputs[0].token_ids) for one in outputs]


def same(folder: Path, prompts: list[Any], **options: Any) -> None:
    """Assert that weights in host memory change no token, also when nothing is left in their slots between steps."""
    with make(folder, **options) as llm:
        first, second = answers(llm, prompts), answers(llm, prompts)  # which finds prefixes in the cache
    with make(folder, **HOST | options) as llm:
        layers, recorder = streamed(llm), llm.engine.worker.recorder
        assert len(layers.slots) == 2
        assert answers(llm, prompts) == first
        torch.cuda.synchronize()
        for slot in layers.slots:
            slot.fill_(0xFF)  # numbers that are none
        assert answers(llm, prompts) == second
        assert (recorder.counts["replayed"] > 20) == (not options.get("enforce_eager", False))


@pytest.mark.parametrize("options", ROWS, ids=str)
def test_answers_are_those_of_weights_on_the_device(options: dict[str, Any]) -> None:
    same(bundled_model(), list(PROMPTS), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """Three layers and two slots: the first and the last one share a slot."""
    write_model(random_model(Tiny(family=family), 0), tmp_path, family)
    same(tmp_path, [{"prompt_token_ids": list(range(5, 5 + count))} for count in (3, 17, 40)], max_model_len=128)


@pytest.mark.parametrize("sizes", layouts({"tp2": {"tensor_parallel_size": 2}, "pp2": {"pipeline_parallel_size": 2}}))
def test_each_gpu_streams_its_own_layers(sizes: dict[str, Any]) -> None:
    found = []
    for host in ({}, HOST):
        with make(bundled_model(), **host, **sizes) as llm:
            found.append(answers(llm, list(PROMPTS)))
    assert found[0] == found[1]


def test_large_layers_come_while_others_compute(device: torch.device) -> None:
    """Slow layers and fast ones in turn: a slot that is given away too early, or read too early, shows."""
    size, count = 32 << 20, 7
    truth = [torch.randn(size // 4, generator=torch.Generator().manual_seed(number)) for number in range(count)]
    weights = [one.to(device) for one in truth]
    layers = StreamedLayers(range(count), 0, 2, StreamCopies(device))
    for number, own in enumerate(weights):
        layers._layers[number].blocks.append(HostBlock([own], device))
    layers.ready(device)
    busy = torch.randn(4096, 4096, device=device)

    def work(out: list[torch.Tensor]) -> None:
        for index in layers.visited(range(count)):
            for _ in range(0, 40, 1 + 39 * (index % 2)):
                busy @ busy
            out[index].copy_(weights[index])

    found = [torch.zeros(size // 4, device=device) for _ in range(count)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work(found)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="relaxed"):
        work(found)
    for _ in range(10):
        for one in (*found, *layers.slots):
            one.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for index, one in enumerate(found):
            assert torch.equal(one.cpu(), truth[index]), index


def test_the_device_has_less(device: torch.device) -> None:
    """The layers' bytes leave the device, but for the two slots."""
    taken, options = list[int](), {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 512}
    for gib in (0.0, 0.4):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        with make(model_folder("qwen3-0.6b"), cpu_offload_gb=gib, skip_tokenizer_init=True, **options) as llm:
            taken.append(torch.cuda.memory_allocated() - before)
            answers(llm, [{"prompt_token_ids": [5, 6, 7]}])
            if gib:
                layers = streamed(llm)
                saved = sum(block.num_bytes for one in layers._layers.values() for block in one.blocks)
                saved -= sum(map(len, layers.slots))
    assert saved > 300 << 20 and abs(taken[0] - taken[1] - saved) < 8 << 20
