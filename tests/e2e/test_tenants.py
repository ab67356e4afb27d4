"""Callers with different API keys learn nothing of one another's prompts, whichever route they take."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import pytest

from .serving import MOCK, Answer, Server, running_server, wait_until

TEXT = "The json module exposes an API familiar to users of the marshal and pickle modules. " * 4
ONE, TWO = "sk-one", "sk-two"
TURN = [{"role": "user", "content": TEXT}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": TURN, "max_tokens": 2},
    "/v1/responses": {"input": TURN, "max_output_tokens": 2},
    "/v1/messages": {"model": "quire-tiny", "messages": TURN, "max_tokens": 2},
    "/v1/embeddings": {"input": TEXT},
    "/v1/score": {"text_1": TEXT, "text_2": [TEXT[5:]]},
}
FLAGS = (
    *MOCK,
    "--block-size",
    "16",
    "--api-key",
    ONE,
    TWO,
    "--pooler-config",
    '{"pooling_type": "LAST", "normalize": true}',
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(*FLAGS, wait="/health") as server:
        yield server


def ask(server: Server, key: str, path: str, body: Any = None, **headers: str) -> Answer:
    answer = server.ask(path, body, authorization=f"Bearer {key}", **headers)
    assert answer.status == 200, answer.body
    return answer


def cached(server: Server, key: str, path: str, body: Any) -> int:
    """Return the cached prompt tokens of a request, from the record of the request."""
    name = ask(server, key, path, body).headers["x-request-id"]
    records = ask(server, key, "/debug/requests").json()["requests"]
    return sum(record["num_cached"] for record in records if record["request_id"].startswith(name))


@pytest.mark.parametrize("path", ROUTES)
def test_a_key_reuses_its_own_prompts_only(server: Server, path: str) -> None:
    body = json.loads(json.dumps(ROUTES[path]).replace("json module", path))  # a text of this route's own
    counts = [cached(server, key, path, body) for key in (ONE, TWO, ONE, TWO)]
    assert counts[:2] == [0, 0] and min(counts[2:]) > 0


def test_a_salt_is_beside_the_key_and_never_in_its_place(server: Server) -> None:
    def count(key: str, **fields: str) -> int:
        details = ask(server, key, "/v1/completions", {"prompt": [*range(99)], "max_tokens": 1} | fields).json()[
            "usage"
        ]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    assert count(ONE) == 0 and count(ONE) > 0
    for salt in (ONE, TWO, sha256(ONE.encode()).hexdigest(), "tenant", "mine"):
        assert count(TWO, cache_salt=salt) == 0, salt
    assert count(TWO, cache_salt="mine") > 0 and count(ONE, cache_salt="mine") == 0 and count(TWO) == 0


def test_the_records_of_a_key_name_no_other(server: Server) -> None:
    ids = [7] * 56, [8] * 56
    for key, prompts in ((ONE, ids), (TWO, (*ids, [*ids[0][:39], *[9] * 17]))):
        for prompt in prompts:
            ask(server, key, "/v1/completions", {"prompt": prompt, "max_tokens": 1}, **{"x-request-id": f"{key}-r"})
    shown = {key: ask(server, key, "/debug/requests") for key in (ONE, TWO)}
    for key, other in ((ONE, TWO), (TWO, ONE)):
        digests = [sha256(each.encode()).hexdigest() for each in (ONE, TWO)]
        assert not [word for word in (f"{other}-r", *digests) if word in shown[key].body.decode()]
    last, _, first = shown[TWO].json()["requests"][:3]
    assert first["prefix"]["why"] == "new" and not first["prefix"]["nearest"]
    assert (last["prefix"]["why"], last["prefix"]["differs_at"], last["num_cached"]) == ("tokens", 39, 32)


@pytest.mark.parametrize("flags", [("--share-prefix-cache-across-keys",), ()])
def test_keys_that_share_the_cache_share_the_records(flags: tuple[str, ...]) -> None:
    """Keys of one tenant: where that is asked for, or where one key is given twice."""
    keys = FLAGS if flags else [ONE if flag == TWO else flag for flag in FLAGS]
    with running_server(*keys, *flags, wait="/health") as server:
        other = TWO if flags else ONE
        assert cached(server, ONE, "/v1/completions", ROUTES["/v1/completions"]) == 0
        assert cached(server, other, "/v1/completions", ROUTES["/v1/completions"]) > 0
        assert len(ask(server, other, "/debug/requests").json()["requests"]) == 2


@pytest.mark.parametrize("flags", [("--share-prefix-cache-across-keys",), ()])
def test_an_id_is_taken_by_a_running_request_of_the_same_key_only(flags: tuple[str, ...]) -> None:
    """Else a key learns which ids another one uses, and can keep them from it."""
    head = {"x-request-id": "job-7"}
    with running_server(*FLAGS, *flags, "--mock-step-ms", "50", wait="/health") as server, ThreadPoolExecutor() as pool:
        long = pool.submit(ask, server, ONE, "/v1/completions", {"prompt": [1, 2], "max_tokens": 100}, **head)
        wait_until(lambda: "job-7" in ask(server, ONE, "/debug/requests").body.decode())
        for path, body in ROUTES.items():
            assert server.ask(path, body, authorization=f"Bearer {ONE}", **head).status == 409
            assert ask(server, TWO, path, body, **head).headers["x-request-id"] == "job-7"
        assert not long.done() and long.result()
