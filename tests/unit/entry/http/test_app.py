"""The layers around the routes: keys, states of the engine, content types, refusals, ids, the last resort."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.config.serve import AccessConfig, HttpConfig, LogConfig, ServeConfig, ServerConfig
from quire.contracts.errors import EngineDead, QueueFull
from quire.entry.http.access.auth import OPEN_PATHS
from quire.entry.http.app import build_app
from quire.entry.http.life.state import EngineState
from quire.entry.http.ops import ALWAYS
from quire.observe.metrics import Metrics
from quire.procs.messages import Loading

from .conftest import FakeEngine, call

SECRET = "sk-secret"
ANTHROPIC = "of Anthropic's"  # for the code of an error in a form that has none
OPEN = ServerConfig()
LOCKED = ServerConfig(access=AccessConfig(api_key=("sk-other", SECRET)))


def make(engine: Any, config: ServerConfig = OPEN, metrics: Metrics | None = None) -> Any:
    return build_app(engine, config, metrics or Metrics())


def every_route(app: Any) -> list[tuple[str, str]]:
    found = [(method, re.sub(r"\{.*?\}", "x", route.path)) for route in app.routes for method in route.methods]
    assert len(found) > 15
    return found


# --- keys -----------------------------------------------------------------------------------------------------------


def test_every_route_but_the_probes_needs_a_key(engine: FakeEngine) -> None:
    app = make(engine, LOCKED)
    for method, path in [*every_route(app), *(("GET", path) for path in ("/nowhere", "/", "//health", "/health/"))]:
        answer = call(app, path, method)
        assert (answer.status == 401) == (path not in OPEN_PATHS), (method, path, answer.status)
    assert OPEN_PATHS == {"/health", "/ping", "/live", "/ready"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer "},
        {"authorization": "Bearer"},
        {"x_api_key": ""},
        {"authorization": "Bearer sk-secre"},
        {"authorization": "Bearer sk-secretx"},
        {"authorization": f"Basic {SECRET}"},
        {"authorization": SECRET},
        {"x_api_key": "sk-\xff"},
        {"host": "x/health?", "authorization": "Bearer no"},
    ],
)
def test_wrong_keys_are_401_in_openais_form(engine: FakeEngine, headers: dict[str, str]) -> None:
    answer = call(make(engine, LOCKED), "/version", **headers)
    assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert answer.error["type"] == "authentication_error" and answer.error["code"] == "invalid_api_key"
    assert SECRET not in answer.body.decode()


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {SECRET}"},
        {"authorization": f"bearer  {SECRET}"},
        {"x_api_key": SECRET},
        {"x_api_key": "sk-other"},
        {"authorization": "Bearer wrong", "x_api_key": SECRET},
    ],
)
def test_any_of_the_keys_opens(engine: FakeEngine, headers: dict[str, str]) -> None:
    assert call(make(engine, LOCKED), "/version", **headers).status == 200


def test_an_empty_bearer_is_fine_when_no_key_is_set(engine: FakeEngine) -> None:
    assert call(make(engine), "/version", authorization="Bearer ").status == 200


def test_the_root_names_what_serves_and_where_to_look_next(engine: FakeEngine) -> None:
    config = ServerConfig.from_flat(model="a/b", served_model_name=("x", "y"), api_key=(SECRET,))
    app = make(engine, config)
    answer = call(app, "/", x_api_key=SECRET)
    shown = answer.json()
    assert {**shown, "paths": 0} == {"name": "Quire", "version": __version__, "models": ["x", "y"], "paths": 0}
    assert SECRET not in answer.body.decode() and call(app, "/").status == 401
    assert {"/v1/models", "/health", "/metrics", "/openapi.json"} <= set(shown["paths"])
    assert [call(app, path, x_api_key=SECRET).status for path in shown["paths"]] == [200] * len(shown["paths"])
    behind = ServerConfig(http=HttpConfig(root_path="/llm"))
    assert "/llm/health" in call(make(engine, behind), "/").json()["paths"]


# --- states ---------------------------------------------------------------------------------------------------------


def test_while_it_loads_the_api_says_when_to_come_back(engine: FakeEngine) -> None:
    engine.state, engine.ready = EngineState.STARTING, None
    app = make(engine)
    assert "starting" in call(app, "/health").json()["reason"]
    engine.loading = Loading("weights", 25, 100, "B")
    for path in ("/health", "/ready", "/ping"):
        answer = call(app, path)
        assert answer.status == 503 and answer.headers["retry-after"] == "5"
        assert "weights, 25 %" in answer.json()["reason"]
        assert answer.json()["loading"]["done"] == 25
    for method, path in every_route(app):
        if path not in ALWAYS:
            answer = call(app, path, method, content_type="application/json")
            assert answer.status == 503 and answer.error["code"] in ("engine_starting", ANTHROPIC), path
            assert answer.headers["retry-after"] == "5"
    assert call(app, "/live").status == 200
    assert call(app, "/version").json() == {"version": __version__, "model": "quire-tiny", "revision": None}


@pytest.mark.parametrize(
    "state, health, ready, code",
    [
        (EngineState.READY, 200, 200, None),
        (EngineState.DRAINING, 200, 503, "engine_draining"),
        (EngineState.RESTARTING, 503, 503, "engine_restarting"),
        (EngineState.DEAD, 503, 503, "engine_dead"),
    ],
)
def test_probes_by_state(engine: FakeEngine, state: EngineState, health: int, ready: int, code: str | None) -> None:
    engine.state, engine.failure = state, EngineDead("it was killed by SIGKILL.")
    metrics = Metrics()
    app = make(engine, metrics=metrics)
    assert call(app, "/health").status == call(app, "/ping", "POST").status == health
    answer = call(app, "/ready")
    assert answer.status == ready and metrics.is_ready() == (ready == 200)
    assert call(app, "/live").status == 200
    if code is not None:
        assert answer.json()["error"]["code"] == code
        refused = call(app, "/v1/completions", "POST", b"{}", content_type="application/json")
        assert refused.status == 503 and refused.error["code"] == code and "retry-after" in refused.headers
        reason = {EngineState.DRAINING: "closed", EngineState.DEAD: "dead"}.get(state, "starting")
        assert f'rejections_total{{engine="0",model_name="",reason="{reason}"}} 1.0' in metrics.render()[0].decode()
    if state is EngineState.RESTARTING:  # it takes as long as the last start did
        engine.ready = SimpleNamespace(phases={"weights": 40.4, "engine": 2.0})  # type: ignore[assignment]
        refused = call(app, "/v1/completions", "POST", b"{}", content_type="application/json")
        assert refused.headers["retry-after"] == call(app, "/health").headers["retry-after"] == "42"
    if state is EngineState.DEAD:
        assert "SIGKILL" in answer.json()["reason"]


def test_a_hung_step_makes_it_unready_and_not_dead(engine: FakeEngine) -> None:
    app = make(engine, ServerConfig(serve=ServeConfig(hang_timeout=5.0)))
    engine.last_step_age = 4.9
    assert call(app, "/ready").status == 200
    engine.last_step_age = 5.1
    assert call(app, "/ready").status == 503 and "has not finished a step" in call(app, "/ready").json()["reason"]
    assert call(app, "/health").status == 200


def test_the_records_of_requests_can_be_read_in_every_state(engine: FakeEngine) -> None:
    for engine.state in EngineState:
        answer = call(make(engine), "/debug/requests")
        assert (answer.status, answer.json()) == (200, {"requests": [{"request_id": "r", "prefix": None}]})


# --- what else is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_bodies_are_json(engine: FakeEngine, content_type: str) -> None:
    app = make(engine)
    for method, path in every_route(app):
        if method == "POST" and path not in OPEN_PATHS:
            headers = {"content_type": content_type} if content_type else {}
            answer = call(app, path, method, b"{}", **headers)
            assert answer.status == 415 and "application/json" in answer.error["message"], path
            assert call(app, path, method, b"{}", content_type="Application/JSON; charset=utf-8").status != 415
            assert call(app, path, method, transfer_encoding="chunked", **headers).status == 415  # may be a body
            assert (call(app, path, method, **headers).status == 415) == bool(content_type)  # says it has one; has none


@pytest.mark.parametrize(
    ("coding", "refused"),
    [("gzip", True), ("GZIP, gzip", True), ("br", True), ("x", True), ("Identity", False), ("", False)],
)
def test_bodies_are_not_compressed(engine: FakeEngine, coding: str, refused: bool) -> None:
    """A server that read them would have to bound what they become."""
    app, headers = make(engine), {"content_type": "application/json", "content_encoding": coding}
    for method, path in every_route(app):
        if method == "POST" and path not in OPEN_PATHS:
            answer = call(app, path, method, b"{}", **headers)
            assert (answer.status == 415) == refused, path
            assert not refused or "Content-Encoding" in answer.error["message"]


def test_unknown_paths_and_methods_are_answered_in_openais_form(engine: FakeEngine) -> None:
    app = make(engine)
    answer = call(app, "/chat/completions", "POST", b"{}", content_type="application/json")
    assert answer.status == 404 and "Did you mean /v1/chat/completions?" in answer.error["message"]
    assert "Did you mean" in call(app, "/v1/completion").error["message"]
    assert "Did you mean" not in call(app, "/v1/nope").error["message"]
    for path in ("/v1", "/health/", "/%00", "/" + "x" * 10_000):
        assert call(app, path).status == 404 and call(app, path).error["type"] == "invalid_request_error", path
    for method, path in every_route(app):
        answer = call(app, path, "PATCH")
        assert answer.status == 405 and method in answer.headers["allow"]
        assert answer.error["code"] in ("method_not_allowed", ANTHROPIC)
        assert call(app, path, "PUT", b"{}").status == 405  # also when the body is no JSON
    assert call(app, "/nowhere", "POST", b"{}").status == 404


def test_head_of_every_get(engine: FakeEngine) -> None:
    app = make(engine)
    for method, path in every_route(app):
        if method == "HEAD" and path in ALWAYS:
            assert call(app, path, "HEAD").status == 200, path


def test_pages_of_allowed_origins_only(engine: FakeEngine) -> None:
    preflight = {
        "origin": "https://a.example",
        "access_control_request_method": "POST",
        "access_control_request_headers": "authorization, content-type",
    }
    closed = call(make(engine), "/v1/completions", "OPTIONS", **preflight)
    assert closed.status == 405 and "access-control-allow-origin" not in closed.headers
    app = make(
        engine,
        ServerConfig(http=HttpConfig(allowed_origins=("https://a.example",)), access=AccessConfig(api_key=(SECRET,))),
    )
    opened = call(app, "/v1/completions", "OPTIONS", **preflight)
    assert opened.status == 200 and opened.headers["access-control-allow-origin"] == "https://a.example"
    assert "authorization" in opened.headers["access-control-allow-headers"].lower()
    assert call(app, "/v1/completions", "OPTIONS", **(preflight | {"origin": "https://b.example"})).status == 400
    refused = call(app, "/version", origin="https://a.example")
    assert refused.status == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"


# --- names of this machine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "localhost.",
        "127.0.0.1:8000",
        "127.1.2.3",
        "[::1]:8",
        "10.0.0.7",
        "[fe80::1]",
        "llm.localhost",
        "a.b.LOCALHOST:8000",
    ],
)
def test_a_keyless_server_answers_to_localhost_and_addresses(engine: FakeEngine, host: str) -> None:
    assert call(make(engine), "/version", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "[::1]evil.example",
        "127.0.0.1.evil.example",
        "localhost:80@evil.example",
        "",
        "[]",
        "::1:x",
        "evillocalhost",
        ".evil.example",
    ],
)
def test_a_keyless_server_does_not_answer_to_foreign_names(engine: FakeEngine, host: str) -> None:
    """A page whose name leads to this machine must not read what is answered here."""
    app = make(engine)
    for method, path in [*every_route(app), ("OPTIONS", "/v1/models"), ("GET", "/health/")]:
        answer = call(app, path, method, host=host)
        assert answer.status == (200 if path in OPEN_PATHS else 403), path
    assert answer.error["code"] == "foreign_host"
    assert "--allowed-hosts" in answer.error["message"] and "--api-key" in answer.error["message"]


def test_a_keyless_server_answers_to_the_names_that_it_is_given(engine: FakeEngine) -> None:
    app = make(engine, ServerConfig(http=HttpConfig(allowed_hosts=("Host.Docker.Internal.", "llm_1"))))
    for host in ("host.docker.internal:8000", "HOST.docker.internal", "llm_1.", "localhost", "a.localhost", "[::1]:8"):
        assert call(app, "/version", host=host).status == 200, host
    for host in ("docker.internal", "x.host.docker.internal", "evil.example", "*", ""):
        assert call(app, "/version", host=host).status == 403, host
    everywhere = make(engine, ServerConfig(http=HttpConfig(allowed_hosts=("llm", "*"))))
    assert call(everywhere, "/version", host="evil.example").status == 200


def test_a_request_without_a_host_names_nobody(engine: FakeEngine) -> None:
    assert call(make(engine), "/version").status == 200


@pytest.mark.parametrize("changes", [{"api_key": (SECRET,)}, {"host": "0.0.0.0"}, {"uds": "/s"}, {"host": "10.0.0.7"}])
def test_where_names_are_not_looked_at(engine: FakeEngine, changes: dict[str, Any]) -> None:
    app = make(engine, ServerConfig.from_flat(**changes))
    assert call(app, "/version", host="llm.example", x_api_key=SECRET).status == 200


# --- ids, counts, logs, faults ----------------------------------------------------------------------------------------


def test_every_answer_has_a_request_id(engine: FakeEngine) -> None:
    app = make(engine, LOCKED)
    for path in ("/health", "/version", "/nowhere"):
        assert len(call(app, path).headers["x-request-id"]) == 32
        assert call(app, path, x_request_id="abc-1").headers["x-request-id"] == "abc-1"
        for harmful in ("a b", "x" * 129, "\xe9", ""):
            assert call(app, path, x_request_id=harmful).headers["x-request-id"] != harmful


class Counting(Metrics):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, str]] = []

    def http(self, route: str, status: int, method: str = "POST") -> None:
        self.seen.append((route, status, method))


def test_answers_are_counted_by_route_never_by_path(engine: FakeEngine) -> None:
    metrics = Counting()
    app = make(engine, metrics=metrics)
    for path in ("/health", "/nowhere/42", "/v1/models/a/b"):
        call(app, path)
    assert metrics.seen == [("/health", 200, "GET"), ("other", 404, "GET"), ("/v1/models/{model:path}", 404, "GET")]


def with_route(app: Any, endpoint: Any) -> Any:
    app.router.routes.append(Route("/fault", endpoint))
    return app


def test_an_unexpected_fault_is_logged_once_and_not_shown(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    async def fault(request: Request) -> Response:
        raise ZeroDivisionError("the inside of the server")

    with caplog.at_level(logging.DEBUG):
        answer = call(with_route(make(engine), fault), "/fault", x_request_id="r-1")
    assert answer.status == 500 and answer.headers["x-should-retry"] == "false"
    assert answer.error["type"] == "server_error" and "r-1" in answer.error["message"]
    assert "inside" not in answer.body.decode() and "Traceback" not in answer.body.decode()
    records = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(records) == 1 and records[0].exc_info and "r-1" in records[0].message


def test_an_error_of_ours_gets_its_status(engine: FakeEngine) -> None:
    async def full(request: Request) -> Response:
        raise QueueFull("the queue is full.")

    answer = call(with_route(make(engine), full), "/fault")
    assert answer.status == 429 and answer.error["type"] == "rate_limit_error" and "retry-after" in answer.headers


def test_access_log(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    call(make(engine), "/health")
    assert capsys.readouterr().err == ""
    app = make(engine, ServerConfig(log=LogConfig(access_log=True, disable_access_log_for_endpoints="/ready, /health")))
    call(app, "/health")
    call(app, "/he\nalth", x_request_id="r-2")
    assert re.fullmatch(r"127\.0\.0\.1:1 GET /he\\nalth 404 0\.\d{3}s r-2\n", capsys.readouterr().err)


def test_a_proxy_may_or_may_not_take_the_root_away(engine: FakeEngine) -> None:
    app = make(engine, ServerConfig(http=HttpConfig(root_path="/api"), access=AccessConfig(api_key=(SECRET,))))
    for path in ("/health", "/api/health"):
        assert call(app, path).status == 200
    for path in ("/version", "/api/version", "/api/api/health", "/apihealth"):
        assert call(app, path).status == 401
        assert call(app, path, x_api_key=SECRET).status == (200 if path.endswith("/version") else 404)


# --- describing itself ------------------------------------------------------------------------------------------------


def test_version_shows_every_choice(engine: FakeEngine) -> None:
    shown = call(make(engine), "/version").json()
    assert shown["dtype"] == "float32" and shown["plans"] == {"attention": "cpu (the only one)"}


def test_openapi_describes_every_route(engine: FakeEngine) -> None:
    app = make(engine, LOCKED)
    document = call(app, "/openapi.json", x_api_key=SECRET).json()
    for method, path in every_route(app):
        path = path.replace("/v1/models/x", "/v1/models/{model}")
        path = path.replace("/responses/x", "/responses/{response_id}").replace("/requests/x", "/requests/{request_id}")
        if method != "HEAD":
            operation = document["paths"][path][method.lower()]
            assert ("security" in operation) == (path not in OPEN_PATHS)
            assert ("requestBody" in operation) == (
                method == "POST" and path not in ("/ping", "/v1/responses/{response_id}/cancel")
            )
            streams = path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
            streamed = path == "/debug/live" or (streams and method == "POST")
            assert ("text/event-stream" in operation["responses"]["200"]["content"]) == streamed
    body = document["paths"]["/v1/messages"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["max_tokens"]  # which counting tokens, with the same type, can do without
    text = str(document)
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in document["components"]["schemas"]
    prompt = document["components"]["schemas"]["CompletionRequest"]
    assert prompt["required"] == ["prompt"]


def test_metrics_are_served(engine: FakeEngine) -> None:
    answer = call(make(engine), "/metrics")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain")


# --- what other servers have ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/embeddings",
        "/v1/messages/batches",
        "/classify",
        "/v1/moderations",
        "/v1/files",
        "/v1/audio/transcriptions",
        "/v1/images/generations",
        "/v1/batches",
        "/v1/fine_tuning/jobs",
    ],
)
def test_a_route_that_others_have_is_not_implemented_yet(engine: FakeEngine, path: str) -> None:
    for method, kind in (("POST", "multipart/form-data; boundary=x"), ("POST", "application/json"), ("GET", "")):
        answer = call(make(engine), path, method, content_type=kind)
        assert answer.status == 404 and answer.error["code"] in ("not_implemented", ANTHROPIC)
        assert answer.error["message"].startswith(f"{path!r} is not implemented yet: ")
        assert "Did you mean" not in answer.error["message"]


def test_a_name_that_begins_like_one_of_theirs_is_another(engine: FakeEngine) -> None:
    assert call(make(engine), "/v1/audiox").error["code"] == "unknown_path"


class Routes(Metrics):
    """Keeps the routes that answers are counted under."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def http(self, route: str, status: int, method: str = "POST") -> None:
        self.seen.append((route, status))


def test_an_answer_before_the_router_is_counted_under_its_route(engine: FakeEngine) -> None:
    metrics, engine.state = Routes(), EngineState.STARTING
    app = make(engine, metrics=metrics)
    call(app, "/v1/completions", "POST", content_type="application/json")
    call(app, "/nowhere", "POST", content_type="application/json")
    engine.state = EngineState.READY
    call(app, "/v1/completions", "POST", content_type="text/plain")
    assert metrics.seen == [("/v1/completions", 503), ("other", 503), ("/v1/completions", 415)]
