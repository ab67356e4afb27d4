"""Engines whose processes are killed while a server stays (--restart): ranks, replicas, sleepers, tiers. Full run only.

Cheaper tests of the same: tests/unit/entry/http/test_restart.py, tests/e2e/test_front_ends.py.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..e2e.serving import Server, children, is_running, running_server, wait_until
from ..support.full import only_full

FLAGS = ("--device", "cpu", "--num-threads", "1", "--max-model-len", "512", "--enforce-eager", "--restart", "5")
PROMPT = "Once upon a time " * 20


def core_of(server: Server) -> int:
    """Return the process of the engine core."""
    return next(pid for pid in children(server.process.pid) if b"core_process" in words(pid))


def words(pid: int) -> bytes:
    """Return the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def serves(server: Server) -> bool:
    """Return True when the engine serves."""
    return server.ask("/ready").status == 200


def follows(server: Server, core: int) -> None:
    """Wait until another core serves."""
    wait_until(lambda: not is_running(core), "the core lives")
    wait_until(lambda: any(b"core_process" in words(pid) for pid in children(server.process.pid)), "none follows")
    wait_until(lambda: serves(server), server.stderr)


def answer(server: Server, prompt: str = PROMPT) -> tuple[str, int]:
    """Return the text of an answer, and the number of cached tokens of its prompt."""
    told = server.ask("/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0}).json()
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


@only_full
@pytest.mark.parametrize("layout", [("-tp", "2"), ("-pp", "2"), ("-dp", "2")])
def test_ranks_come_back(layout: Sequence[str]) -> None:
    """After the death of a rank, and of a core whose rank is stopped, so that it does not see this."""
    shared = {*os.listdir("/dev/shm")}
    with running_server(*FLAGS, *layout) as server:
        text, _ = answer(server)
        for stopped in (False, True):
            core = core_of(server)
            ranks = children(core)
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGSTOP if stopped else signal.SIGKILL)
            if stopped:
                os.kill(core, signal.SIGKILL)
            follows(server, core)
            assert not any(map(is_running, ranks)) and len(children(core_of(server))) == 2
            assert answer(server)[0] == text
        counted = {name: count for name, count in server.metric("quire:restarts_total").items() if count}
        assert {(name.count('"rank"'), count) for name, count in counted.items()} == {(1, 1.0), (0, 1.0)}
    assert {*os.listdir("/dev/shm")} == shared


@only_full
def test_an_engine_that_dies_asleep_comes_back_when_it_is_woken() -> None:
    with running_server(*FLAGS, "--enable-sleep-mode") as server:
        text, _ = answer(server)
        assert server.ask("/sleep", {}).status == 200
        os.kill(core_of(server), signal.SIGKILL)
        wait_until(lambda: "/wake_up starts it again" in server.ask("/health").json()["reason"], "the end is not told")
        time.sleep(1.0)
        assert not any(b"core_process" in words(pid) for pid in children(server.process.pid))
        assert server.ask("/is_sleeping").json() == {"is_sleeping": True}
        assert server.ask("/wake_up", {}).json() == {"status": "awake"}
        assert answer(server)[0] == text


@only_full
def test_blocks_on_disk_are_found_by_the_next_core(tmp_path: Path) -> None:
    tiers = ("--kv-offload-gb", "0.001", "--kv-offload-dir", str(tmp_path), "--num-blocks", "24")
    with running_server(*FLAGS, *tiers, "--max-num-seqs", "2") as server:
        texts = [answer(server, f"{number} {PROMPT * 2}")[0] for number in range(8)]
        core = core_of(server)
        os.kill(core, signal.SIGKILL)
        follows(server, core)
        text, cached = answer(server, f"0 {PROMPT * 2}")
        assert text == texts[0] and cached > 0
