"""Ports of gloo take no stranger once the ranks have met, and the ranks go on as before."""

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.config.env import rank_variables
from quire.distributed.listeners import listening, refuse_connections

from ...support import template_process

SECONDS = 120  # of a test's ranks
RANK = """
import json, os, socket, sys
import torch
from quire.plan.placement import Parallel
from quire.config.env import rank_variables
from quire.distributed.listeners import listening
from quire.distributed import process_group
from quire.distributed.process_group import join_ranks
number = int(sys.argv[1])
if sys.argv[3] == "open":
    process_group.refuse_connections = lambda listeners: None
before = listening()
groups = join_ranks(sys.argv[2], number, Parallel(tp=2), torch.device("cpu"))
opened = [socket.socket(fileno=os.dup(fd)).getsockname()[:2] for fd in listening() - before]
print(json.dumps(opened), flush=True)
sys.stdin.readline()
print(groups.tp.all_reduce(torch.tensor([1.0 + number])).tolist())
torch.distributed.destroy_process_group()
"""


def test_a_refused_listener_keeps_its_connections() -> None:
    before = listening()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        assert listening() - before == {server.fileno(), other.fileno()}
        with socket.create_connection(server.getsockname()) as ours, server.accept()[0] as theirs:
            refuse_connections([server.fileno()])
            ours.sendall(b"still here")
            assert theirs.recv(10) == b"still here"
            assert not connects(server.getsockname()) and connects(other.getsockname())


def connects(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, timeout=0.3).close()
    except OSError:
        return False
    return True


@contextmanager
def ranks(*arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that run RANK. They are killed at the end, or after SECONDS, which ends all reads."""
    environment = os.environ | rank_variables()
    started: list[subprocess.Popen[str]] = []
    limit = threading.Timer(SECONDS, lambda: [rank.kill() for rank in started])
    limit.start()
    try:
        for number in range(2):
            words, pipe = ["-c", RANK, str(number), *arguments], subprocess.PIPE
            options = {"stdin": pipe, "stdout": pipe, "text": True, "env": environment, "start_new_session": True}
            started.append(template_process.start(words, **options))
        yield started
    finally:
        limit.cancel()
        for rank in started:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("filtered", [True, False], ids=["filter", "open"])
def test_ranks_that_have_met_take_no_stranger(filtered: bool, tmp_path: Path) -> None:
    with ranks(str(tmp_path / "meeting"), "filter" if filtered else "open") as started:
        lines = [rank.stdout.readline() for rank in started if rank.stdout]
        assert all(lines), "a rank ended, or did not meet the other in time"
        opened = [[tuple(place) for place in json.loads(line)] for line in lines]
        assert all(opened), "gloo listens no more: the module can go"
        reached = [connects(place) for places in opened for place in places]
        assert not any(reached) if filtered else all(reached)
        for rank in started:
            assert rank.stdin
            rank.stdin.write("go\n")
            rank.stdin.flush()
        for rank in started:
            assert rank.communicate(timeout=SECONDS)[0] == "[3.0]\n" and rank.returncode == 0
