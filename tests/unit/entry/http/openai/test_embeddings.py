"""/v1/embeddings, /v1/rerank and /v1/score over the mock core: every spelling of an input, formats, bounds, errors."""

import asyncio
import base64
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.contracts.errors import EngineDead, RequestFailed
from quire.engine.mock_executor import FIRST, chain, mock_hidden

TEXTS = ["a fox", "two foxes run", "a fox"]


@pytest.fixture
def client(mock_engine: Any, make_client: Callable[..., Any]) -> Any:
    """Of a model that says how it pools: by the mean."""
    mock_engine.text = replace(
        mock_engine.text,
        pooling=replace(mock_engine.text.pooling, method="mean", normalize=True, source="modules.json"),
    )
    return make_client(mock_engine)


def post(client: Any, path: str, **fields: Any) -> Any:
    return asyncio.run(client.post(path, fields))


def expected(engine: Any, ids: list[int], dimensions: int | None = None) -> np.ndarray:
    """The embedding of token ids that the mock gives."""
    states, digest = [], FIRST
    for token in ids:
        digest = chain(digest, token)
        states.append(mock_hidden(digest, engine.text.pooling.width))
    vector = np.mean(states, 0)[:dimensions]
    return vector / np.linalg.norm(vector)


def vectors(reply: Any) -> np.ndarray:
    assert reply.status == 200, reply.body
    data = reply.json["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    assert {one["object"] for one in data} == {"embedding"} and reply.json["object"] == "list"
    rows = [one["embedding"] for one in data]
    return np.array([np.frombuffer(base64.b64decode(row), "<f4") if isinstance(row, str) else row for row in rows])


def test_pooling_has_the_vectors_of_embeddings_and_refuses_other_tasks(client: Any) -> None:
    for fields in ({}, {"dimensions": 4}, {"encoding_format": "base64"}):
        right = post(client, "/v1/embeddings", input=TEXTS, **fields).json
        reply = post(client, "/pooling", input=TEXTS, task="embed", **fields)
        assert [one["data"] for one in reply.json["data"]] == [one["embedding"] for one in right["data"]]
        assert {one["object"] for one in reply.json["data"]} == {"pooling"} and reply.json["usage"] == right["usage"]
        assert reply.json["id"].startswith("pool-")
    for task in ({"task": "classify"}, {"task": "token_embed"}, {}):
        reply = post(client, "/pooling", input=TEXTS, **task)
        assert reply.status == 400 and "head that classifies" in reply.error["message"]


@pytest.mark.parametrize("spelling", ["text", "texts", "ids", "lists"])
def test_every_spelling_of_an_input(client: Any, mock_engine: Any, spelling: str) -> None:
    ids = [mock_engine.text.tokenizer.encode(text) for text in TEXTS]
    given, wanted = {
        "text": (TEXTS[0], ids[:1]),
        "texts": (TEXTS, ids),
        "ids": (ids[1], ids[1:2]),
        "lists": (ids, ids),
    }[spelling]
    reply = post(client, "/v1/embeddings", input=given, model="alias")
    np.testing.assert_allclose(vectors(reply), [expected(mock_engine, one) for one in wanted], atol=1e-5)
    count = sum(map(len, wanted))
    assert reply.json["usage"] == {"prompt_tokens": count, "total_tokens": count} and reply.json["model"] == "alias"
    assert reply.header("x-quire-warning") is None
    assert all(options["pool"] == "mean" for _, _, options in mock_engine.seen)


def test_base64_is_the_same_numbers(client: Any, mock_engine: Any) -> None:
    plain = vectors(post(client, "/v1/embeddings", input=TEXTS, encoding_format="float"))
    coded = post(client, "/v1/embeddings", input=TEXTS, encoding_format="base64")
    assert all(isinstance(one["embedding"], str) for one in coded.json["data"])
    np.testing.assert_array_equal(plain.astype(np.float32), vectors(coded))
    np.testing.assert_allclose(np.linalg.norm(plain, axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("dimensions", [1, 7, 256])
def test_fewer_dimensions_have_length_one_again(client: Any, mock_engine: Any, dimensions: int) -> None:
    found = vectors(post(client, "/v1/embeddings", input=[5, 6, 7], dimensions=dimensions))
    np.testing.assert_allclose(found[0], expected(mock_engine, [5, 6, 7], dimensions), atol=1e-5)


def test_a_model_without_files_answers_and_says_what_it_did(mock_engine: Any, make_client: Callable[..., Any]) -> None:
    client = make_client(mock_engine)
    reply = post(client, "/v1/embeddings", input="a fox")
    assert vectors(reply).shape == (1, mock_engine.text.pooling.width)
    assert "last token" in reply.header("x-quire-warning") and mock_engine.seen[0][2]["pool"] == "last"
    ranking = {"query": "a", "documents": ["b"]}, {"text_1": "a", "text_2": "b"}
    for path, fields in zip(("/v1/rerank", "/v1/score"), ranking, strict=True):
        error = post(client, path, **fields).error
        assert error["code"] == "invalid_value" and "pooler_config" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "empty list"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "empty"),
        ({"input": ["a", 5]}, "input", "mixes"),
        ({"input": [5, [6]]}, "input", "mixes"),
        ({"input": 5}, "input", "a string or a list"),
        ({"input": [[5, "a"]]}, "input", "integer"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": [5, 10**6]}, "input", "input holds 1000000, outside the vocabulary"),
        ({"input": "a", "dimensions": 257}, "dimensions", "[1, 256]"),
        ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64, float"),
        ({"input": [5] * 5000}, "input", "context"),
        ({"input": "a b " * 9000}, "input", "context"),
        ({"input": "a", "model": "gpt"}, "model", "not served"),
        ({"input": "a", "priority": 1}, "priority", "scheduling_policy"),
        ({"input": "a", "request_id": "a b"}, "request_id", "printable"),
        ({"input": "a", "input_type": "query"}, "input_type", "not implemented"),
        ({"input": "a", "normalize": False}, "normalize", "not implemented"),
    ],
)
def test_what_cannot_be_served_is_said(client: Any, mock_engine: Any, fields: Any, param: str, said: str) -> None:
    reply = post(client, "/v1/embeddings", **fields)
    assert reply.status in (400, 404) and reply.error["param"] == param and said in reply.error["message"]
    assert not mock_engine.core.has_work and len(mock_engine.front) == 0


def test_many_inputs_at_once_and_long_ones_cut(client: Any, mock_engine: Any) -> None:
    many = vectors(post(client, "/v1/embeddings", input=[[i % 50 + 1] for i in range(2048)], encoding_format="base64"))
    assert many.shape == (2048, 256)
    np.testing.assert_array_equal(many[0], many[50])
    long = [i % 90 for i in range(5000)]
    cut = post(client, "/v1/embeddings", input=[long, long[:3]], truncate_prompt_tokens=10)
    np.testing.assert_allclose(vectors(cut)[0], expected(mock_engine, long[-10:]), atol=1e-5)
    np.testing.assert_allclose(vectors(cut)[1], expected(mock_engine, long[:3]), atol=1e-5)
    assert cut.json["usage"]["prompt_tokens"] == 13
    side = post(client, "/v1/embeddings", input=long, truncate_prompt_tokens=10, truncation_side="right")
    np.testing.assert_allclose(vectors(side)[0], expected(mock_engine, long[:10]), atol=1e-5)


def test_parts_share_one_deadline(
    mock_engine: Any, make_client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, room = mock_engine.open, mock_engine.ready.num_slots + 1

    def slow(*args: Any, **options: Any) -> Any:
        stream = begin(*args, **options)
        time.sleep(0.3)
        return stream

    monkeypatch.setattr(mock_engine, "open", slow)
    for header, limit in (("0.5", 60.0), ("60", 0.5)):
        mock_engine.seen.clear()
        client = make_client(mock_engine, max_waiting=1, request_timeout=limit)
        reply = asyncio.run(client.post("/v1/embeddings", {"input": ["a"] * 3 * room}, x_request_timeout=header))
        assert (reply.status, reply.error["code"]) == (504, "deadline") and len(mock_engine.seen) < 3
        assert all(options["timeout"] < 0.5 for _, _, options in mock_engine.seen)


def test_an_unknown_field_is_told_and_the_id_is_the_callers(client: Any) -> None:
    reply = asyncio.run(client.post("/v1/embeddings", {"input": "a", "user": "u", "colour": 1}, x_request_id="mine"))
    assert reply.header("x-request-id") == "mine" and reply.json["id"] == "embd-mine"
    assert reply.all("x-quire-warning") == ["unknown field 'colour'"]


def test_documents_come_by_their_likeness(client: Any, mock_engine: Any) -> None:
    documents = ["fox", "a fox", "runs", {"text": "two foxes"}, "a fox"]
    texts = [one if isinstance(one, str) else one["text"] for one in documents]
    ids = [mock_engine.text.tokenizer.encode(text) for text in texts]
    query = expected(mock_engine, mock_engine.text.tokenizer.encode("a fox"))
    scores = [float(expected(mock_engine, one) @ query) for one in ids]
    order = sorted(range(5), key=lambda i: -scores[i])
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        reply = post(client, path, query="a fox", documents=documents)
        results = reply.json["results"]
        assert [one["index"] for one in results] == order and order[:2] == [1, 4]  # ties as they came
        assert [one["document"]["text"] for one in results] == [texts[i] for i in order]
        np.testing.assert_allclose([one["relevance_score"] for one in results], [scores[i] for i in order], atol=1e-5)
    assert reply.json["usage"]["total_tokens"] == 2 * len(ids[1]) + sum(len(ids[i]) for i in (0, 2, 3, 4)) and all(
        -1 <= one["relevance_score"] <= 1 for one in results
    )
    few = post(client, "/v1/rerank", query="a fox", documents=documents, top_n=2, return_documents=False).json
    assert [set(one) for one in few["results"]] == [{"index", "relevance_score"}] * 2
    assert len(post(client, "/v1/rerank", query="a", documents=["b"], top_n=9).json["results"]) == 1
    assert len(post(client, "/v1/rerank", query="a", documents=documents, top_n=0).json["results"]) == len(documents)


def test_scores_of_one_with_several_and_pair_by_pair(client: Any, mock_engine: Any) -> None:
    def score(one: Any, other: Any, path: str = "/v1/score") -> Any:
        return post(client, path, text_1=one, text_2=other)

    several = score("a fox", TEXTS).json
    assert [one["index"] for one in several["data"]] == [0, 1, 2] and several["object"] == "list"
    assert several["data"][0]["score"] == pytest.approx(1) and several["data"][1]["score"] < 0.999
    pairs = score([TEXTS[1], TEXTS[0]], TEXTS[:2], "/score").json["data"]
    assert [one["score"] for one in pairs] == pytest.approx([several["data"][1]["score"]] * 2)
    assert score("a fox", "a fox").json["data"][0]["score"] == pytest.approx(1)
    refused = score(["a", "b", "c"], ["a", "b"])
    assert refused.status == 400 and refused.error["param"] == "text_2" and "3 texts" in refused.error["message"]
    assert score([], "a").status == score("a", []).status == 400


@pytest.mark.parametrize(
    ("first", "second"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "documents")]
)
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_by_other_names(client: Any, path: str, first: str, second: str) -> None:
    told = post(client, path, text_1="a fox", text_2=TEXTS).json
    reply = post(client, path, **{first: "a fox", second: TEXTS})
    assert reply.status == 200 and reply.json["data"] == told["data"] and reply.header("x-quire-warning") is None
    for name, other in (("text_1", first), ("text_2", second)):
        if name != other:
            error = post(client, path, **{"text_1": "a", "text_2": "b", other: "c"}).error
            assert error["param"] == other
            assert error["message"] == f"{name} and {other} are names of the same field: send one of them."
    error = post(client, path, **{first: ["a", "b"], second: "a"}).error
    assert error["param"] == second and "2 texts" in error["message"]
    assert post(client, path, **{first: "a", second: ["b", ""]}).error["param"] == second


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_ranks_by_other_names(client: Any, path: str) -> None:
    told = post(client, path, query="a fox", documents=TEXTS).json
    for fields in ({"queries": ["a fox"], "items": TEXTS}, {"queries": "a fox", "documents": TEXTS}):
        assert post(client, path, **fields).json["results"] == told["results"]
    assert post(client, path, query="a fox", items="a fox").json["results"][0]["document"] == {"text": "a fox"}
    assert post(client, path, queries=["a", "b"], items="a").error["param"] == "queries"
    error = post(client, path, query="a", queries="b", documents=["c"]).error
    assert error["message"] == "query and queries are names of the same field: send one of them."
    error = post(client, path, query="a").error
    assert error["param"] == "documents" and "Its other names are items." in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents"),
        ("/v1/rerank", {"documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 4}, "max_tokens_per_doc"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": 5, "text_2": "a"}, "text_1"),
    ],
)
def test_what_cannot_be_ranked_is_said(client: Any, path: str, fields: Any, param: str) -> None:
    reply = post(client, path, **fields)
    assert reply.status == 400 and reply.error["param"] == param


def test_without_a_tokenizer_ids_are_taken(mock_engine: Any, make_client: Callable[..., Any]) -> None:
    mock_engine.text = replace(mock_engine.text, tokenizer=None)
    client = make_client(mock_engine)
    assert post(client, "/v1/embeddings", input=[5, 6]).status == 200
    assert "tokenizer" in post(client, "/v1/embeddings", input="a").error["message"]


@pytest.mark.parametrize(("error", "status"), [(RequestFailed("no", code="nan_hidden"), 500), (EngineDead("no"), 503)])
def test_what_goes_wrong_while_it_runs(
    scripted: Any, make_client: Callable[..., Any], begin: Callable[..., Any], error: Any, status: int
) -> None:
    async def run() -> None:
        client = make_client(scripted)
        task, reply, _, stream = await begin(client, "/v1/embeddings", {"input": "a"})
        stream.put(error)
        await task
        assert reply.status == status and stream.closed == 1

    asyncio.run(run())


def test_a_client_that_hangs_up_ends_its_request(
    scripted: Any, make_client: Callable[..., Any], begin: Callable[..., Any]
) -> None:
    async def run() -> None:
        task, reply, gone, stream = await begin(make_client(scripted), "/v1/embeddings", {"input": "a"})
        gone.set()
        await task
        assert reply.status == 0 and stream.closed == 1

    asyncio.run(run())


def test_one_failing_text_fails_its_request_and_no_other(client: Any, mock_engine: Any) -> None:
    mock_engine.core.executor.fail["bad-1"] = 0
    mock_engine.core.executor.fail["bad"] = 0

    async def run() -> list[Any]:
        asked = (client.post("/v1/embeddings", {"input": TEXTS}, x_request_id=name) for name in ("bad", "good"))
        return await asyncio.gather(*asked)

    bad, good = asyncio.run(run())
    assert (bad.status, bad.error["code"], good.status) == (500, "nan_hidden", 200)
    assert not mock_engine.core.has_work
    mock_engine.core.check()


def test_more_texts_than_there_is_room_for_are_answered_in_parts(
    mock_engine: Any, make_client: Callable[..., Any]
) -> None:
    room = 4 + mock_engine.ready.num_slots
    texts = [f"text {n}" for n in range(2 * room + 1)]
    whole = vectors(post(make_client(mock_engine), "/v1/embeddings", input=texts))
    mock_engine.seen.clear()
    parts = post(make_client(mock_engine, max_waiting=4), "/v1/embeddings", input=texts)
    np.testing.assert_array_equal(vectors(parts), whole)
    assert [len(prompts) for prompts, _, _ in mock_engine.seen] == [room, room, 1]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": [""]}, "documents"),
        ("/v1/score", {"text_1": "", "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2"),
    ],
)
def test_an_empty_text_is_the_fault_of_its_field(client: Any, path: str, fields: Any, param: str) -> None:
    reply = post(client, path, **fields)
    assert reply.status == 400 and reply.error["param"] == param
