"""Output of a server: a banner of at most 12 lines with a command that can be typed, progress, statistics."""

import io
import json
import shlex
from typing import Any

import pytest

from quire.config.serve import ServerConfig
from quire.entry.http import console as console_module
from quire.entry.http.console import Console, banner_lines, curl_line, stats_text
from quire.observe.metrics import StatsLine
from quire.procs.messages import Loading, Ready

URL = "http://127.0.0.1:8000"
REASON = "first that supports bfloat16 on cpu"


def ready(**changes: Any) -> Ready:
    return Ready(
        **{
            "max_model_len": 4096,
            "vocab_size": 100,
            "num_slots": 256,
            "num_blocks": 1000,
            "block_size": 32,
            "depth": 1,
            "dtype": "bfloat16",
            "device": "cpu",
            "weight_bytes": 3 << 29,
            "kv_bytes": 2 << 30,
            "plans": {
                "dtype": "bfloat16 (as asked)",
                "norm": f"cpu ({REASON})",
                "rope": f"cpu ({REASON})",
                "linear": "native (asked for)",
            },
            "phases": {"config": 0.01, "weights": 1.5},
            **changes,
        }
    )


def config(**options: Any) -> ServerConfig:
    return ServerConfig.from_flat(**options)


def rows(lines: list[str]) -> dict[str, str]:
    return {line[2:11].strip(): line[12:] for line in lines[1:]}


def test_the_banner_tells_what_is_served_and_how() -> None:
    lines = banner_lines(ready(), config(model="a/b", revision="v1", served_model_name=("x", "y")), URL)
    assert len(lines) <= 12 and lines[0].startswith("Quire ")
    found = rows(lines)
    assert found["model"] == "a/b at v1, served as x, y"
    assert found["dtype"] == "bfloat16 (as asked)"
    assert found["device"] == "cpu; one process, one device; 1 step in flight"
    assert found["kernels"] == f"norm, rope: cpu ({REASON}); linear: native (asked for)"
    assert found["weights"] == "1.50 GiB"
    assert found["KV cache"] == "2.00 GiB = 1,000 blocks x 32 = 32,000 tokens"
    assert found["at once"] == "at most 256 requests; the KV cache holds 7.8 of the full 4,096 tokens"
    assert found["loading"] == "config 0.01 s, weights 1.50 s"
    assert found["address"] == f"{URL}/v1; page: {URL}/; this machine only, no key needed"


@pytest.mark.parametrize("options", [{"web": False}, {"uds": "/tmp/x"}])
def test_the_page_is_told_only_where_a_browser_finds_it(options: dict[str, Any]) -> None:
    assert rows(banner_lines(ready(), config(**options), URL))["address"].startswith(f"{URL}/v1; this machine only")


def test_a_gpu_tells_what_it_is_and_how_its_memory_is_shared() -> None:
    plans = {
        "device": "NVIDIA H200, sm_90",
        "weights": "16.00 GB in 0.50 s (32.0 GB/s)",
        "memory": "139.8 GiB: ...",
        "norm": "triton (asked for)",
    }
    lines = banner_lines(ready(device="cuda", plans=plans), config(), URL)
    found = rows(lines)
    assert len(lines) <= 12 and found["device"].startswith("NVIDIA H200, sm_90; one process")
    assert (found["weights"], found["memory"]) == (plans["weights"], plans["memory"])
    assert found["kernels"] == "norm: triton (asked for)"


def test_ranks_are_named_with_the_memory_of_each() -> None:
    plans = {"ranks": "2 ranks: tp 2, gloo", "each rank": "ranks 0, 1: 5.01 MiB of weights, 1.50 GiB of KV cache each"}
    found = rows(lines := banner_lines(ready(plans=plans), config(), URL))
    assert len(lines) <= 12 and "; 2 ranks: tp 2, gloo; " in found["device"] and found["memory"] == plans["each rank"]
    assert "weights" not in found and found["KV cache"] == "1,000 blocks x 32 = 32,000 tokens"


def test_many_kernels_are_named_without_their_reasons() -> None:
    plans = {f"operation{i}": f"cpu ({'long ' * 20}{i})" for i in range(5)}
    found = rows(banner_lines(ready(plans=plans), config(), URL))
    assert found["kernels"].startswith("operation0: cpu; operation1: cpu;") and "long" not in found["kernels"]


def test_the_time_counts_from_the_start_of_the_process() -> None:
    assert rows(banner_lines(ready(), config(), URL, 3.14))["loading"] == (
        "config 0.01 s, weights 1.50 s; ready 3.14 s after the start of the process, imports included"
    )


@pytest.mark.parametrize(
    ("slots", "text"),
    [(4, "4 requests, even of the full 4,096 tokens"), (1, "1 request, even of the full 4,096 tokens")],
)
def test_more_cache_than_slots_can_use(slots: int, text: str) -> None:
    assert rows(banner_lines(ready(num_slots=slots), config(), URL))["at once"] == text


@pytest.mark.parametrize(
    ("model", "prompt"), [("", "The json module"), ("quire-tiny", "The json module"), ("a/b", "Once upon a time")]
)
def test_the_prompt_suits_the_model(model: str, prompt: str) -> None:
    assert prompt in curl_line(config(model=model), URL, "name")


@pytest.mark.parametrize(
    ("options", "url", "words"),
    [
        ({}, URL, ["curl", f"{URL}/v1/completions"]),
        ({"host": "0.0.0.0"}, "http://0.0.0.0:80", ["curl", "http://127.0.0.1:80/v1/completions"]),
        ({"host": "::"}, "http://[::]:80", ["curl", "http://[::1]:80/v1/completions"]),
        (
            {"uds": "/tmp/a b"},
            "http+unix:///tmp/a b",
            ["curl", "--unix-socket", "/tmp/a b", "http://localhost/v1/completions"],
        ),
    ],
)
def test_the_curl_line_can_be_typed(options: dict[str, Any], url: str, words: list[str]) -> None:
    typed = shlex.split(curl_line(config(model="it's", **options), url, "it's"))
    assert typed[: len(words)] == words
    assert json.loads(typed[-1])["model"] == "it's"


def test_the_key_is_a_placeholder() -> None:
    settings = config(api_key=("secret", "other"))
    text = "\n".join(banner_lines(ready(), settings, URL))
    assert "secret" not in text and '-H "Authorization: Bearer ${QUIRE_API_KEY:-YOUR_KEY}"' in text
    assert "needs one of 2 keys" in text


def test_plain_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    console = Console(config(), out)
    for second, done in ((0.0, 0), (0.5, 10), (1.0, 20), (2.5, 30), (2.6, 40), (2.7, 100)):
        now[0] = second
        console.loading(Loading("weights", done << 20, 100 << 20, "B"))
    console.loading(Loading("starting"))
    assert out.getvalue().splitlines() == [
        "quire: weights: 0% of 100.0 MiB",
        "quire: weights: 30% of 100.0 MiB",
        "quire: weights: 100% of 100.0 MiB",
        "quire: starting",
    ]


def test_a_line_of_statistics_only_while_busy() -> None:
    out = io.StringIO()
    console = Console(config(), out)
    busy = StatsLine(
        num_running=3,
        num_waiting=1,
        kv_usage=0.256,
        hit_rate=0.5,
        prompt_tokens_per_s=1234.5,
        generation_tokens_per_s=99.6,
    )
    for line in (StatsLine(), busy, StatsLine(), StatsLine()):
        console.stats(line)
    assert out.getvalue().splitlines() == [
        "quire: 3 running, 1 waiting, KV 25.6%, prefix hits 50%, tokens/s 1,234 in 100 out"
    ]
    assert stats_text(busy) in out.getvalue()
    assert stats_text(StatsLine(acceptance=(0.75, 0.5))).endswith("0 out, drafts accepted 75% 50%, 2.25 tokens a run")


def test_statistics_can_be_switched_off() -> None:
    out = io.StringIO()
    Console(config(disable_log_stats=True), out).stats(StatsLine(num_running=1))
    assert out.getvalue() == ""


def test_notes_come_with_the_banner() -> None:
    out = io.StringIO()
    console = Console(config(), out)
    console.note("Listening")
    console.banner(ready(notes=("shortened.",)), config(), URL)
    console.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "quire: note: Listening" and lines[-1] == "quire: note: shortened."


def test_what_options_turn_on_has_lines_of_its_own() -> None:
    plans = {
        "drafts": "ngram, 3 drafts per request",
        "KV tiers": "off (--kv-offload-gb)",
        "sharing": "",
        "norm": "cpu (x)",
    }
    found = rows(banner_lines(ready(plans=plans), config(), URL))
    assert (found["drafts"], found["KV tiers"]) == (plans["drafts"], plans["KV tiers"])
    assert "sharing" not in found and found["kernels"] == "norm: cpu (x)"


def test_states_are_told_beside_the_requests_at_once() -> None:
    found = rows(banner_lines(ready(plans={"states": "1 MiB for each request", "norm": "cpu (x)"}), config(), URL))
    assert found["at once"].endswith("; states: 1 MiB for each request") and found["kernels"] == "norm: cpu (x)"
