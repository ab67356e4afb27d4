"""Ports of gloo take no stranger once the ranks have met, and the ranks go on as before."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from quire.config.env import rank_variables
from quire.distributed.listeners import listening, refuse_connections

RANK = """
import json, os, socket, sys
import torch
from quire.config.placement import Parallel
from quire.config.env import rank_variables
from quire.distributed.listeners import listening
from quire.distributed.process_group import join_ranks
number = int(sys.argv[1])
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


def test_ranks_that_have_met_take_no_stranger(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    pipe, env = subprocess.PIPE, os.environ | rank_variables()
    ranks = [
        subprocess.Popen(
            [*command, str(number), str(tmp_path / "meeting")], stdin=pipe, stdout=pipe, text=True, env=env
        )
        for number in range(2)
    ]
    opened = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout]
    assert [len(places) >= 1 for places in opened] == [True, True], "gloo listens no more: the module can go"
    assert not any(connects(tuple(place)) for places in opened for place in places)
    for rank in ranks:
        assert rank.stdin
        rank.stdin.write("go\n")
        rank.stdin.flush()
    for rank in ranks:
        assert rank.communicate(timeout=120)[0] == "[3.0]\n" and rank.returncode == 0
