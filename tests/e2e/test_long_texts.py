"""Megabytes of text are answered rightly, and the HTTP process is as small after them as before."""

from collections.abc import Iterator

import pytest

from quire.config.bundled import bundled_model
from quire.text.tokenizer import Tokenizer

from .serving import MOCK, Server, running_server, wait_until
from .test_server_load import rss

AWKWARD = (
    "The json  module\r\n\n\t exposes   \u00e9\u0301 \U0001f642\u200d\u202e <|im_end|>"
    " a1234567 \x00'll DON'T\u3000 \u4e2d\u6587\n"
)
TEXT = AWKWARD * 25_000 + "b" * 5_000
ALLOWED = 60 * 2**20  # bytes beyond the idle size


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(*MOCK) as server:
        yield server


def test_long_texts_leave_no_memory_behind(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": TEXT}], "truncate_prompt_tokens": 9, "max_tokens": 1}
    server.complete()
    idle = rss(server)
    right = Tokenizer.load(bundled_model()).encode(TEXT)
    for path, body in (
        ("/tokenize", {"prompt": TEXT}),
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": TEXT, "truncate_prompt_tokens": 9, "max_tokens": 1}),
        ("/v1/embeddings", {"input": TEXT, "truncate_prompt_tokens": 9}),
        ("/detokenize", {"tokens": right[: 2**20], "skip_special_tokens": False}),
    ):
        answer = server.ask(path, body)
        assert answer.status == 200, answer.body[:300]
        if path == "/tokenize":
            assert answer.json()["tokens"] == right
        if path == "/detokenize":
            assert len(text := answer.json()["prompt"]) > 2**20 and TEXT.startswith(text[:-1])
    wait_until(lambda: rss(server) < idle + ALLOWED, "memory given back")
