"""Every limit of a connection, met by a raw socket."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from quire.config.serve import LogConfig
from quire.entry.http.observed.request_lines import AccessLog
from quire.entry.http.request_scope import RequestScope
from quire.entry.http.sse import DIRECT_BODY
from quire.observe.metrics import Metrics

from .conftest import Live, echo, read_all, read_until

Start = Callable[..., Live]
HOST = b"Host: quire\r\n"


def post(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /x HTTP/1.1", b"Host: quire", b"Content-Length: %d" % len(body), *headers, b"", body]
    return b"\r\n".join(lines)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refusal(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def test_a_request_is_served_and_the_connection_kept(serve_echo: Start) -> None:
    live = serve_echo()
    with live.connect() as peer:
        for _ in range(3):
            peer.sendall(post(b"abc"))
            read_until(peer, b"POST /x 3")
    assert not live.refused


def test_a_chunked_body_is_whole_and_its_trailers_are_dropped(serve_echo: Start) -> None:
    chunked = (
        b"POST /x HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        b"3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
    )
    assert serve_echo().ask(*(chunked[i : i + 1] for i in range(len(chunked)))).endswith(b"POST /x 5")


def test_fifty_megabytes_of_one_header(serve_echo: Start) -> None:
    live = serve_echo()
    status, error = refusal(live.ask(b"GET / HTTP/1.1\r\nX: ", *[b"x" * 2**20] * 50, b"\r\n\r\n"))
    assert status == 431 and "65536" in error["message"] and error["code"] == "headers_too_large"
    assert live.refused == [431]


def test_a_hundred_thousand_headers(serve_echo: Start) -> None:
    status, error = refusal(serve_echo().ask(b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 100_000, b"\r\n"))
    assert status == 431 and "100 headers" in error["message"]


@pytest.mark.parametrize("extra, status", [(0, 200), (1, 431)])
def test_the_number_of_headers_is_exact(serve_echo: Start, extra: int, status: int) -> None:
    headers = b"".join(b"h%d: v\r\n" % i for i in range(98 + extra))
    answer = serve_echo().ask(b"GET / HTTP/1.1\r\n" + HOST + headers + b"Connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status)


def test_header_bytes_count_in_one_piece_and_in_many(serve_echo: Start) -> None:
    live = serve_echo(max_header_bytes=1000)
    one = b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"x" * 1000 + b"\r\n\r\n"
    many = b"GET / HTTP/1.1\r\n" + HOST + b"".join(b"h%d: %s\r\n" % (i, b"v" * 100) for i in range(10)) + b"\r\n"
    for request in (one, many):
        assert refusal(live.ask(request))[0] == 431
        assert refusal(live.ask(*(request[i : i + 50] for i in range(0, len(request), 50))))[0] == 431


def test_a_large_body_does_not_count_as_headers(serve_echo: Start) -> None:
    answer = serve_echo(max_header_bytes=1000).ask(post(b"x" * 100_000, b"Connection: close"))
    assert answer.endswith(b"POST /x 100000")


def test_a_long_url(serve_echo: Start) -> None:
    status, error = refusal(serve_echo().ask(b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n"))
    assert status == 414 and error["type"] == "invalid_request_error"


def test_a_refused_request_has_an_id_and_one_line_in_the_access_log(
    serve_echo: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    log = AccessLog(LogConfig(access_log=True))
    scoped = RequestScope(echo, metrics=Metrics(), access_log=log)
    live = serve_echo(scoped, max_body_bytes=8, body_timeout=0.01)
    live.traffic.log = log
    own, post = b"X-Request-Id: mine\r\n", b"POST /x?secret HTTP/1.1\r\n" + HOST
    length, chunked = b"Content-Length: %d\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
    for words, *pieces in (
        ("- - 400", b"nothing\r\n\r\n"),
        ("GET /xxx 431 mine headers_too_large", b"GET /xxx HTTP/1.1\r\n" + own + HOST, b"a: b\r\n" * 200, b"\r\n"),
        ("POST /x 413 mine body_too_large", post + own + length % 9),
        ("POST /x 413 body_too_large", post + chunked, b"9\r\n123456789\r\n"),
        ("POST /x 408 mine request_timeout", post + own + length % 8 + b"1"),
    ):
        head = live.ask(*pieces).partition(b"\r\n\r\n")[0].decode().lower()
        (name,) = [line.split()[1] for line in head.splitlines() if line.startswith("x-request-id:")]
        while not (lines := capsys.readouterr().err.splitlines()):  # a task that reads a body prints its line later
            time.sleep(0.01)
        (line,) = lines
        assert {*words.replace("mine", "").split(), name} <= {*line.replace("error=", "").split()} and "date:" in head
        assert (name == "mine") == ("mine" in words) and "secret" not in line


def test_two_hundred_megabytes_of_body_are_refused_before_they_come(serve_echo: Start) -> None:
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 209715200\r\n\r\n"
    status, error = refusal(serve_echo().ask(head, *[b"x" * 2**20] * 200))
    assert status == 413 and str(8 * 2**20) in error["message"]


def test_a_body_that_does_not_say_its_length_is_counted(serve_echo: Start) -> None:
    live = serve_echo(max_body_bytes=10_000)
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    assert refusal(live.ask(head, *[chunk] * 1000))[0] == 413
    with live.connect() as peer:
        for _ in range(2):
            peer.sendall(head + chunk * 2 + b"0\r\n\r\n")
            read_until(peer, b"POST / 8192")
    assert live.traffic.uploading == 0


@pytest.mark.parametrize("chunks, status", [(100, 200), (101, 413)])
def test_the_number_of_chunks_is_bounded(serve_echo: Start, chunks: int, status: int) -> None:
    """A body of 8 MB in chunks of one byte took seconds of the event loop."""
    live = serve_echo(max_chunks=101)
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    answer = live.ask(head, b"1\r\nx\r\n" * chunks, b"0\r\n\r\n")
    assert int(answer.split()[1]) == status


def test_a_body_that_nobody_reads_is_dropped_with_the_answer(serve_echo: Start) -> None:
    """The connection keeps the request until the next one. Refused requests without a key held 200 KB each."""
    cycles = []

    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        cycles.append(scope["extensions"][DIRECT_BODY]._cycle)
        assert cycles[-1].body == b"abc"
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    live = serve_echo(refuses)
    with live.connect() as peer:
        peer.sendall(post(b"abc"))
        read_until(peer, b"content-length: 0\r\n\r\n")
    until(lambda: cycles[-1].response_complete)
    assert not cycles[-1].body


def test_an_expected_body_that_is_too_large_is_never_sent(serve_echo: Start) -> None:
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 9000000\r\n\r\n"
    answer = serve_echo().ask(head)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"100 Continue" not in answer


def test_a_trailer_or_a_chunk_header_without_end(serve_echo: Start) -> None:
    live = serve_echo()
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    assert refusal(live.ask(head + b"0\r\nT: ", *[b"x" * 2**16] * 64))[0] == 400
    assert refusal(live.ask(head + b"3;e=", *[b"x" * 2**16] * 64))[0] == 400
    assert refusal(live.ask(head + b"0\r\n", b"a: b\r\n" * 1000))[0] == 431


def test_all_uploads_together_are_bounded(serve_echo: Start) -> None:
    live = serve_echo(uploads=100_000)
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 70000\r\nConnection: close\r\n\r\n"
    with live.connect() as first:
        first.sendall(head + b"x" * 60_000)
        while live.traffic.uploading < 60_000:
            time.sleep(0.01)
        answer = live.ask(head + b"x" * 60_000)
        assert refusal(answer)[0] == 503 and b"retry-after: 1\r\n" in answer
        first.sendall(b"x" * 10_000)
        assert read_all(first).endswith(b"POST / 70000")
    assert live.traffic.uploading == 0


@pytest.mark.parametrize(
    "request_",
    [
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\nHost: a\n\n",
        b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_ambiguous_and_broken_requests_are_400(serve_echo: Start, request_: bytes) -> None:
    status, error = refusal(serve_echo().ask(request_))
    assert status == 400 and set(error) == {"message", "type", "param", "code"}


def test_a_trickle_of_headers_ends_in_time(serve_echo: Start) -> None:
    live = serve_echo(head_timeout=0.3)
    with live.connect() as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(100):  # one byte every 20 ms is progress, and no reason to wait for ever
            try:
                peer.sendall(b"a: b\r\n")
            except OSError:
                break
            time.sleep(0.02)
            if live.refused:
                break
        assert refusal(read_all(peer))[0] == 408
    with live.connect() as silent:
        assert refusal(read_all(silent))[0] == 408
    with live.connect() as second_request:
        second_request.sendall(post(b"abc"))
        read_until(second_request, b"POST /x 3")
        second_request.sendall(b"P")
        assert refusal(read_all(second_request))[0] == 408


def test_a_trickle_of_a_body_ends_in_time(serve_echo: Start) -> None:
    live = serve_echo(body_timeout=0.2, body_rate=1000)
    with live.connect() as peer:
        peer.sendall(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\nabc")
        assert refusal(read_all(peer))[0] == 408
    with live.connect() as slow_but_steady:
        slow_but_steady.sendall(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 6000\r\nConnection: close\r\n\r\n")
        for _ in range(6):
            slow_but_steady.sendall(b"x" * 1000)
            time.sleep(0.1)
        assert read_all(slow_but_steady).endswith(b"POST / 6000")


def test_connections_are_bounded(serve_echo: Start) -> None:
    live = serve_echo(max_connections=2)
    with live.connect() as one, live.connect() as two:
        for peer in (one, two):
            peer.sendall(post(b""))
            read_until(peer, b"POST /x 0")
        answer = live.ask()
        assert refusal(answer)[0] == 503 and b"retry-after" in answer
    deadline = time.monotonic() + 10
    while b"200 OK" not in live.ask(post(b"", b"Connection: close")):
        assert time.monotonic() < deadline, "a closed connection still counts"


def endless(ended: list[str]) -> Any:
    """An application that streams until its client is gone."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        body = scope["extensions"][DIRECT_BODY]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.append(f"{scope['path']} {body.ready}")

    return app


@pytest.mark.parametrize("wait", [False, True])
def test_a_client_that_pipelines_and_leaves_is_seen_to_leave(serve_echo: Start, wait: bool) -> None:
    ended: list[str] = []
    live = serve_echo(endless(ended))
    with live.connect() as peer:
        peer.sendall(post(b"abc") + (b"" if wait else post(b"d") * 3))
        read_until(peer, b"1\r\nx\r\n")
        if wait:
            peer.sendall(post(b"y" * 200_000))  # more than is taken from a connection at once
            peer.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n" + b"\0garbage")
    until(lambda: bool(ended))
    assert ended == ["/x False"] and live.traffic.uploading == 0


def test_a_request_that_does_not_wait_is_not_read_and_the_connection_ends_after_the_answer(serve_echo: Start) -> None:
    few = b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % i for i in range(40))
    live = serve_echo()
    answer = live.ask(few)
    assert answer.count(b"200 OK") == 1 and answer.endswith(b"GET /0 0") and b"connection: close\r\n" in answer
    assert not live.refused


def test_line_ends_after_a_body_are_no_request(serve_echo: Start) -> None:
    with serve_echo().connect() as peer:
        for _ in range(3):
            peer.sendall(post(b"abc") + b"\r\n")
            answer = read_until(peer, b"POST /x 3")
            assert b"connection: close" not in answer


@pytest.mark.parametrize("version, body", [(b"1.0", b"one,two,"), (b"1.1", b"4\r\none,\r\n4\r\ntwo,\r\n0\r\n\r\n")])
def test_http_1_0_gets_no_chunks(serve_echo: Start, version: bytes, body: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"one,", b"two,"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    lines = b" HTTP/" + version + b"\r\n" + HOST + b"Connection: close\r\n\r\n"
    head, _, answer = serve_echo(app).ask(b"GET /" + lines).partition(b"\r\n\r\n")
    assert answer == body and b"connection: close" in head and (b"chunked" in head) == (version == b"1.1")
    known = serve_echo().ask(b"GET /" + lines)
    assert known.endswith(b"\r\n\r\nGET / 0") and b"content-length: 7\r\n" in known


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
def test_an_offer_of_another_protocol_loses_no_body(serve_echo: Start, offer: bytes) -> None:
    headers = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + offer, b"HTTP2-Settings: AAMAAABkAAQ")
    live = serve_echo()
    with live.connect() as peer:
        for body in (b"", b"abc", b"x" * 100_000):
            peer.sendall(post(body, *headers))
            read_until(peer, b"POST /x %d" % len(body))


def test_this_is_no_proxy(serve_echo: Start) -> None:
    assert refusal(serve_echo().ask(b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n"))[0] == 405


def test_an_error_after_the_answer_began_cuts_and_does_not_answer_twice(serve_echo: Start) -> None:
    async def eager(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"early", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    live = serve_echo(eager, max_body_bytes=1000)
    with live.connect() as peer:
        peer.sendall(b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n")
        answer = read_until(peer, b"early\r\n")
        peer.sendall(b"800\r\n" + b"x" * 2048 + b"\r\n")
        answer += read_all(peer)
    assert answer.count(b"HTTP/1.1") == 1 and not answer.endswith(b"0\r\n\r\n")


def test_a_reader_that_stops_reading_is_cut_off(serve_echo: Start) -> None:
    ended: list[str] = []

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10_000):
            await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
        ended.append((await receive())["type"])

    live = serve_echo(endless, stall=0.3)
    with live.connect() as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        deadline = time.monotonic() + 20
        while not ended:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_pieces_written_past_the_application_arrive_in_order(serve_echo: Start) -> None:
    states: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = scope["extensions"][DIRECT_BODY]
        states.append(body.ready)  # not before the answer has begun
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one,", "more_body": True})
        states.append(body.ready)
        body.write(b"two,")
        body.write(b"three" * 10)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        states.append(body.ready)

    live = serve_echo(app)
    with live.connect() as peer:
        for _ in range(2):  # the connection is as good as before
            peer.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
            answer = read_until(peer, b"0\r\n\r\n").partition(b"\r\n\r\n")[2]
            assert answer == b"4\r\none,\r\n4\r\ntwo,\r\n32\r\n" + b"three" * 10 + b"\r\n0\r\n\r\n"
    assert states == [False, True, False] * 2


def test_nothing_is_written_directly_to_who_reads_slowly_or_has_gone(serve_echo: Start) -> None:
    states: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = scope["extensions"][DIRECT_BODY]
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        pieces = 0
        while body.ready:
            body.write(b"x" * 10_000)
            pieces += 1
            assert pieces < 10_000
        states.append(body.ready)
        await send({"type": "http.response.body", "body": b"y", "more_body": True})  # waits for the reader
        states.append(body.ready)
        while (await receive())["type"] != "http.disconnect":
            pass
        states.append(body.ready)

    live = serve_echo(app)
    with live.connect() as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        until(lambda: len(states) == 1)
        read_until(peer, b"1\r\ny\r\n")
        until(lambda: len(states) == 2)
    until(lambda: len(states) == 3)
    assert states == [False, True, False]


def test_an_answer_of_known_length_has_no_direct_body(serve_echo: Start) -> None:
    states: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        states.append(scope["extensions"][DIRECT_BODY].ready)
        await send({"type": "http.response.body", "body": b"ok"})

    assert serve_echo(app).ask(b"GET / HTTP/1.0\r\n" + HOST + b"\r\n").endswith(b"ok")
    assert states == [False]


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", 0, 400), ("1.1", 1, 200), ("1.1", 2, 400), ("1.0", 0, 200), ("1.0", 2, 400)],
)
@pytest.mark.parametrize("offer", ["", "Connection: Upgrade\r\nUpgrade: h2c\r\n"])
def test_http_1_1_needs_one_host_header(serve_echo: Start, version: str, hosts: int, status: int, offer: str) -> None:
    with serve_echo().connect() as peer:
        peer.sendall((f"GET / HTTP/{version}\r\n" + offer + "Host: a\r\n" * hosts + "\r\n").encode())
        answer = read_until(peer, b"GET / 0") if status == 200 else read_all(peer)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert status == 200 or "Host" in refusal(answer)[1]["message"]
