"""Binding: what is said when it cannot be done, and what is left behind."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quire.config.serve import HttpConfig
from quire.contracts.errors import ConfigError
from quire.entry.http.sockets import listen, max_connections, port_holder, release, url_of, without_secrets


def test_port_zero_gets_a_port_that_answers() -> None:
    config = HttpConfig(port=0)
    listener = listen(config)
    url = url_of(listener, config)
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d+", url)
    assert listener.proto == socket.IPPROTO_TCP  # else asyncio leaves Nagle's algorithm on: 40 ms per answer
    socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10).close()
    release(listener, config)
    listen(HttpConfig(port=int(url.rpartition(":")[2]))).close()  # at once again


def test_a_busy_port_names_its_holder_and_a_free_one() -> None:
    with listen(HttpConfig(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen(HttpConfig(port=port))
        if sys.platform == "linux":
            assert f"process {os.getpid()} (" in str(caught.value)
        proposed = re.search(r"--port (\d+)", str(caught.value))
        assert proposed is not None and int(proposed[1]) != port
        listen(HttpConfig(port=int(proposed[1]))).close()
    assert port_holder(port) is None


@pytest.mark.parametrize(
    "line, shown",
    [
        ("quire serve --api-key one two three --port 1", "quire serve --api-key *** --port 1"),
        ("quire serve --hf-token one --api-key two -three", "quire serve --hf-token *** --api-key ***"),
        (
            "quire serve --hf_token=one --API_KEY=two three --port=1",
            "quire serve --hf_token=*** --API_KEY=*** --port=1",
        ),
        ("server -key one", "server -key ***"),
        ("server --db-password one --client-secret two x", "server --db-password *** --client-secret ***"),
        ("server --api-key -passwone", "server --api-key ***"),
        ("serve m --tokenizer t --max-num-batched-tokens 64", "serve m --tokenizer t --max-num-batched-tokens 64"),
        ("python -m http.server", "python -m http.server"),
    ],
)
def test_secrets_of_a_command_line_are_hidden(line: str, shown: str) -> None:
    assert " ".join(without_secrets(line.split())) == shown


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_holder_of_a_port_is_named_without_its_secrets(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    flags = ["--api-key", "one-secret", "two-secret", "--hf-token=tok-secret", "--last"]
    with subprocess.Popen(
        ["python", "s.py", *flags],
        executable=sys.executable,
        cwd=tmp_path,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        port = int(holder.stdout.readline())
        with pytest.raises(ConfigError) as caught:
            listen(HttpConfig(port=port))
        named = port_holder(port)
        holder.stdin.close()
    assert named is not None and str(holder.pid) in str(caught.value)
    for text in (named, str(caught.value)):
        assert "(python s.py --api-key *** --hf-token=*** --last)" in text


@pytest.mark.parametrize(
    "host, words",
    [
        ("no.such.host.invalid", "has no address"),
        ("192.0.2.1", "not an address of this"),
    ],
)
def test_a_wrong_host_says_so(host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        listen(HttpConfig(host=host, port=0))


def test_ipv6_urls_have_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    config = HttpConfig(host="::1", port=0, ssl_certfile="c", ssl_keyfile="k")
    try:
        listener = listen(config)
    except ConfigError:
        pytest.skip("no IPv6 here")
    assert url_of(listener, config).startswith("https://[::1]:")
    release(listener, config)


def test_a_unix_socket_replaces_a_dead_one_and_no_living_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    config = HttpConfig(uds=str(path))
    listener = listen(config)
    with pytest.raises(ConfigError, match="another server listens"):
        listen(config)
    listener.close()  # as a kill would: the file stays
    assert path.exists()
    listener = listen(config)
    assert url_of(listener, config) == f"http+unix://{path}"
    release(listener, config)
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        listen(config)
    assert path.read_text() == "precious"


def test_connections_are_bounded_by_open_files() -> None:
    assert 16 <= max_connections() <= 16_384
