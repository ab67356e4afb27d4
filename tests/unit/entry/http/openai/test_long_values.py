"""Errors show at most the beginning of a value of the request, in every field."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.config.serve import ServerConfig
from quire.contracts.errors import MAX_SHOWN, listed, shown
from quire.entry.http.app import build_app
from quire.entry.http.life.state import EngineState
from quire.entry.http.openai.decode import ROUTES
from quire.observe.metrics import Metrics

from .conftest import Client

LONG, HUGE = "x" * 20_000, int("9" * 4_000)
USER = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "store": False},
    "/v1/messages": {"model": "tiny", "max_tokens": 1, "messages": USER},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": USER},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
MOST = 2_000  # characters of an error: the longest list the names of fields


def values(name: str) -> Iterator[Any]:
    yield from (LONG, "a\n" * 10_000, HUGE, -HUGE, [LONG], [HUGE], {LONG: 1}, {"type": LONG}, {"type": LONG, LONG: 1})
    yield [{"role": LONG, "content": "a", "type": LONG, "name": LONG}]
    yield [{"role": "user", "content": [{"type": LONG, "text": LONG}]}]
    yield [{"type": "function", "name": LONG, "function": {"name": LONG}}]
    if name in ("tools", "tool_choice", "text", "reasoning", "thinking", "output_config", "response_format"):
        yield {"type": "function", "function": {"name": LONG}, "name": LONG}
        yield {"format": {"type": LONG}, "effort": LONG, "summary": LONG, "display": LONG}
        yield {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": LONG}}}
        yield [{"type": "function", "function": {"name": "f", "parameters": {"type": LONG}}}]
    if name == "structured_outputs":
        yield from ({"regex": "(" + LONG}, {"grammar": LONG}, {"json": LONG}, {"json": {"type": LONG}}, {LONG: 1})


@pytest.mark.parametrize("path", BODIES)
def test_errors_do_not_repeat_what_was_sent(mock_engine: Any, path: str) -> None:
    mock_engine.state = EngineState.READY
    client = Client(build_app(mock_engine, ServerConfig.from_flat(served_model_name=("tiny",)), Metrics()))

    async def main() -> int:
        refused = 0
        for name in sorted({LONG, "functions", *ROUTES[path.removesuffix("/count_tokens")], *BODIES[path]}):
            for value in values(name):
                reply = await client.post(path, BODIES[path] | {name: value})
                assert reply.status < 500, (name, shown(value), reply.body[:MOST])
                headers = sum(len(value) for _, value in reply.headers)
                assert headers < MOST and (reply.status < 400 or len(reply.body) < MOST), (
                    name,
                    shown(value),
                    headers,
                    reply.body[:MOST],
                )
                refused += reply.status >= 400
        return refused

    assert asyncio.run(main()) > 10


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/" + LONG, {}),
        ("POST", "/v1/models", {}),
        ("X" * 5_000, "/v1/models", {}),
        ("GET", "/v1/models/" + LONG, {}),
        ("GET", "/v1/responses/" + LONG, {}),
        ("POST", f"/v1/responses/{LONG}/cancel", {}),
        ("POST", "/v1/completions", {"x-request-timeout": LONG}),
        ("POST", "/v1/completions", {"content-type": LONG}),
        ("GET", "/v1/models", {"host": LONG}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_nor_do_those_of_paths_and_headers(mock_engine: Any, method: str, path: str, headers: dict[str, str]) -> None:
    mock_engine.state = EngineState.READY
    client = Client(build_app(mock_engine, ServerConfig.from_flat(served_model_name=("tiny",)), Metrics()))
    reply = asyncio.run(client.call(method, path, b'{"prompt": "a"}', headers=headers))
    assert 400 <= reply.status < 500 and len(reply.body) < MOST, reply.body[:MOST]


def test_a_template_that_repeats_a_message(scripted: Any, text_side: Any, make_client: Callable[..., Client]) -> None:
    from dataclasses import replace

    from quire.text.chat import ChatTemplate

    for source in ("{{ raise_exception(messages[0].content) }}", "{{ {}[messages[0].content].x + 1 }}"):
        scripted.text = replace(text_side, chat_template=ChatTemplate({"default": source}))
        reply = asyncio.run(
            make_client(scripted).post("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]})
        )
        assert reply.status == 400 and len(reply.body) < MOST, reply.body[:MOST]


def test_values_are_shown_cut() -> None:
    assert (shown("a'b\n"), shown(1.5), shown(None), shown([1])) == ('"a\'b\\n"', "1.5", "None", "[1]")
    assert shown("é" * MAX_SHOWN) == repr("é" * MAX_SHOWN) and shown("é" * 101) == repr("é" * 100) + "..."
    assert shown(HUGE) == "9" * 100 + "..." and len(shown([LONG])) == 103
    assert listed([]) == "" and listed(["a"]) == "'a'" and listed([1, 2, 3, 4, 5]) == "1, 2, 3, 4, 5"
    assert listed({at: 0 for at in range(7)}) == "0, 1, 2, 3, 4 and 2 more"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": 1, "5": 1, "-1": 1, "1.5": 1}, "logit_bias at 'x', '-1', '1.5': keys must be token ids"),
        ({"5": 1, "6": 101, "7": "a", "8": True, "9": None}, "logit_bias at '6', '7', '8', '9': keys must be"),
        ({f"k{at}": 1 for at in range(900)}, "'k0', 'k1', 'k2', 'k3', 'k4' and 895 more"),
        ({"99999": 1, "5": 1, "88888": 1}, "logit_bias holds 99999, 88888, outside the vocabulary of"),
        ({"05": 1, "00": 1, "0": 1}, "logit_bias at '05', '00': keys must be token ids"),
        ([], "logit_bias must be an object of at most 1024 entries"),
    ],
    ids=str,
)
def test_every_bad_bias_is_named(mock_engine: Any, make_client: Callable[..., Client], given: Any, words: str) -> None:
    error = asyncio.run(make_client(mock_engine).post("/v1/completions", {"prompt": "a", "logit_bias": given})).error
    assert error["param"] == "logit_bias" and words in error["message"] and len(error["message"]) < 300, error


def test_biases_beyond_the_vocabulary_are_named_with_the_others(
    mock_engine: Any, make_client: Callable[..., Any]
) -> None:
    size = mock_engine.ready.vocab_size
    bias = {"5": 1, "x": 1, str(size): 1, "9" * 30: 1, str(size - 1): 1}
    body = {"prompt": "a", "logit_bias": bias, "max_tokens": 1}
    error = asyncio.run(make_client(mock_engine).post("/v1/completions", body)).error
    assert error["param"] == "logit_bias" and f"from 0 to {size - 1}" in error["message"]
    assert error["message"].startswith(f"logit_bias at 'x', '{size}', '{'9' * 30}': keys must be token ids")
