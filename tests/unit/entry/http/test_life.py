"""Routes about the life of an engine: there with the option that allows them, and operations of the core in order."""

import json
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.life import LifeConfig, check_life
from quire.config.serve import ServerConfig
from quire.contracts.errors import ConfigError, EngineError
from quire.entry.http.app import build_app
from quire.entry.http.life.routes import OFF, SLEEP_ROUTES, WEIGHT_ROUTES
from quire.entry.http.life.state import EngineState
from quire.observe.metrics import Metrics
from quire.procs.front_ends import FrontPlace

from .conftest import FakeEngine, call


class Living(FakeEngine):
    """An engine that notes operations, and answers as told."""

    def __init__(self, *answers: Any) -> None:
        super().__init__()
        self.answers, self.asked = list(answers), list[tuple[str, Any]]()

    async def control(self, name: str, /, **args: Any) -> Any:
        self.asked.append((name, next(iter(args.values()), None)))
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        return answer


def make(engine: Any, **options: Any) -> Any:
    return build_app(engine, ServerConfig(engine=EngineConfig.from_flat(**options)), Metrics())


SLEEPS = {"enable_sleep_mode": True}
UPDATES = {"weight_transfer_config": {"backend": "files"}}


def test_routes_that_no_option_allows_say_which_one_would() -> None:
    every = {path: method for method, path, _ in SLEEP_ROUTES + WEIGHT_ROUTES}
    assert every.keys() | {"/collective_rpc"} == OFF.keys()
    for options, there in (({}, set()), (SLEEPS, {"/sleep", "/wake_up", "/is_sleeping"}), (SLEEPS | UPDATES, {*every})):
        app = make(Living(), **options)
        for path in OFF:
            answer = call(app, path, every.get(path, "POST"))
            assert (answer.status == 404) == (path not in there), (path, answer.body)
            assert path in there or answer.error["code"] == "not_allowed"
    assert "start the server with --enable-sleep-mode" in call(make(Living()), "/sleep", "POST").error["message"]


@pytest.mark.parametrize(
    ("path", "body", "answers", "asked", "told"),
    [
        (
            "/pause?mode=wait",
            None,
            (False, False, True),
            [("pause", "wait"), ("settled", None), ("settled", None)],
            {"status": "paused"},
        ),
        ("/pause", None, (True,), [("pause", "abort")], {"status": "paused"}),
        (
            "/sleep?level=2&mode=keep",
            None,
            (False, True, True),
            [("is_sleeping", None), ("quiet", "keep"), ("sleep", 2)],
            {"status": "asleep", "level": 2},
        ),
        (
            "/wake_up?tags=weights,kv_cache",
            None,
            (True, False),
            [("wake_up", ["weights", "kv_cache"]), ("is_sleeping", None)],
            {"status": "awake"},
        ),
        ("/wake_up", None, (True, False), [("wake_up", None), ("is_sleeping", None)], {"status": "awake"}),
        (
            "/start_weight_update",
            {"is_checkpoint_format": True},
            (),
            [("start_weights", None)],
            {"message": "Weight update started"},
        ),
        (
            "/update_weights",
            {"update_info": {"path": "x"}},
            (),
            [("update_weights", {"path": "x"})],
            {"message": "Weights updated"},
        ),
        ("/finish_weight_update", None, (), [("finish_weights", None)], {"message": "Weight update finished"}),
    ],
)
def test_operations_in_order(path: str, body: Any, answers: Any, asked: Any, told: Any) -> None:
    engine = Living(*answers)
    sent = b"" if body is None else json.dumps(body).encode()
    answer = call(make(engine, **SLEEPS, **UPDATES), path, "POST", sent, content_type="application/json")
    assert (answer.status, answer.json(), engine.asked) == (200, told, asked)


def test_an_engine_that_died_asleep_is_started_again_by_wake_up(tmp_path: Any) -> None:
    engine = Living(False, True, True)
    engine.config, engine.place = EngineConfig.from_flat(**SLEEPS, restart=1), FrontPlace(folder=str(tmp_path))
    app = make(engine, **SLEEPS)
    assert call(app, "/sleep", "POST").status == 200
    engine.state, engine.loss = EngineState.RESTARTING, "it was killed."
    assert call(app, "/is_sleeping").json() == {"is_sleeping": True}
    assert "it was killed. POST /wake_up starts it again." in call(app, "/health").json()["reason"]
    assert call(app, "/v1/completions", "POST", b"{}", content_type="application/json").status == 503

    async def come(seconds: float) -> None:
        engine.state = EngineState.READY

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("quire.entry.http.life.asleep.asyncio.sleep", come)
        assert call(app, "/wake_up", "POST").json() == {"status": "awake"}
    assert not list(tmp_path.iterdir()) and [name for name, _ in engine.asked] == ["is_sleeping", "quiet", "sleep"]


def test_what_cannot_be_done_is_told_and_nothing_else_is_asked() -> None:
    engine = Living(EngineError("no tensor has come."))
    app = make(engine, **SLEEPS, **UPDATES)
    refused = call(app, "/finish_weight_update", "POST")
    assert (refused.status, refused.error["message"]) == (400, "no tensor has come.")
    for path, body in (
        ("/sleep?level=0", b""),
        ("/start_weight_update", b'{"is_checkpoint_format": false}'),
        ("/update_weights", b"[]"),
        ("/update_weights", b"{}"),
    ):
        assert call(app, path, "POST", body, content_type="application/json").status == 400, path
    assert len(engine.asked) == 1


def test_ways_of_weights_that_do_not_exist() -> None:
    for config, words in (
        ({"backend": "nccl"}, "use gloo"),
        ({"backend": "post"}, "use files or gloo"),
        ({"port": 1}, "'port' is not known"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_life(LifeConfig(weight_transfer_config=config))
    assert LifeConfig(weight_transfer_config={}).backend == "files" and not LifeConfig().backend
