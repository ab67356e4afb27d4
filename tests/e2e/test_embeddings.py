"""Vectors against transformers' last hidden states in float32, however a run is scheduled and whatever runs beside."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, AsyncLLM, SamplingParams
from quire.contracts.errors import InvalidParameter, PromptTooLong, RequestFailed

from .in_process import running_inside

METHODS = ("mean", "last", "cls")
RTOL = 1e-5  # of the largest number of a vector
Engine = Callable[..., LLM]


@pytest.fixture(scope="module")
def expected_vector(oracle: Any) -> Callable[..., np.ndarray]:
    """Pooled hidden states that transformers computes for token ids."""
    model = oracle().model.model

    @torch.inference_mode()
    def pooled(ids: list[int], method: str, normalize: bool = False) -> np.ndarray:
        states = model(torch.tensor([ids])).last_hidden_state[0].double().numpy()
        vector = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[method]
        return vector / np.linalg.norm(vector) if normalize else vector

    return pooled


def assert_same(found: list[float], right: np.ndarray) -> None:
    np.testing.assert_allclose(found, right, rtol=0, atol=min(1e-4, RTOL * np.abs(right).max()))


def embed(llm: LLM, prompts: list[list[int]], **options: Any) -> list[list[float]]:
    outputs = llm.embed(prompts, use_tqdm=False, **options)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.finished and output.outputs.error is None for output in outputs)
    return [output.outputs.embedding for output in outputs]


def pooler(method: str, normalize: bool = False) -> dict[str, Any]:
    return {"pooler_config": {"pooling_type": method.upper(), "normalize": normalize}}


def test_encode_gives_the_vectors_of_embed(oracle: Any, engine: Engine, prompts: list[list[int]]) -> None:
    llm = engine(oracle().folder)
    found = llm.encode(prompts[:2], pooling_task="embed", use_tqdm=False)
    right = llm.embed(prompts[:2], use_tqdm=False)
    for one, other in zip(found, right, strict=True):
        assert_same(one.outputs.data.tolist(), np.array(other.outputs.embedding))
        assert one.prompt_token_ids == other.prompt_token_ids and one.outputs.error is None
    for task in (None, "token_embed", "reward"):
        with pytest.raises(InvalidParameter, match="head that classifies"):
            llm.encode("a", pooling_task=task)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_vectors_in_one_step_and_in_chunks_with_a_cold_and_a_warm_cache(
    oracle: Any, engine: Engine, prompts: list[list[int]], expected_vector: Any, method: str, depth: int
) -> None:
    for chunk in (512, 7):
        llm = engine(
            oracle().folder,
            async_depth=depth,
            max_num_batched_tokens=chunk,
            block_size=8,
            **pooler(method, normalize=chunk == 7),
        )
        for _ in range(2):
            for ids, vector in zip(prompts, embed(llm, prompts), strict=True):
                assert_same(vector, expected_vector(ids, method, chunk == 7))
        cached = [output.num_cached_tokens for output in llm.embed(prompts, use_tqdm=False)]
        assert cached == [(len(ids) - 1) // 8 * 8 if method == "last" else 0 for ids in prompts]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_vectors_beside_text_in_one_batch_with_preemption(
    oracle: Any,
    engine: Engine,
    greedy: Any,
    record: Any,
    prompts: list[list[int]],
    expected_vector: Any,
    method: str,
    depth: int,
) -> None:
    """Answers grow until the pool is full and the vectors' prompts, which came last, have to give way."""
    llm = engine(
        oracle().folder,
        async_depth=depth,
        max_num_batched_tokens=7,
        block_size=8,
        num_gpu_blocks_override=23,
        watermark=0.0,
        enable_prefix_caching=False,
        **pooler(method),
    )
    recorder, right = record(llm), oracle().greedy(prompts, 64)
    long = [(ids * 9)[:100] for ids in prompts[2:5]]
    streams = [llm.stream(prompts[i], greedy(64)) for i in (1, 2, 3)]
    for stream in streams:
        next(stream)
    for ids, vector in zip(long, embed(llm, long), strict=True):
        assert_same(vector, expected_vector(ids, method))
    for i, stream in zip((1, 2, 3), streams, strict=True):
        *_, last = stream
        assert list(last.outputs[0].token_ids) == right[i]
    mixed = [set(plan.outputs.tolist()) & {1, 4} for plan in recorder.plans]
    assert {1, 4} in mixed, "no step did both"
    admitted = [a.request_id for plan in recorder.plans for a in plan.admitted if a.pool]
    assert len(admitted) > len(set(admitted)), "no prompt of a vector was preempted"


def test_vectors_of_a_prompt_that_others_share_and_generate_from(
    oracle: Any, engine: Engine, greedy: Any, prompts: list[list[int]], expected_vector: Any
) -> None:
    """A vector reads the blocks of an answer, an answer those of a vector."""
    llm, shared = engine(oracle().folder, block_size=8, **pooler("last")), prompts[-1]
    first = llm.generate([shared], greedy(16), use_tqdm=False)[0]
    turn = shared + list(first.outputs[0].token_ids)
    output = llm.embed([turn], use_tqdm=False)[0]
    assert output.num_cached_tokens and output.num_cached_tokens >= len(shared) // 8 * 8
    assert_same(output.outputs.embedding, expected_vector(turn, "last"))
    answer = llm.generate([turn[:50]], greedy(64), use_tqdm=False)[0]
    assert answer.num_cached_tokens == 48 and list(answer.outputs[0].token_ids) == oracle().greedy([turn[:50]], 64)[0]


@pytest.fixture(scope="module")
def embedding_folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint as an embedding model is published: without head, with the files of sentence-transformers."""
    folder = tmp_path_factory.mktemp("embedding") / "model"
    oracle().model.model.save_pretrained(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for i, (path, kind) in enumerate(kinds.items())
            ]
        )
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder


def test_a_folder_of_an_embedding_model(
    embedding_folder: Path, engine: Engine, prompts: Any, expected_vector: Any
) -> None:
    llm = engine(embedding_folder)
    assert str(llm.engine.pooling) == "the mean of all hidden states, normalized (modules.json)"
    right = [expected_vector(ids, "mean", True) for ids in prompts]
    for vector, expected in zip(embed(llm, prompts), right, strict=True):
        assert_same(vector, expected)
    short = expected_vector(prompts[2], "mean")[:6]
    assert_same(embed(llm, [prompts[2]], dimensions=6)[0], short / np.linalg.norm(short))
    scores = [one.outputs.score for one in llm.score(prompts[0], prompts[1:4], use_tqdm=False)]
    np.testing.assert_allclose(scores, [right[0] @ other for other in right[1:4]], atol=1e-5)
    pairs = [one.outputs.score for one in llm.score(prompts[:2], prompts[2:4], use_tqdm=False)]
    np.testing.assert_allclose(pairs, [right[0] @ right[2], right[1] @ right[3]], atol=1e-5)
    assert any("no head" in note for note in llm.engine.notes)


def test_what_cannot_be_embedded_or_scored(oracle: Any, engine: Engine, prompts: list[list[int]]) -> None:
    llm = engine(oracle().folder, max_model_len=64)
    with pytest.raises(InvalidParameter, match="pooler_config"):
        llm.score(prompts[0], prompts[1], use_tqdm=False)
    with pytest.raises(InvalidParameter, match=r"\[1, 64\]"):
        llm.embed([prompts[0]], dimensions=65, use_tqdm=False)
    with pytest.raises(PromptTooLong):
        llm.embed([prompts[0], [5] * 65], use_tqdm=False)
    assert len(llm.embed([[5] * 64], use_tqdm=False)[0].outputs.embedding) == 64  # a whole context
    with pytest.raises(InvalidParameter, match="outside the vocabulary"):
        llm.embed([[5, 10**6]], use_tqdm=False)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned(embedding_folder: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with a row of NaN in its input embeddings, and the token that it belongs to."""
    token = next(token for token in range(1, 96) if token not in {t for ids in prompts for t in ids})
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(embedding_folder, folder)
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["embed_tokens.weight"][token] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder, token


@pytest.mark.parametrize("depth", [1, 2])
def test_nan_fails_its_vector_alone(
    poisoned: Any, engine: Engine, prompts: list[list[int]], expected_vector: Any, depth: int
) -> None:
    folder, token = poisoned
    llm = engine(folder, async_depth=depth, max_num_batched_tokens=16, block_size=8)
    shared = prompts[-1]
    asked = [[*shared[:30], token, *shared[30:]], shared, [token], prompts[3]]
    for _ in range(2):  # the second time from what the first has left in the cache
        found = llm.embed(asked, use_tqdm=False)
        assert [output.outputs.error for output in found] == ["nan_hidden", None, "nan_hidden", None]
        assert found[0].outputs.embedding == []
        for i in (1, 3):
            assert_same(found[i].outputs.embedding, expected_vector(asked[i], "mean", True))
    with pytest.raises(RequestFailed, match="nan_hidden"):
        llm.score(prompts[0], [prompts[1], [token]], use_tqdm=False)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_caller_that_leaves_midway_leaves_nothing(
    embedding_folder: Path, prompts: list[list[int]], expected_vector: Any, depth: int
) -> None:
    long = [i % 90 + 1 for i in range(250)]
    llm = AsyncLLM(
        embedding_folder,
        dtype="float32",
        num_threads=1,
        skip_tokenizer_init=True,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 22,
        max_num_batched_tokens=4,
        async_depth=depth,
        use_tqdm_on_load=False,
    )
    core = llm.engine.core

    async def run() -> None:
        while True:  # a thread that got no processor may see them only when they are done
            leaving = [asyncio.create_task(llm.embed(long)) for _ in range(3)]
            staying = asyncio.create_task(llm.embed(prompts[4]))
            while not any(core.scheduler.table.requests) and not any(task.done() for task in leaving):
                await asyncio.sleep(0.001)
            if not any(task.done() for task in leaving):
                break
            await asyncio.gather(*leaving, staying)
        for task in leaving:
            task.cancel()
        assert all(
            isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*leaving, return_exceptions=True)
        )
        assert_same((await staying).outputs.embedding, expected_vector(prompts[4], "mean", True))
        assert_same((await llm.embed(prompts[1])).outputs.embedding, expected_vector(prompts[1], "mean", True))
        with pytest.raises(InvalidParameter):
            await llm.embed(prompts[1], dimensions=0)

    try:
        asyncio.run(run())
        while core.has_work:
            pass
        core.check()
    finally:
        llm.close()


# --- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(embedding_folder: Path) -> Iterator[Any]:
    with running_inside(
        model=str(embedding_folder),
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 22,
        max_num_batched_tokens=16,
    ) as inside:
        yield inside


def test_vectors_and_text_of_one_server(server: Any, prompts: list[list[int]], expected_vector: Any) -> None:
    def vector(ids: list[int]) -> Any:
        return server.server.ask("/v1/embeddings", {"input": ids})

    def text(ids: list[int]) -> Any:
        return server.server.complete(ids, return_token_ids=True)

    with ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(text, ids) for ids in prompts[:3]]
        vectors = [pool.submit(vector, ids) for ids in prompts]
    for ids, answer in zip(prompts, vectors, strict=True):
        assert answer.result().status == 200
        assert_same(answer.result().json()["data"][0]["embedding"], expected_vector(ids, "mean", True))
    assert all(answer.result().status == 200 and answer.result().error() is None for answer in texts)
    together = server.server.ask("/v1/embeddings", {"input": prompts}).json()
    assert together["usage"]["prompt_tokens"] == sum(map(len, prompts))
    for ids, one in zip(prompts, together["data"], strict=True):
        assert_same(one["embedding"], expected_vector(ids, "mean", True))
    server.check()


def test_the_bundled_model_embeds_text(talker: LLM) -> None:
    outputs = talker.embed(["The little dog", "The little dog", "import os"], use_tqdm=False)
    a, b, c = (np.array(output.outputs.embedding) for output in outputs)
    assert outputs[0].prompt == "The little dog" and abs(np.linalg.norm(a) - 1) < 1e-5
    assert a @ b > 1 - 1e-5 > a @ c
    params = SamplingParams(max_tokens=4, temperature=0.0)
    assert talker.generate("The little dog", params, use_tqdm=False)[0].num_cached_tokens is not None
