"""Limits of API keys: buckets that several processes share, and what callers are told."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.config.serve import AccessConfig, ServerConfig
from quire.engine.mock_core import build_mock_core
from quire.entry.http.access import limits
from quire.entry.http.access.keyring import Keyring
from quire.entry.http.access.limits import REQUESTS, TOKENS, KeyLimits, KeyTable
from quire.entry.http.access.rate_limits import RateLimits
from quire.entry.http.app import build_app
from quire.entry.http.life.state import EngineState
from quire.observe.metrics import Metrics
from quire.text.load import load_text

from ..openai.conftest import Client, LocalEngine, Reply

KEYS = """
[keys.free]
key = "sk-free"
request_timeout = 7
[keys.few]
key = "sk-few"
requests_per_minute = 2
[keys.tokens]
key = "sk-tokens"
tokens_per_minute = 10
[keys.single]
key = "sk-single"
concurrency = 1
[keys.other]
key = "sk-other"
models = ["elsewhere", "al*"]
[keys.scrape]
key = "sk-scrape"
models = []
"""
PATH = "/v1/completions"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the limits, as a list of one number."""
    now = [1000.0]
    monkeypatch.setattr(limits.time, "monotonic", lambda: now[0])
    return now


def test_a_bucket_of_two_processes_is_one(tmp_path: Path, clock: list[float]) -> None:
    one, two = (KeyTable(number, 2, tmp_path / "limits") for number in range(2))
    taken = [not table.take("a", REQUESTS, 4, 1, allowed=True).wait for table in (one, two, one, two, one, two)]
    assert taken == [True] * 4 + [False] * 2
    assert one.take("b", REQUESTS, 4, 1, allowed=True).remaining == 4, "another key has its own"
    clock[0] += 15.5
    assert [not table.take("a", REQUESTS, 4, 1, allowed=True).wait for table in (two, one)] == [True, False]
    assert one.take("a", REQUESTS, 4).wait == pytest.approx(14.5)
    two.take("a", TOKENS, 60, 90)  # known only afterwards: the bucket is overdrawn
    assert one.take("a", TOKENS, 60).remaining == 0 and one.take("a", TOKENS, 60).wait == pytest.approx(31)


def test_requests_of_a_process_that_ended_run_no_more(tmp_path: Path) -> None:
    one, two = (KeyTable(number, 2, tmp_path / "limits") for number in range(2))
    assert [one.running("a", 1), two.running("a", 1), two.running("a", 1)] == [1, 2, 3]
    again = KeyTable(1, 2, tmp_path / "limits")
    assert one.running("a") == again.running("a") == 1


class Server:
    """The whole application over the mock core, with keys of a file."""

    def __init__(self, folder: Path) -> None:
        (folder / "keys.toml").write_text(KEYS)
        self.engine: Any = LocalEngine(
            build_mock_core(EngineConfig(), bundled_model()), load_text(EngineConfig(), bundled_model())
        )
        self.engine.state, self.metrics = EngineState.READY, Metrics()
        config = ServerConfig.from_flat(served_model_name=("tiny", "alias"), api_key_file=str(folder / "keys.toml"))
        self.client = Client(build_app(self.engine, config, self.metrics))

    async def post(self, key: str, path: str = PATH, **fields: Any) -> Reply:
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True} | fields
        return await self.client.post(path, body, x_api_key=f"sk-{key}")

    def ask(self, *args: Any, **fields: Any) -> Reply:
        return asyncio.run(self.post(*args, **fields))

    def count(self, metric: str, **labels: str) -> float:
        """Return the value of a metric, with these labels."""
        words = [f'{name}="{value}"' for name, value in labels.items()]
        lines = [line for line in self.metrics.render()[0].decode().splitlines() if f":{metric}_total" in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(word in line for word in words))


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_requests_per_minute(server: Server, clock: list[float]) -> None:
    replies = [server.ask("few") for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert [reply.header("x-ratelimit-remaining-requests") for reply in replies] == ["1", "0", "0"]
    assert [reply.header("x-ratelimit-reset-requests") for reply in replies] == ["30.000s", "60.000s", "60.000s"]
    assert replies[2].header("retry-after") == "30" and replies[2].header("x-ratelimit-limit-requests") == "2"
    assert replies[2].error["type"] == "rate_limit_error" and replies[2].error["code"] == "rate_limit_exceeded"
    assert "'few' has reached its limit of 2 requests per minute" in replies[2].error["message"]
    assert server.ask("free").header("x-ratelimit-limit-requests") is None
    clock[0] += 31
    assert server.ask("few").status == 200
    assert server.count("key_requests", key="few") == 3
    assert server.count("key_refusals", key="few", limit="requests") == 1
    message = server.ask("few", "/v1/messages", model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert message.status == 429 and message.json["error"]["type"] == "rate_limit_error", "not 529"
    assert message.header("anthropic-ratelimit-requests-limit") == "2"


def test_limits_in_front_hide_those_of_a_server_behind(tmp_path: Path) -> None:
    """A client of a router with limits sees each header once."""
    (tmp_path / "keys.toml").write_text(KEYS)
    caller = Keyring(AccessConfig(api_key_file=str(tmp_path / "keys.toml")), by_priority=False).find([b"sk-few"])
    started: list[Any] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        kept = [(b"x-ratelimit-limit-requests", b"9"), (b"x-ratelimit-limit-tokens", b"8")]
        await send({"type": "http.response.start", "status": 200, "headers": kept})

    async def send(message: Any) -> None:
        started.extend(message["headers"])

    scope = {"type": "http", "method": "POST", "path": PATH, "state": {"caller": caller}}
    asyncio.run(RateLimits(behind, KeyLimits(KeyTable, Metrics()))(scope, None, send))  # type: ignore[arg-type]
    assert [value for name, value in started if name == b"x-ratelimit-limit-requests"] == [b"2"]
    assert (b"x-ratelimit-limit-tokens", b"8") in started, "the key has no such limit in front"


def test_tokens_of_prompt_and_answer_are_counted_when_they_are_known(server: Server, clock: list[float]) -> None:
    assert server.ask("tokens").header("x-ratelimit-remaining-tokens") == "3"
    assert server.ask("tokens").status == 200  # 3 are left, and 7 are taken
    refused = server.ask("tokens")
    assert refused.status == 429 and refused.header("retry-after") == "30"  # 4 too many, and one for the next
    clock[0] += 31
    assert server.ask("tokens", max_tokens=1).status == 200
    assert server.count("key_tokens", key="tokens", kind="prompt") == 9
    assert server.count("key_tokens", key="tokens", kind="generation") == 9


def test_requests_at_once(server: Server) -> None:
    async def both() -> list[int]:
        return [reply.status for reply in await asyncio.gather(server.post("single"), server.post("single"))]

    assert sorted(asyncio.run(both())) == [200, 429]
    assert server.ask("single").status == 200, "the place is free again"


def test_models_of_a_key(server: Server) -> None:
    refused = server.ask("other", model="tiny")
    assert refused.status == 403 and refused.error["code"] == "model_not_allowed"
    assert server.ask("other", model="alias").status == 200 and server.ask("free", model="tiny").status == 200
    headers = {"x-api-key": "sk-other"}
    shown = asyncio.run(server.client.call("GET", "/v1/models", b"", headers=headers)).json["data"]
    assert [card["id"] for card in shown] == ["alias"]
    assert asyncio.run(server.client.call("GET", "/v1/models/tiny", b"", headers=headers)).status == 403
    assert server.count("key_refusals", key="other", limit="model") == 2


def test_a_key_without_models_reads_metrics_and_generates_nothing(server: Server) -> None:
    assert server.ask("scrape").status == server.ask("scrape", model="alias").status == 403
    for path, status in (("/metrics", 200), ("/v1/models", 200), ("/v1/models/tiny", 403)):
        answer = asyncio.run(server.client.call("GET", path, b"", headers={"x-api-key": "sk-scrape"}))
        assert answer.status == status, path


def test_the_engine_learns_the_tenant_and_the_time_limits_of_a_key(server: Server) -> None:
    tenants, timeouts = set(), []
    for key in ("free", "other"):
        server.ask(key, model="alias")
        options = server.engine.seen[-1][2]
        tenants.add(options["account"].tenant)
        timeouts.append(options["deadlines"].request_timeout)
    assert len(tenants) == 2 and "" not in tenants and timeouts == [7.0, None]
