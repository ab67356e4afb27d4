"""A server's options that can never work, alone or together, are refused by name."""

from dataclasses import fields
from typing import Any

import pytest

from quire.config.engine import EngineConfig, flat_names
from quire.config.serve import ServerConfig, is_loopback, server_names, server_parts
from quire.contracts.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 65536}, "port=65536: must be in 0..65535"),
        ({"port": "8000"}, "port='8000': must be an integer, not str"),
        ({"host": ""}, "give an address"),
        ({"ssl_keyfile": "k"}, "ssl_keyfile and ssl_certfile go together"),
        ({"ssl_certfile": "c"}, "ssl_keyfile and ssl_certfile go together"),
        ({"root_path": "api"}, "must begin with a slash"),
        ({"api_key": "one"}, "must be a tuple of strings, not str"),
        ({"api_key": ("",)}, "api_key: a key must be printable"),
        ({"api_key": ("kéy",)}, "api_key: a key must be printable"),
        ({"api_key": ("a\n",)}, "api_key: a key must be printable"),
        ({"allowed_origins": ("example.org",)}, "must be \\* or like https://example.org"),
        ({"allowed_origins": ("https://example.org/x",)}, "without a path"),
        ({"allowed_hosts": ("",)}, "must be \\* or a name like host.docker.internal"),
        ({"allowed_hosts": (".",)}, "must be \\* or a name"),
        ({"allowed_hosts": ("llm:8000",)}, "allowed_hosts='llm:8000': .*without a port"),
        ({"allowed_hosts": ("http://llm",)}, "without a port"),
        ({"allowed_hosts": ("a,b",)}, "several as several values"),
        ({"allowed_hosts": ("*.example.org",)}, "must be \\* or a name"),
        ({"served_model_name": ("",)}, "a name must not be empty"),
        ({"metrics_prefix": "a-b"}, "letters, digits and underscores"),
        ({"stream_interval": 0}, "stream_interval=0: must be at least 1"),
        ({"max_headers": 0}, "max_headers=0: must be at least 1"),
        ({"queue_timeout": 0}, "queue_timeout=0: must be above 0"),
        ({"request_timeout": -1.0}, "request_timeout=-1.0: must be above 0"),
        ({"request_timeout": float("nan")}, "request_timeout=nan: must be above 0"),
        ({"shutdown_timeout": -1}, "shutdown_timeout=-1: must be at least 0"),
        ({"keep_alive_interval": float("nan")}, "keep_alive_interval=nan: must be at least 0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be at least 1"),
        ({"prot": 1}, "Did you mean 'port'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig.from_flat(**options)


def test_a_key_is_never_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_flat(api_key=("se cret ",))
    assert "cret" not in str(caught.value)


def test_flat_names_reach_their_part() -> None:
    config = ServerConfig.from_flat(
        port=0, api_key=("k",), stream_interval=4, max_num_seqs=8, allowed_hosts=("Host.docker.internal.", "llm_1", "*")
    )
    assert (config.http.port, config.access.api_key) == (0, ("k",))
    assert config.http.allowed_hosts == ("Host.docker.internal.", "llm_1", "*")
    assert (config.serve.stream_interval, config.engine.scheduler.max_num_seqs) == (4, 8)


def test_names_are_unique_across_the_parts() -> None:
    assert len(server_names()) == len(flat_names()) + sum(len(fields(kind)) for kind in server_parts().values())


@pytest.mark.parametrize(("slots", "bound"), [(1, 1024), (8, 1024), (64, 1024), (256, 2048)])
def test_a_servers_queue_has_a_bound_that_ten_times_too_much_passes(slots: int, bound: int) -> None:
    """With few slots a floor, so that no request within the schema's bounds is refused for its size."""
    config = ServerConfig.from_flat(max_num_seqs=slots)
    assert config.max_waiting == bound and slots + bound < max(10 * slots, 2048)
    assert ServerConfig.from_flat(max_num_seqs=slots, max_waiting=5).max_waiting == 5
    assert EngineConfig().scheduler.max_waiting is None


@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("localhost", True),
        ("::1", True),
        ("LocalHost.", True),
        ("llm.localhost", True),
        ("0::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("127.evil.com", False),
        ("alocalhost", False),
    ],
)
def test_loopback(host: str, near: bool) -> None:
    assert is_loopback(host) is near
