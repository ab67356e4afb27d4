"""The plan that is printed is the one that runs: the engine's own value, its server's, and the functions it calls."""

import functools
import importlib
import json
import re
import shutil
import urllib.error
import urllib.request
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import ANY

import pytest

from quire.assemble.engine import Engine, assemble
from quire.config.engine import EngineConfig
from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.explain.describe import plan_engine

from ...e2e.in_process import running_inside
from ...support.full import FULL
from ...support.tiny_models import FAMILIES, Tiny, random_model, write_model

NUMBERS = (("float32", None), ("bfloat16", None), ("float32", "fp8"))  # type of the computation, option quantization
ROWS = [  # every family once, and all numbers of a dense one and of one with latents and experts
    (family, *numbers)
    for i, family in enumerate(FAMILIES)
    for j, numbers in enumerate(NUMBERS)
    if FULL or i % len(NUMBERS) == j or family in ("qwen3", "deepseek_v3")
]
QUESTIONS = (".missing", ".rows_only")  # functions that compute nothing
ROOM = (".empty", ".destination")  # functions that pack nothing
STACKED = ("mlp.experts.down",)  # packed together with another
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @functools.cache
    def made(family: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(family)
        write_model(random_model(Tiny(family=family, tied=family == "qwen3"), 0), folder, family)
        return folder

    return made


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.from_flat(model=str(folder), device="cpu", skip_tokenizer_init=True, max_num_seqs=2, **options)


def plain(value: object) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(value))


@pytest.fixture
def engines() -> Iterator[Callable[[EngineConfig], Engine]]:
    made: list[Engine] = []

    def make(config: EngineConfig) -> Engine:
        made.append(assemble(config))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize(("family", "dtype", "quantization"), ROWS)
def test_the_engine_runs_what_is_explained(
    folders: Folders, engines: Any, family: str, dtype: str, quantization: str | None
) -> None:
    asked = config(folders(family), dtype=dtype, quantization=quantization)
    described = plain(plan_engine(asked).describe())
    engine = engines(asked)
    assert json.loads(engine.core.facts.plans["engine"]) == described
    assert list(engine.phases) == list(described["phases"])
    assert described["model"]["bytes"] == engine.weight_bytes
    assert described["memory"]["num_blocks"] == engine.core.facts.num_blocks > 0


def happens(when: str, rows: int) -> bool:
    """Return True if a call with this condition is made in a step with a prompt of so many tokens."""
    clauses = re.findall(r"(up to|more than) (\d+) (?:query )?tokens", when)
    true = [(rows <= int(most)) == (than == "up to") for than, most in clauses]
    return any(true) if ", or " in when else all(true)


@pytest.mark.parametrize(("family", "dtype", "quantization"), ROWS)
def test_the_functions_that_are_named_are_called(
    folders: Folders, engines: Any, family: str, dtype: str, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading packs with the functions that are named; one step over a prompt calls each as often as the plan says, and
    no others."""
    asked = config(folders(family), dtype=dtype, quantization=quantization)
    plan = plan_engine(asked).describe()
    for layer in plan["layers"][1:-1]:  # what is read is what there is
        names = {one["name"].split(".", 2)[-1] for one in layer["weights"]}
        assert names == {name for call in layer["calls"] for name in call["parameters"]}
    counts = count_calls(monkeypatch, plan)
    engine = engines(asked)
    packed = Counter[str]()
    for one in (one for layer in plan["layers"] for one in layer["weights"]):
        if one["pack"] and not one["name"].endswith(STACKED):
            packed[one["pack"]] += max(1, one["experts"])
    assert Counter({name: count for name, count in counts.items() if not name.endswith(ROOM)}) == packed
    for rows in (20, 40):  # more than are recorded; few and many for a latent
        counts.clear()
        step(engine, rows)
        named = [call for layer in plan["layers"] for call in layer["calls"] if call["function"].startswith("quire.")]
        named = [call for call in named if happens(call["when"], rows)]
        assert counts == Counter(call["function"] for call in named)


@pytest.mark.parametrize("options", [{}, {"load_format": "dummy"}, {"load_format": "dummy", "routing": "zipf"}])
def test_what_loads_and_routes_is_named(
    folders: Folders, engines: Any, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(folders("deepseek_v3"), dtype="bfloat16", **options)
    plan, counts, inside = plan_engine(asked).describe(), Counter[str](), list[str]()
    for owner, name in (("assemble.cpu", "load_weights"), ("assemble.cpu", "load_dummy"), ("kernels.routing", "zipf")):
        module = importlib.import_module(f"quire.{owner}")
        function = getattr(module, name)
        monkeypatch.setattr(module, name, counting(function, f"{function.__module__}.{name}", counts, inside))
    engine = engines(asked)
    assert {one["load"] for layer in plan["layers"] for one in layer["weights"]} == set(counts)
    counts.clear()
    step(engine, 20)
    called = [call["function"] for layer in plan["layers"] for call in layer["calls"]]
    assert counts["quire.kernels.routing.zipf"] == called.count("quire.kernels.routing.zipf")
    routers = [one for layer in plan["layers"] for one in layer["weights"] if ".router." in one["name"]]
    drawn = "routing" in options
    assert bool(counts) == drawn and {bool(one["run"]) for one in routers} == {not drawn}
    assert any(call.endswith(".route") for call in called) != drawn
    assert json.loads(engine.core.facts.plans["engine"]) == plain(plan)


def test_what_multiplies_with_the_projection_of_latents_is_named(folders: Folders) -> None:
    """The absorbed form reads it outside of its kernel, the other one inside."""
    calls = plan_engine(config(folders("deepseek_v3"))).describe()["layers"][1]["calls"]
    reads = [call["function"].split(".")[-1] for call in calls if "attention.kv_up.weight" in call["parameters"]]
    assert reads == ["project", "project", "expanded"]


def count_calls(monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any]) -> Counter[str]:
    """Wrap every public function of the modules that were chosen."""
    counts, inside = Counter[str](), list[str]()
    chosen = {f"{choice['op']}.{choice['name']}" for choice in plan["kernels"]}
    chosen |= {f"experts.{one['experts']}" for one in plan["moe"].values()}
    for kernel in chosen | {"linear.ref"}:  # of routers whose scores are exact
        module = importlib.import_module(f"quire.kernels.{kernel}")
        for name, function in vars(module).copy().items():
            if isinstance(function, FunctionType) and function.__module__.startswith("quire.") and name[0] != "_":
                monkeypatch.setattr(module, name, counting(function, f"{module.__name__}.{name}", counts, inside))
    return counts


def counting(function: Any, name: str, counts: Counter[str], inside: list[str]) -> Any:
    """Calls from a kernel to another are not counted."""

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if not inside and not name.endswith(QUESTIONS):
            counts[name] += 1
        inside.append(name)
        try:
            return function(*args, **kwargs)
        finally:
            inside.pop()

    return counted


def step(engine: Engine, rows: int) -> None:
    """A prompt, and its one token."""
    core = engine.core
    prompt = array("I", range(rows, 2 * rows)).tobytes()
    core.add(
        NewRequest(
            handle=rows,
            request_id="r",
            token_ids=prompt,
            max_tokens=1,
            sampler=SamplerSpec(temperature=0.0, seed=0, num_prompt=rows),
        )
    )
    while core.has_work:
        core.step()


def test_the_server_shows_the_plan_to_who_has_the_key(folders: Folders) -> None:
    folder = folders("deepseek_v3")
    described = plain(plan_engine(config(folder)).describe())
    options = {"model": str(folder), "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 2}
    with running_inside(**options, api_key=("secret",)) as inside:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(inside.server.url)
        found = ask(inside.server.url, authorization="Bearer secret")
        runner = found.pop("runner")
        assert found == described and runner["recordings"] == 0
        (why,) = runner["not recorded"].values()
        assert "PyTorch's" in why and any("recorder: none" in part for part in runner["parts"])
    with running_inside() as inside:  # no model
        assert ask(inside.server.url) is None


def test_the_server_s_plan_does_not_need_its_files_again(folders: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders("qwen3"), folder)
    described = plain(plan_engine(config(folder)).describe())
    options = {"model": str(folder), "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 2}
    with running_inside(**options) as inside:
        shutil.rmtree(folder)
        assert ask(inside.server.url) == described | {"runner": ANY}


def ask(url: str, **headers: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(f"{url}/debug/plan", headers=headers)) as answer:
        return json.load(answer)
