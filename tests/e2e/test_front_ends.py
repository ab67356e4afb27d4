"""Several HTTP processes on one port in front of one engine: which of them answers makes no difference.

A connection is accepted by one of the processes that run, so a test stops the others for a moment to choose it.
"""

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from .serving import MOCK, PATIENCE, Server, children, is_running, running_server, wait_until

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are told apart in /proc")
COUNT = 3
SLOW = ("--mock-step-ms", "20")
FOR_LONG = 4000  # tokens: longer than a test waits


@contextmanager
def serving(*flags: str) -> Iterator[tuple[Server, list[int], int]]:
    """Yield a server with several HTTP processes, their ids, and that of its engine core."""
    with running_server(*MOCK, "--api-server-count", str(COUNT), *flags) as server:
        wait_until(lambda: len(every(server)) == COUNT, "a process is missing")  # the server is ready with one
        fronts = every(server)
        (core,) = {*children(server.process.pid)} - {*fronts}
        wait_until(lambda: all(map(listens, fronts)), "a process does not listen")
        yield server, fronts, core


def listens(pid: int) -> bool:
    """Return True if the process waits for connections: its epoll watches a listening socket."""
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if row[3] == "0A"}
    own, watched = set[str](), set[str]()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(f"/proc/{pid}/fd/{descriptor}")[8:-1] in inodes:
                own.add(descriptor)
            lines = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().splitlines()
            watched |= {line.split()[1] for line in lines if line.startswith("tfd:")}
    return bool(own & watched)


@contextmanager
def only(pid: int, fronts: list[int]) -> Iterator[None]:
    """New connections go to the process `pid`."""
    others = [other for other in fronts if other != pid]
    for other in others:
        os.kill(other, signal.SIGSTOP)
    try:
        yield
    finally:
        for other in others:
            os.kill(other, signal.SIGCONT)


def open_stream(server: Server, tokens: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Begin a completion; return after its first event."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    body = {"prompt": "Once", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200 and response.readline().startswith(b"data: {")
    return connection, response


def streams_of_each(server: Server, fronts: list[int], tokens: int) -> list[Any]:
    """Begin a completion in each process."""
    found = []
    for pid in fronts:
        with only(pid, every(server)):
            found.append(open_stream(server, tokens))
    return found


def every(server: Server) -> list[int]:
    """Return the HTTP processes of a server, the first one first."""
    others = [
        pid for pid in children(server.process.pid) if b"further_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return [server.process.pid, *others]


def files(server: Server) -> set[str]:
    """Return the names of the files that the processes share."""
    rows = (row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:])
    sockets = {f"socket:[{row[6]}]": Path(row[-1]) for row in rows if "/from" in row[-1]}
    own = {os.readlink(one) for one in Path(f"/proc/{server.process.pid}/fd").iterdir()}
    (folder,) = {path.parent for socket, path in sockets.items() if socket in own}
    return {path.name for path in folder.iterdir()}


def test_all_processes_answer_alike_and_their_counts_are_added_up() -> None:
    with serving() as (server, fronts, core):
        texts, names = [], set()
        for pid in fronts:
            with only(pid, fronts):
                texts.append(server.complete(max_tokens=20, seed=1).text())
                answer = server.ask(
                    "/v1/completions", {"prompt": "Once", "max_tokens": 20, "temperature": 1, "ignore_eos": True}
                ).json()
                names.add(answer["choices"][0]["text"])
                assert server.ask("/v1/completions", {"prompt": ""}).status == 400
        assert len(set(texts)) == 1 and texts[0]
        assert len(names) == COUNT, "processes draw the same seeds"
        for pid in fronts:

            def counted(pid: int = pid) -> bool:
                with only(pid, fronts):
                    success = server.metric("quire:request_success_total")
                    roles = server.metric("quire:process_resident_bytes")
                    tokens = server.metric("quire:generation_tokens_total")
                sums = sum(success.values()), sum(tokens.values()), len(roles)
                return sums == (2 * COUNT, 2 * 20 * COUNT, COUNT + 1)

            wait_until(counted, "counts are missing")


def test_a_killed_process_loses_its_clients_and_no_other_and_is_started_again() -> None:
    with serving(*SLOW) as (server, fronts, core):
        with only(fronts[-1], fronts):
            lost = open_stream(server, FOR_LONG)
        rest = streams_of_each(server, fronts[:-1], 100)
        with only(fronts[1], fronts):
            open_stream(server, FOR_LONG)[0].close()  # its client goes: an abort like any other
        os.kill(fronts[-1], signal.SIGKILL)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            lost[1].read()
            raise ConnectionError  # the end of a chunked body that has no last chunk may look like an end
        for _, response in rest:
            assert response.read().rstrip().endswith(b"data: [DONE]")
        wait_until(lambda: "HTTP process 2 of 3 (pid" in server.stderr, server.stderr)
        assert "was killed by SIGKILL: its clients have lost their connections; 2 go on. It is" in server.stderr
        wait_until(lambda: server.metric("quire:num_requests_running").popitem()[1] == 0, "its request runs on")
        assert server.complete(max_tokens=4).status == 200
        assert server.ask("/health").status == 200
        wait_until(lambda: "HTTP process 2 of 3 is started again (pid" in server.stderr, server.stderr)
        (pid,) = {*every(server)} - {*fronts}
        wait_until(lambda: listens(pid), "the new process does not listen")
        before = server.metric("quire:request_success_total")
        with only(pid, every(server)):
            assert server.complete(max_tokens=4).status == 200
        # The others write their counts once a second, and the new process has those of the dead one.
        wait_until(lambda: sum(server.metric("quire:request_success_total").values()) > sum(before.values()), "counts")
        left = {name for name in files(server) if name.startswith(("from", "counts")) and not name.endswith(".new")}
        assert left == {"from", "from1", "from2.1", "counts0", "counts1", "counts2"}
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0 and not is_running(pid)


def test_a_stopped_process_is_told_and_so_is_that_it_goes_on() -> None:
    """The others serve, so the server is healthy."""
    with serving() as (server, fronts, core):
        os.kill(fronts[1], signal.SIGSTOP)
        words = f"HTTP process 1 of 3 (pid {fronts[1]})"
        wait_until(lambda: f"{words} is stopped (SIGSTOP, or a debugger)" in server.stderr, server.stderr)
        assert f"(kill -CONT {fronts[1]})" in server.stderr
        assert server.ask("/health").status == 200 and server.complete(max_tokens=4).status == 200
        os.kill(fronts[1], signal.SIGCONT)
        wait_until(lambda: f"{words} goes on." in server.stderr, server.stderr)
        assert server.stderr.count("is stopped") == 1


@pytest.mark.parametrize("to_all", [False, True])
def test_sigterm_lets_the_requests_of_all_processes_finish(to_all: bool) -> None:
    """Also when it comes to every process, as from a service manager."""
    with serving(*SLOW) as (server, fronts, core):
        streams = streams_of_each(server, fronts, 60)
        for pid in reversed(fronts) if to_all else fronts[:1]:
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.05)
        for _, response in streams:
            assert response.read().rstrip().endswith(b"data: [DONE]")
        assert server.exit_code() == 0
        assert not any(map(is_running, [*fronts, core]))


@pytest.mark.parametrize("second", [False, True])
def test_an_end_at_once_is_told_to_the_clients_of_all_processes(second: bool) -> None:
    """The core is killed, or a second signal comes."""
    with serving(*SLOW) as (server, fronts, core):
        streams = streams_of_each(server, fronts, FOR_LONG)
        if second:
            server.signal(signal.SIGTERM)
            wait_until(lambda: "no new requests" in server.stderr)
            server.signal(signal.SIGTERM)
        else:
            os.kill(core, signal.SIGKILL)
        for _, response in streams:
            assert b'"error"' in response.read()
        assert server.exit_code() == (0 if second else 1)
        assert not any(map(is_running, [*fronts, core]))


def test_a_killed_core_is_started_again_for_all_processes_and_a_loop_ends_the_server() -> None:
    """A process dies while there is no core; responses stay; what runs fails alone, what waits is served later."""
    with serving(*SLOW, "--restart", "1", "--max-num-seqs", str(COUNT)) as (server, fronts, core):
        kept = server.ask("/v1/responses", {"input": "Once", "max_output_tokens": 4}).json()
        running = streams_of_each(server, fronts, FOR_LONG)
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(server.complete, max_tokens=4) for _ in range(4)]
            wait_until(lambda: server.metric("quire:num_requests_waiting").popitem()[1] == 4, "requests do not wait")
            os.kill(core, signal.SIGKILL)
            os.kill(fronts[2], signal.SIGKILL)
            for _, response in running[:2]:
                assert b"It is started again: send the request again." in response.read()
            wait_until(lambda: server.ask("/health").status == 503, "the loss is not told")
            refused = server.complete()
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
            for one in waiting:
                with suppress(http.client.HTTPException, ConnectionError):  # a client of the dead process
                    assert one.result().events()[-1] == "[DONE]" and one.result().error() is None
        wait_until(lambda: len(every(server)) == COUNT, "a process is missing")
        for pid in every(server):
            wait_until(lambda pid=pid: listens(pid), "a process does not listen")

            def served(pid: int = pid) -> bool:
                with only(pid, every(server)):
                    answer = server.complete(max_tokens=4)
                    return answer.status == 200 and answer.error() is None

            wait_until(served, "a process does not serve")
        assert server.ask(f"/v1/responses/{kept['id']}").json() == kept
        assert not {"from", "from1", "to"} & files(server), "files of the dead core are left"
        (again,) = {*children(server.process.pid)} - {*every(server)}
        wait_until(lambda: sum(server.metric("quire:restarts_total").values()) == 2, "restarts are not counted")
        os.kill(again, signal.SIGKILL)
        assert server.exit_code() == 1 and "has not served for 600 s since" in server.stderr
        assert not any(map(is_running, [*fronts, core, again]))


def test_nothing_outlives_the_first_process() -> None:
    with serving() as (server, fronts, core):
        server.signal(signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, [*fronts, core])), "a process is left")


def test_any_process_knows_the_responses_of_all() -> None:
    """Also one that runs in the background in another process, or in one that is gone."""
    with serving(*SLOW) as (server, fronts, core):

        def ask(pid: int, path: str = "", body: Any = None) -> Any:
            with only(pid, every(server)):
                return server.ask(f"/v1/responses{path}", body).json()

        body = {"input": "Once", "max_output_tokens": 4}
        made = ask(fronts[0], body=body)
        assert ask(fronts[1], "/" + made["id"]) == made
        later = ask(fronts[2], body=body | {"previous_response_id": made["id"]})
        assert later["usage"]["input_tokens"] > made["usage"]["input_tokens"]
        body |= {"background": True}
        with only(fronts[0], every(server)):
            whole = server.ask("/v1/responses", body | {"stream": True})
        with only(fronts[1], every(server)):
            path = f"/v1/responses/{whole.events()[0]['response']['id']}?stream=true&starting_after=1"
            assert server.ask(path).events() == whole.events()[2:]
        body |= {"max_output_tokens": FOR_LONG}
        running, lost = ask(fronts[0], body=body), ask(fronts[2], body=body)
        assert ask(fronts[1], "/" + running["id"])["status"] == "in_progress"
        assert server.ask(f"/v1/responses/{running['id']}/cancel", {}).json()["status"] == "cancelled"
        os.kill(fronts[2], signal.SIGKILL)
        wait_until(lambda: ask(fronts[1], "/" + lost["id"])["status"] == "failed")


def test_limits_of_a_key_are_those_of_all_processes_and_sighup_reads_its_file_again(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"

    def write(key: str, limit: int) -> None:
        file.write_text(f'[keys.team]\nkey = "{key}"\nrequests_per_minute = {limit}')

    write("sk-old", COUNT)
    with serving("--api-key-file", str(file)) as (server, fronts, core):

        def ask(pid: int, key: str) -> int:
            with only(pid, fronts):
                body = {"prompt": [7], "max_tokens": 1}
                return server.ask("/v1/completions", body, authorization=f"Bearer {key}").status

        assert [ask(pid, "sk-old") for pid in (*fronts, *fronts)] == [200] * COUNT + [429] * COUNT
        write("sk-new", 600)
        server.signal(signal.SIGHUP)
        for pid in fronts:
            wait_until(lambda pid=pid: ask(pid, "sk-old") == 401, "a process has the old keys")
            wait_until(lambda pid=pid: ask(pid, "sk-new") == 200, "the bucket fills faster")
        file.write_text("[keys.team]")
        server.signal(signal.SIGHUP)
        wait_until(lambda: "The API keys stay as they were" in server.stderr, server.stderr)
        for pid in fronts:
            wait_until(lambda pid=pid: ask(pid, "sk-new") == 200, "the old keys are gone")
        os.kill(fronts[1], signal.SIGKILL)
        wait_until(lambda: "HTTP process 1 cannot start: --api-key-file=" in server.stderr, server.stderr)
