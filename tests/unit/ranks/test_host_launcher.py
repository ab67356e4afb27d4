"""Ranks on several hosts, which are agents on the loopback: they start, run steps, die, fall silent, and end."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.contracts.errors import ConfigError, EngineDead
from quire.procs.frames import Frames
from quire.procs.host_link import connect, listen, welcome
from quire.ranks import agent as agent_module
from quire.ranks import host_launcher as module
from quire.ranks.executor import RankProcesses
from quire.ranks.host_launcher import Hosts
from quire.ranks.host_messages import TO_HOST, HostHello, Leave, ModelFiles, RankHello, encode_for_host
from quire.ranks.launchers import LocalLauncher
from quire.ranks.members import Members
from quire.ranks.messages import RankStep
from quire.ranks.watch import RankTimes

from ...support import template_process
from ...support.addresses import free_port
from ...support.started_ranks import ENV, MODULE, ROOT, exists, nothing_left, plan, until

KEY = "the key of these tests"
LONG = 1000.0


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


class Cluster:
    """A launcher on this process and agents as processes."""

    def __init__(self, count: int = 2, **members: Any) -> None:
        self.listener = listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.agents: dict[int, subprocess.Popen[str]] = {}
        given: dict[str, Any] = {"first": 1, "versions": "1", "model": "", "gpus": False, "seconds": 20.0}
        self.hosts = Hosts(
            LocalLauncher(MODULE, ENV), self.listener, KEY.encode(), Members(total=count, **(given | members))
        )

    def agent(self, node: int, key: str = KEY, ranks: str = MODULE, *own: int) -> "subprocess.Popen[str]":
        script = ROOT / "tests" / "support" / "fake_host.py"
        self.agents[node] = template_process.start(
            [str(script), str(self.port), key, str(node), ranks, *map(str, own)],
            env=os.environ | ENV,
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self.agents[node]


@contextmanager
def cluster(count: int = 2, nodes: tuple[int, ...] | None = None, **members: Any) -> Iterator[Cluster]:
    made = Cluster(count, **members)
    try:
        for node in range(1, count) if nodes is None else nodes:
            made.agent(node)
        yield made
    finally:
        made.hosts.close()
        for one in made.agents.values():
            one.kill()
            one.communicate()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Wait for an agent; return its exit code and its last words."""
    _, stderr = process.communicate(timeout=30)
    return process.returncode, stderr.strip()


def ranks(made: Cluster, *starts: dict[str, Any], **times: float) -> RankProcesses:
    made.hosts.place(len(starts))
    lines = [msgspec.json.encode({"index": index, **start}) for index, start in enumerate(starts)]
    names = [f"rank {index} (tp {index})" for index in range(len(starts))]
    return RankProcesses(made.hosts, lines, names, times=RankTimes(**times))


@contextmanager
def running(*starts: dict[str, Any], count: int = 2, **times: float) -> Iterator[tuple[Cluster, RankProcesses]]:
    with cluster(count) as made:
        processes = ranks(made, *starts, **times)
        try:
            processes.build(lambda done, total: None)
            processes.size([b"all"] * len(starts))
            yield made, processes
        finally:
            processes.close()


def test_steps_run_on_all_hosts_and_the_end_of_the_engine_ends_the_agents() -> None:
    with running({}, {}, {}, {}, {}, {}, count=3) as (made, processes):
        assert [place.host for place in made.hosts.place(6)] == [0, 0, 1, 1, 2, 2]
        values: list[Any] = processes.ask("echo", {"table": np.arange(3, dtype=np.int32)})(None)
        assert [value["index"] for value in values] == list(range(6))
        for step in range(20):
            processes.send(RankStep(plan(step, prompt=50_000 if step == 7 else 1)))
            assert processes.collect().step == step
        own = [rank for rank in processes._watch.ranks if not rank.host]
        assert [str(rank) for rank in own] == [f"rank {i} (tp {i}, pid {processes.pids[i]})" for i in (0, 1)]
        processes.close()
        assert [ended(made.agents[node]) for node in (1, 2)] == [(0, ""), (0, "")]
        assert not any(map(exists, processes.pids))


@pytest.mark.parametrize("own", [1, 0])
def test_hosts_say_which_ranks_they_have(own: int) -> None:
    """In any order. The first host may have none: it has the server alone."""
    with cluster(2, (), own=own, world=4) as made:
        made.agent(1, KEY, MODULE, 3, 1)
        made.agent(2, KEY, MODULE, own, 3 - own)
        processes = ranks(made, {}, {}, {}, {})
        processes.build(lambda done, total: None)
        processes.size([b"all"] * 4)
        places = [(place.host, place.local) for place in made.hosts.place(4)]
        here, there = [(0, True)] * own, [(own, False)] * (3 - own)
        assert places == [*here, *there, (own + 1, False)]
        values: list[Any] = processes.ask("echo", {"table": np.arange(3, dtype=np.int32)})(None)
        assert [value["index"] for value in values] == list(range(4))
        processes.close()
        assert [ended(made.agents[node]) for node in (1, 2)] == [(0, ""), (0, "")]


def test_hosts_whose_ranks_do_not_fit_are_told_why() -> None:
    with cluster(2, (), own=1, world=4, seconds=2.0) as made:
        assert "the other hosts have ranks 1 to 3" in refused(made, ranks=(3, 2))
        assert "the other hosts have ranks 1 to 3" in refused(made, ranks=(0, 1))
        made.agent(1, KEY, MODULE, 1, 2)
        until(lambda: 1 in made.hosts._agents, "the agent has not come")
        assert refused(made, ranks=(2, 2)) == "it has ranks 2 to 3, some of which host1 has"
        assert "the host of ranks 1 to 2 is host1 already" in refused(made, ranks=(1, 2))
        with pytest.raises(EngineDead, match="the host of rank 3 of 4 has not .* its --data-parallel-start-rank"):
            made.hosts.place(4)
    with cluster(2, (), world=4) as made:
        assert refused(made, ranks=(1, 2)) == "it has ranks 1 to 2, and each of 2 hosts has 2"


def test_gpus_are_those_that_an_agent_has() -> None:
    with cluster(gpus=True) as made:
        assert [tuple(place) for place in made.hosts.place(4)] == [
            (0, 0, (), ""),
            (0, 1, (), ""),
            (1, 4, (), "127.0.0.1"),
            (1, 5, (), "127.0.0.1"),
        ]
        with pytest.raises(ConfigError, match="3 ranks would run on host1, which has 2 GPUs"):
            made.hosts.place(6)


def test_a_killed_rank_of_another_host_is_named_with_host_and_signal() -> None:
    with running({"waits": {"collect": LONG}}, {}) as (made, processes):
        processes.send(RankStep(plan(0)))
        until(lambda: processes._watch.ranks[1].received == 0, "the step did not arrive")
        os.kill(processes.pids[1], signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(EngineDead) as caught:
            processes.collect()
        print(f"told after {time.monotonic() - killed:.3f} s")
        assert str(caught.value) == f"rank 1 (tp 1, pid {processes.pids[1]} on host1) was killed by SIGKILL."
        assert ended(made.agents[1]) == (1, "")


@pytest.mark.parametrize(
    "number, words", [(signal.SIGKILL, "closed the connection"), (signal.SIGTERM, "was ended by SIGTERM")]
)
def test_a_host_that_goes_is_named(number: signal.Signals, words: str) -> None:
    with running({}, {"waits": {"submit": LONG}}) as (made, processes):
        processes.send(RankStep(plan(0)))
        pid = processes.pids[1]
        made.agents[1].send_signal(number)
        with pytest.raises(EngineDead, match=rf"rank 1 \(tp 1, pid {pid} on host1\) was lost: its agent {words}"):
            while True:
                processes.ask("log", {})(None)
        until(lambda: not exists(pid), "the rank is left")


def test_a_stopped_rank_of_another_host_is_killed_and_named() -> None:
    with running({}, {}, stopped=1.5, beat=0.1) as (_, processes):
        pid = processes.pids[1]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineDead, match=rf"rank 1 \(tp 1, pid {pid} on host1\) is stopped \(SIGSTOP"):
            while True:
                processes.check_alive()
                time.sleep(0.05)
        until(lambda: not exists(pid), "the rank is left")


def test_a_silent_host_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 2.5)
    with running({}, {}) as (made, processes):
        made.agents[1].send_signal(signal.SIGSTOP)
        with pytest.raises(EngineDead, match=r"on host1\) was lost: its agent has sent nothing for \d+ s"):
            while True:
                processes.check_alive()
                time.sleep(0.05)


PARENT = """
import sys, time
sys.path[:0] = [{root!r}]
from tests.unit.ranks.test_host_launcher import Cluster, ranks
made = Cluster()
print(made.port, flush=True)
processes = ranks(made, {{}}, {{"waits": {{"submit": 1000.0}}}})
processes.build(lambda done, total: None)
processes.size([b"", b""])
print(*processes.pids, flush=True)
time.sleep(1000)
"""


def test_a_killed_master_leaves_nothing() -> None:
    program = PARENT.format(root=str(ROOT))
    options: dict[str, Any] = {"env": os.environ | ENV, "text": True, "start_new_session": True}
    with template_process.start(["-c", program], cwd=ROOT, stdout=subprocess.PIPE, **options) as master:
        assert master.stdout is not None
        port = master.stdout.readline().strip()
        words = [str(ROOT / "tests" / "support" / "fake_host.py"), port, KEY, "1"]
        with template_process.start(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, **options) as agent:
            pids = [int(word) for word in master.stdout.readline().split()]
            assert all(map(exists, pids))
            master.kill()
            assert ended(agent) == (1, f"the engine on 127.0.0.1:{port} is gone: the ranks of this host were ended.")
            until(lambda: not any(map(exists, pids)), "a rank is left")


def test_an_agent_that_comes_first_waits_for_the_master() -> None:
    port = free_port()
    made = Cluster.__new__(Cluster)
    made.port, made.agents = port, {}
    made.agent(1)
    time.sleep(1.0)
    made.listener = listen("127.0.0.1", port)
    members = Members(first=1, total=2, versions="1", model="", gpus=False, seconds=20.0)
    made.hosts = Hosts(LocalLauncher(MODULE, ENV), made.listener, KEY.encode(), members)
    processes = ranks(made, {}, {})
    processes.build(lambda done, total: None)
    processes.close()
    assert ended(made.agents[1])[0] in (0, 1)  # its rank was killed while it started


def test_hosts_that_do_not_come_are_named() -> None:
    with cluster(3, (1,), seconds=3.0) as made, pytest.raises(EngineDead, match="node 2 of 3 has not connected to 1"):
        made.hosts.place(3)


def test_a_host_with_another_key_is_refused_and_the_right_one_is_taken() -> None:
    with cluster(nodes=()) as made:
        code, words = ended(made.agent(1, "another key of another cluster"))
        assert code == 1 and "has another key: set QUIRE_CLUSTER_KEY" in words
        made.agent(1)
        processes = ranks(made, {}, {})
        processes.build(lambda done, total: None)
        processes.close()


def test_a_host_that_is_lost_while_others_are_awaited_may_come_again() -> None:
    with cluster(3, (1,)) as made:
        until(lambda: 1 in made.hosts._agents, "the agent has not come")
        former = made.hosts._agents[1]
        made.agents.pop(1).kill()
        until(lambda: former.lost != "", "the end of the agent was not noticed")
        made.agent(1), made.agent(2)
        processes = ranks(made, {}, {}, {})
        processes.build(lambda done, total: None)
        assert made.hosts._agents[1] is not former
        made.agents[1].kill()
        until(lambda: made.hosts._agents[1].lost != "", "the end of the agent was not noticed")
        assert "the ranks of node 1 have ended, and the engine takes no host in their place" in refused(made, node=1)
        processes.close()


def test_a_silent_agent_gives_way_to_one_that_comes_for_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has lost its power, and is back: nothing has told that the first connection is dead."""
    monkeypatch.setattr(module, "GONE_SECONDS", 0.3)
    with cluster(3, ()) as made:
        hello = encode_for_host(HostHello(node=1, name="b", versions="1"))
        with connect("127.0.0.1", made.port, KEY.encode(), hello):
            until(lambda: 1 in made.hosts._agents, "the agent has not come")
            time.sleep(0.5)
            made.agent(1)
            until(lambda: made.hosts._agents[1].hello.name == "host1", "the agent was not taken")


def test_silent_strangers_do_not_keep_hosts_out() -> None:
    """As many connections as may prove their key at the same time, and more, which stay silent for long."""
    with cluster(nodes=(), seconds=module.START_SECONDS / 10) as made, ExitStack() as stack:
        for _ in range(module.MOST_NEW + 10):
            stack.enter_context(socket.create_connection(("127.0.0.1", made.port)))
        made.agent(1)
        assert len(made.hosts.place(2)) == 2


def test_a_connection_of_a_rank_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[socket.socket] = []

    def busy(connection: socket.socket, key: bytes) -> bytes:
        seen.append(connection)
        if len(seen) == 2:  # the first is the agent's own
            raise OSError("planted")
        return welcome(connection, key)

    monkeypatch.setattr(module, "welcome", busy)
    with running({}, {}) as (_, processes):
        processes.send(RankStep(plan(0)))
        assert processes.collect().step == 0 and len(seen) == 3


def refused(made: Cluster, **fields: Any) -> str:
    """Say hello with these fields; return the reason why the host was not taken."""
    hello = HostHello(**({"node": 1, "name": "b", "versions": "1"} | fields))
    frames = Frames(connect("127.0.0.1", made.port, KEY.encode(), encode_for_host(hello)))
    messages: list[bytes] = []
    while not messages:
        messages = frames.receive()
    frames.close()
    (answer,) = [message for message in map(TO_HOST.decode, messages) if isinstance(message, Leave)]
    return answer.why


def test_hosts_that_do_not_fit_are_told_why() -> None:
    with cluster() as made:
        made.hosts.place(2)
        assert refused(made, node=1) == "node 1 is host1 already: give each host its --node-rank"
        assert refused(made, node=2) == "it is node 2, and the other nodes are 1 to 1"
    with cluster(nodes=()) as made:
        assert "it has 2, and the first host has 1: install the same versions" == refused(made, versions="2")
        assert "its model has other files" in refused(made, files=ModelFiles(digest="abc"))


def test_a_token_that_was_not_given_opens_nothing() -> None:
    with running({}, {}) as (made, processes):
        with connect("127.0.0.1", made.port, KEY.encode(), encode_for_host(RankHello(b"t" * 32))) as connection:
            assert connection.recv(1) == b""
        processes.send(RankStep(plan(0)))
        assert processes.collect().step == 0


def test_a_module_that_is_missing_on_a_host_is_told() -> None:
    with cluster(nodes=()) as made:
        made.agent(1, KEY, "no.such")
        processes = ranks(made, {}, {})
        with pytest.raises(EngineDead, match=r"rank 1 \(tp 1, pid \d+ on host1\) failed: ModuleNotFoundError"):
            processes.build(lambda done, total: None)
        processes.close()


def test_a_silent_master_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent of this test runs in this process; its master accepts it and says nothing."""
    monkeypatch.setattr(agent_module, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(module, "BEAT_SECONDS", LONG)
    with ExitStack() as stack:
        made = stack.enter_context(cluster(nodes=()))
        hello = HostHello(node=1, name="b", versions="1")
        agent = agent_module.HostAgent("127.0.0.1", made.port, KEY.encode(), hello, MODULE, env={}, say=print)
        with pytest.raises(EngineDead, match="has sent nothing for 1 s: the ranks of this host were ended"):
            agent.run()


def own_agent(made: Cluster, words: list[str], node: int = 1) -> agent_module.HostAgent:
    """Return an agent in this process that keeps its words."""
    hello = HostHello(node=node, name="b", versions="1")
    return agent_module.HostAgent("127.0.0.1", made.port, KEY.encode(), hello, MODULE, env={}, say=words.append)


def test_an_agent_tells_that_it_joins_and_leaves() -> None:
    with cluster(nodes=()) as made:
        words: list[str] = []
        assert own_agent(made, words).run(lambda: "was ended by SIGINT" if words else "")
        assert words == [
            f"node 1 has joined the engine on 127.0.0.1:{made.port}.",
            "this host was ended by SIGINT, and has left the engine with its ranks.",
        ]


def test_an_agent_that_is_not_taken_has_not_joined() -> None:
    with cluster(nodes=()) as made:
        words: list[str] = []
        with pytest.raises(ConfigError, match="does not take this host: it is node 2"):
            own_agent(made, words, node=2).run()
        assert words == []
