"""The proxies of deploy/proxies in front of a server: streams are not held back, aborts reach the engine, headers pass.

A proxy that is not installed is skipped.
"""

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.addresses import free_address
from ..support.full import full_rows
from .serving import MOCK, PATIENCE, Answer, Server, running_server, wait_until

CONFIGURATIONS = Path(__file__).resolve().parents[2] / "deploy" / "proxies"
NAME = "llm.example.org"
KEYS = '[keys.alice]\nkey = "sk-alice"\nrequests_per_minute = 1000\n'
BUFFERED = 15  # tokens whose events no buffer of a proxy (4 KiB and more) would hold back for longer
HOST = b"Host: llm.example.org\r\n"
EARLY = {
    400: b"GET /v1/models HTTP/1.1\r\n\r\n",  # no Host
    405: b"TRACE /v1/models HTTP/1.1\r\n" + HOST + b"\r\n",
    414: b"GET /" + 9000 * b"a" + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    431: b"GET /v1/models HTTP/1.1\r\n" + HOST + b"x: " + 9000 * b"a" + b"\r\n\r\n",
    501: b"GET /v1/models HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: odd\r\n\r\n",
    505: b"GET /v1/models HTTP/3.1\r\n" + HOST + b"\r\n",
}  # status -> a request that nginx refuses before it looks for a server
HIDDEN = "/metrics /debug/requests /v1/../metrics /v1/%2e%2e/metrics //metrics /v1/..%2fmetrics".split()
NGINX = """daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {text}
}}
"""
CADDY = "{{\n\tadmin off\n\tauto_https disable_redirects\n}}\n{text}"
SITE = f"{NAME} {{\n"
PROGRAMS = {name: shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") for name in ("nginx", "caddy", "envoy")}
INSTALLED = [
    pytest.param(name, found, marks=pytest.mark.skipif(found is None, reason=f"there is no {name}"), id=name)
    for name, found in PROGRAMS.items()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a key and a certificate for the proxies' name."""
    made = tmp_path_factory.mktemp("proxies")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj".split()
    names = ["-addext", f"subjectAltName=DNS:{NAME}", "-keyout", made / "privkey.pem", "-out", made / "fullchain.pem"]
    if (
        shutil.which("openssl") is None
        or subprocess.run([*command, f"/CN={NAME}", *names], capture_output=True).returncode
    ):
        pytest.skip("there is no openssl to make a certificate with")
    (made / "keys.toml").write_text(KEYS)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running_server(*MOCK, "--mock-step-ms", "100", "--api-key-file", str(folder / "keys.toml")) as made:
        yield made


def prepared(file: str, folder: Path, server: int, port: int) -> str:
    """Return a configuration with this port, server and certificate in place of those that it names."""
    text = (CONFIGURATIONS / file).read_text()
    changes = {
        "443": str(port),  # first: the other ports may have these digits
        "127.0.0.1:8000": f"127.0.0.1:{server}",
        "port_value: 8000": f"port_value: {server}",
        "listen 80;": f"listen {free_address()};",
        f"/etc/ssl/{NAME}": str(folder),
        SITE: f"{NAME}:{port} {{\n\ttls {folder}/fullchain.pem {folder}/privkey.pem\n",
        **{f"/var/log/{name}": str(folder) for name in ("nginx", "caddy", "envoy")},
    }
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def arguments_of(proxy: str, folder: Path, server: int, port: int) -> list[str]:
    """Write the configuration of a proxy. Return the arguments with which it runs. `server`: port of the server"""
    config = folder / proxy
    if proxy == "nginx":
        config.write_text(NGINX.format(folder=folder, text=prepared("nginx.conf", folder, server, port)))
        return ["-p", str(folder), "-c", str(config)]
    if proxy == "caddy":
        config.write_text(CADDY.format(text=prepared("Caddyfile", folder, server, port)))
        return ["run", "--adapter", "caddyfile", "--config", str(config)]
    config = config.with_suffix(".yaml")
    config.write_text(prepared("envoy.yaml", folder, server, port))
    return ["-c", str(config), "--disable-hot-restart", "--concurrency", "1", "--log-level", "error"]


@contextlib.contextmanager
def running(command: list[str], folder: Path, port: int) -> Iterator[None]:
    log = folder / "log"
    home = {name: str(folder) for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder, env=os.environ | home)
    try:

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                return True
            return False

        wait_until(answers, f"the port of {command[0]}")
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


class Client:
    """Sends requests to a proxy, as to its name."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.context = ssl.create_default_context(cafile=str(folder / "fullchain.pem"))

    def begin(self, path: str, body: bytes | None = None, **headers: str) -> http.client.HTTPResponse:
        """Send a request. Return the answer before its body has come."""
        connection = http.client.HTTPConnection(NAME)
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        connection.sock = self.context.wrap_socket(raw, server_hostname=NAME)
        kind = {} if body is None else {"content-type": "application/json"}
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET" if body is None else "POST", path, body, kind | given)
        response = connection.getresponse()
        self.socket = connection.sock
        return response

    def say(self, text: bytes) -> Answer:
        """Send bytes on a connection of their own."""
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        with self.context.wrap_socket(raw, server_hostname=NAME) as connection:
            connection.sendall(text)
            response = http.client.HTTPResponse(connection)
            response.begin()
            return Answer(response.status, {n.lower(): v for n, v in response.getheaders()}, response.read())

    def ask(self, path: str, body: bytes | None = None, **headers: str) -> Answer:
        with self.begin(path, body, **headers) as response:
            got = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, got, response.read())


def asked(**fields: object) -> bytes:
    return json.dumps({"prompt": "Once", "max_tokens": 2, "ignore_eos": True} | fields).encode()


@pytest.mark.parametrize(("proxy", "program"), [*INSTALLED[:1], *full_rows(INSTALLED[1:])])
def test_a_proxy_in_front_of_a_server(proxy: str, program: str, folder: Path, server: Server) -> None:
    port = int(free_address().rpartition(":")[2])
    key = "Bearer sk-alice"

    def count(name: str) -> float:
        body = server.ask("/metrics", authorization=key).body.decode()
        return sum(float(line.rpartition(" ")[2]) for line in body.splitlines() if line.startswith(f"quire:{name}{{"))

    with running([program, *arguments_of(proxy, folder, server.port, port)], folder, port):
        client = Client(folder, port)
        answer = client.ask("/v1/completions", asked(), authorization=key, x_request_id=f"of-{proxy}")
        assert answer.status == 200 and answer.json()["usage"]["completion_tokens"] == 2
        assert answer.headers["x-request-id"] == f"of-{proxy}"
        assert answer.headers["x-ratelimit-limit-requests"] == "1000"
        assert client.ask("/v1/completions", asked(), authorization="Bearer no").status == 401
        odd = client.ask("/ready", x_request_id="an id")
        assert odd.status == 200 and re.fullmatch("[0-9a-f]{32}|[0-9a-f-]{36}", odd.headers["x-request-id"])
        for path in HIDDEN:
            refused = client.ask(path, authorization=key)
            assert refused.status in (400, 404) and b"quire:" not in refused.body, path

        generated, aborted = count("generation_tokens_total"), count("request_aborts_total")
        stream = client.begin("/v1/completions", asked(stream=True, max_tokens=2000), authorization=key)
        assert stream.status == 200 and stream.getheader("content-type", "").startswith("text/event-stream")
        assert stream.readline().startswith(b"data: ")
        assert count("generation_tokens_total") - generated < BUFFERED
        client.socket.close()
        stream.close()
        wait_until(lambda: count("request_aborts_total") > aborted, "the engine hears that the client has left")
        wait_until(lambda: count("num_requests_running") == 0, "the end of the request")
    if proxy == "nginx":
        lines = [json.loads(line) for line in (folder / "quire.log").read_text().splitlines()]
        found = {line["request_id"]: (line["path"], line["status"], line["upstream_status"]) for line in lines}
        assert found["of-nginx"] == ("/v1/completions", 200, "200")
        assert found[odd.headers["x-request-id"]] == ("/ready", 200, "200")
        assert found[refused.headers["x-request-id"]][1:] == (404, "")


@pytest.mark.skipif(PROGRAMS["nginx"] is None, reason="there is no nginx")
def test_nginx_below_a_path(folder: Path) -> None:
    """With the line of docs/proxies.md the same paths are served and hidden, below /llm."""
    page = (CONFIGURATIONS.parents[1] / "docs" / "proxies.md").read_text()
    ((new, old),) = re.findall(r"`(location ~ [^`]+)` in place of `(location ~ [^`]+)`", page)
    port = int(free_address().rpartition(":")[2])
    below = (*MOCK, "--root-path", "/llm", "--api-key-file", str(folder / "keys.toml"))
    with running_server(*below) as server:
        arguments = arguments_of("nginx", folder, server.port, port)
        config = folder / "nginx"
        assert old in config.read_text()
        config.write_text(config.read_text().replace(old, new))
        with running([PROGRAMS["nginx"], *arguments], folder, port):
            client = Client(folder, port)

            def status(path: str, body: bytes | None = None) -> int:
                return client.ask(path, body, authorization="Bearer sk-alice").status

            assert status("/llm/v1/completions", asked()) == status("/llm/ready") == status("/llm/health") == 200
            hidden = ["/llm/", "/v1/models", "/ready", *(f"/llm{path}" for path in HIDDEN)]
            assert [path for path in hidden if status(path) not in (400, 404)] == []


@pytest.mark.skipif(PROGRAMS["nginx"] is None, reason="there is no nginx")
def test_answers_of_nginx_itself_are_those_of_an_api(folder: Path) -> None:
    """JSON with a code and the request's id, also for what is no HTTP; without a server it says when to come back."""
    nobody, port = (int(free_address().rpartition(":")[2]) for _ in range(2))
    with running([PROGRAMS["nginx"], *arguments_of("nginx", folder, nobody, port)], folder, port):
        client = Client(folder, port)
        away = client.ask("/v1/completions", asked(), x_request_id="of-nobody")
        large = client.ask("/v1/completions", b" " * (8 * 2**20 + 1), x_request_id="of-nobody")
        hidden = client.ask("/metrics", x_request_id="of-nobody")
        early = {status: client.say(text) for status, text in EARLY.items()}
        (plain,) = re.findall(r"listen 127.0.0.1:(\d+);", (folder / "nginx").read_text())
        connection = http.client.HTTPConnection("127.0.0.1", int(plain), timeout=PATIENCE)
        connection.request("POST", "/v1/completions", b"{}", {"Host": NAME})
        moved = connection.getresponse()
        assert (moved.status, moved.getheader("location")) == (308, f"https://{NAME}/v1/completions")
        connection.close()
    codes = {404: "unknown_path", 413: "body_too_large", 431: "headers_too_large", 503: "no_server"}
    late = {404: hidden, 413: large, 503: away}
    for status, answer in (late | early).items():
        assert answer.status == status and answer.json()["error"]["code"] == codes.get(status, "proxy_refused")
        assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    assert {answer.headers["x-request-id"] for answer in late.values()} == {"of-nobody"}
    assert away.headers["retry-after"] == "5"
