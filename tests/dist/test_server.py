"""Servers of several ranks: the answers of one rank, streams that are left, and an end in good order."""

import http.client
import itertools
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from quire import LLM
from quire.assemble import ranks
from quire.platforms.cpu import read_cpu_facts

from ..e2e.in_process import Inside, running_inside
from ..e2e.serving import Answer, Server, running_server, wait_until
from ..support.full import full_rows
from ..support.many_ranks import Left

OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 16 << 20,
}
FLAGS = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--num-threads",
    "1",
    "--max-model-len",
    "1024",
    "--kv-cache-memory-bytes",
    "16M",
)
LONG = 900


@pytest.fixture
def inside(left: Left) -> Iterator[Inside]:
    """A server of two ranks in threads of this process."""
    with running_inside(**OPTIONS, tensor_parallel_size=2, check_collectives=True) as found:
        yield found
        found.check()


def answers(server: Server) -> list[object]:
    """Completions and chats, whole and streamed, without the parts that differ in every answer."""
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "temperature": 0}
    sampled = {"prompt": ["The json module", "Once"], "max_tokens": 24, "seed": 3, "logprobs": 2, "n": 2}
    schema = {
        "type": "json_schema",
        "json_schema": {
            "name": "a",
            "schema": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    whole = [
        server.ask("/v1/chat/completions", chat).json(),
        server.ask("/v1/completions", sampled).json(),
        server.ask("/v1/chat/completions", chat | {"response_format": schema}).json(),
    ]
    found = [(one["usage"]["completion_tokens"], one["choices"]) for one in whole]
    return [*found, server.complete("The json module").text()]


def apart(value: object) -> tuple[object, list[float]]:
    """Return a value of JSON without its fractions, and the fractions."""
    numbers: list[float] = []

    def taken(text: str) -> None:
        numbers.append(float(text))

    return json.loads(json.dumps(value), parse_float=taken), numbers


def test_answers_of_one_rank(inside: Inside) -> None:
    with running_inside(**OPTIONS) as one:
        (expected, right), (found, numbers) = apart(answers(one.server)), apart(answers(inside.server))
    assert found == expected and len(right) > 100
    np.testing.assert_allclose(numbers, right, rtol=1e-5, atol=1e-5)


def test_a_client_that_leaves_frees_its_blocks(inside: Inside) -> None:
    pool = inside.core.scheduler.allocator.pool
    connections = [http.client.HTTPConnection("127.0.0.1", inside.server.port, timeout=60) for _ in range(3)]
    for connection in connections:
        asked = {"prompt": "Once", "max_tokens": LONG, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200 and response.read1(10)
        response.close()
        connection.close()
    wait_until(lambda: inside.engine.num_live == 0, "the end of the requests")
    wait_until(lambda: pool.num_free == inside.core.facts.num_blocks, "free blocks")
    assert inside.server.complete(max_tokens=4).status == 200


def test_the_plan_and_the_metrics(inside: Inside) -> None:
    assert inside.server.complete(max_tokens=8).status == 200
    plan = inside.server.ask("/debug/plan").json()
    assert len(plan["runner"]) == 2 and all(runner["parts"] for runner in plan["runner"])
    assert sum(inside.server.metric("quire:generation_tokens_total").values()) == 8
    assert inside.server.ask("/health").status == 200
    assert profiled(inside.server) == {"requests", "engine core", "rank 0", "rank 1"}


def profiled(server: Server) -> set[str]:
    """The parts of the engine that a profile of a moment has; each is a process of the trace."""
    events = server.ask("/debug/profile?seconds=0.05").json()["traceEvents"]
    return {event["args"]["name"] for event in events if event["name"] == "process_name"}


@pytest.fixture
def replicas(left: Left) -> Iterator[Inside]:
    """A server of two independent replicas."""
    with running_inside(**OPTIONS, data_parallel_size=2, max_num_seqs=16) as found:
        yield found
        found.check()


def test_replicas_share_many_requests(replicas: Inside) -> None:
    """Answers are those of one rank, and each replica computes half of them."""
    prompts = [f"Once {i}" for i in range(12)]
    with running_inside(**OPTIONS, max_num_seqs=16) as one, ThreadPoolExecutor(12) as pool:
        right = list(pool.map(lambda prompt: one.server.complete(prompt, max_tokens=24).text(), prompts))
    most, before = Counter[str](), [core.scheduler.roster._arrivals for core in replicas.core.cores]
    with ThreadPoolExecutor(13) as pool:
        asked = [pool.submit(replicas.server.complete, prompt, max_tokens=24) for prompt in prompts]
        while not all(one.done() for one in asked):
            most |= Counter(replicas.server.metric("quire:num_requests_running_by_replica"))
    assert [one.result().text() for one in asked] == right
    assert len(most) == 2 and min(most.values()) > 0
    arrived = [core.scheduler.roster._arrivals for core in replicas.core.cores]
    assert [after - first for after, first in zip(arrived, before, strict=True)] == [6, 6]
    wait_until(lambda: sum(replicas.server.metric("quire:num_requests_running").values()) == 0, "the end")
    assert set(replicas.server.metric("quire:num_requests_running_by_replica").values()) == {0}
    runners = {f"model runner of replica {number}" for number in range(2)}
    assert profiled(replicas.server) == {"requests", "engine core", *runners}


def test_replicas_have_caches_of_one_size(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory the others take meanwhile: a request that fits into one replica fits into each."""
    frees = itertools.count(400 << 20, -(20 << 20))
    monkeypatch.setattr(ranks, "read_cpu_facts", lambda: replace(read_cpu_facts(), free_memory=next(frees)))
    options = {name: value for name, value in OPTIONS.items() if name != "kv_cache_memory_bytes"}
    with LLM(**options, data_parallel_size=2, use_tqdm_on_load=False) as llm:
        facts = [core.facts for core in llm.engine.core.cores]
        assert len({(one.num_blocks, one.max_model_len) for one in facts}) == 1
        assert llm.engine.core.facts.num_blocks == 2 * facts[0].num_blocks


def streams(pool: ThreadPoolExecutor, server: Server, count: int, tokens: int) -> list[Callable[[], Answer]]:
    """Start streams and wait until all of them run, and tokens arrive."""

    def total(*names: str) -> float:
        return sum(sum(server.metric(f"quire:{name}").values()) for name in names)

    started = [pool.submit(server.complete, f"Once {i}", max_tokens=tokens) for i in range(count)]
    wait_until(lambda: total("num_requests_running", "request_success_total") >= count, "streams")
    wait_until(lambda: total("generation_tokens_total") > 0, "tokens")
    return [one.result for one in started]


def test_sigterm_lets_requests_finish(left: Left, real: None) -> None:
    with running_server(*FLAGS, "-tp", "2", **left.variables) as server, ThreadPoolExecutor(3) as pool:
        results = streams(pool, server, 3, 100)
        server.signal(signal.SIGTERM)
        for result in results:
            answer = result()
            assert answer.error() is None if "error" in answer.body.decode() else answer.status == 200
            assert answer.events()[-1] == "[DONE]"
        assert server.exit_code() == 0
        assert not left.ranks() and "Traceback" not in server.stderr


def test_ctrl_c_twice_ends_at_once(left: Left) -> None:
    with running_server(*FLAGS, "-pp", "2", **left.variables) as server, ThreadPoolExecutor(3) as pool:
        results = streams(pool, server, 3, LONG)
        server.signal(signal.SIGINT)
        wait_until(lambda: "A second signal ends at once" in server.stderr, "the first Ctrl-C")
        server.signal(signal.SIGINT)
        assert server.exit_code() == 130
        answers = [result() for result in results]  # a stream that has not begun yet is refused as a whole
        errors = [one.error() if one.status == 200 else one.json()["error"] for one in answers]
        assert any(errors) and "Traceback" not in server.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, *full_rows([signal.SIGINT])])
def test_a_signal_while_ranks_start(number: signal.Signals, left: Left) -> None:
    with running_server(*FLAGS, "-tp", "2", wait="", **left.variables) as server:
        wait_until(lambda: len(left.ranks()) == 2, "ranks")
        server.signal(number)
        assert server.exit_code() in (0, 130)
        assert "Traceback" not in server.stderr
