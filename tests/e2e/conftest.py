"""Engines on tiny random checkpoints with transformers' answers for them, and on the bundled model."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams

from ..support.template_process import quick_starts
from ..support.tiny_models import Oracle, Recorder, Tiny, make_oracle, mixed_prompts
from .adapters import Merged


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models this small are fastest on one thread, and then a busy machine cannot stall them at barriers."""
    torch.set_num_threads(1)


def spare_known_objects() -> None:
    """Keep all objects of now out of later collections. `LLM.close` collects, which takes longer than a tiny engine's
    whole run with the modules of transformers to look through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def spared() -> None:
    """Spare the objects of imported modules, and of fixtures that outlive a module."""
    spare_known_objects()


@pytest.fixture(scope="module", autouse=True)
def copies() -> Iterator[None]:
    """Start cores and ranks of engines as copies of a process that has imported torch, as those of servers are."""
    with quick_starts():
        yield


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    """The description of a checkpoint, for `oracle`."""
    return Tiny


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Seven prompts of mixed lengths."""
    return mixed_prompts()


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> Callable[..., Oracle]:
    """Makes the checkpoint of a `tiny`; seeds are resampled until every greedy choice of so many steps is clear."""
    made: dict[tuple[Tiny, int], Oracle] = {}

    def make(spec: Tiny | None = None, steps: int = 64) -> Oracle:
        key = spec or Tiny(), steps
        if key not in made:
            made[key] = make_oracle(key[0], prompts, tmp_path_factory.mktemp, steps=steps)
            spare_known_objects()
        return made[key]

    return make


@pytest.fixture(scope="session")
def record() -> Callable[[LLM], Recorder]:
    """Wraps the executor of an LLM in a `Recorder`."""

    def wrap(llm: LLM) -> Recorder:
        core = llm.engine.core
        core.executor = recorder = Recorder(core.executor)
        return recorder

    return wrap


@pytest.fixture
def engine() -> Iterator[Callable[..., LLM]]:
    """Makes float32 engines without a tokenizer for `tiny` checkpoints; at the end none may hold anything."""
    made: list[LLM] = []

    def make(folder: Path, **options: Any) -> LLM:
        defaults: dict[str, Any] = dict(
            dtype="float32",
            num_threads=1,
            skip_tokenizer_init=True,
            max_num_seqs=7,
            use_tqdm_on_load=False,
            kv_cache_memory_bytes=1 << 22,
        )
        if "num_gpu_blocks_override" in options:
            defaults["kv_cache_memory_bytes"] = None
        made.append(LLM(str(folder), **(defaults | options)))
        return made[-1]

    yield make
    for llm in made:
        try:
            core = llm.engine.core
        except Exception:
            continue  # closed by the test
        assert not core.has_work
        core.check()
        llm.close()


@pytest.fixture(scope="session")
def talker_options() -> dict[str, Any]:
    """Options for engines on the bundled model: float32, one thread, a small cache."""
    return dict(
        dtype="float32", num_threads=1, use_tqdm_on_load=False, max_model_len=1024, kv_cache_memory_bytes=48 << 20
    )


@pytest.fixture(scope="session")
def talker_model(talker_options: dict[str, Any]) -> Iterator[LLM]:
    """Engine on the bundled model for all tests of a run; use `talker`, which checks it."""
    with LLM(**talker_options, max_num_seqs=16, max_logprobs=-1) as llm:
        yield llm


@pytest.fixture
def talker(talker_model: LLM) -> Iterator[LLM]:
    """The bundled model with an empty prefix cache; afterwards nothing may be held."""
    talker_model.reset_prefix_cache()
    yield talker_model
    assert not talker_model.engine.core.has_work
    talker_model.engine.core.check()


@pytest.fixture(scope="session")
def greedy() -> Callable[..., SamplingParams]:
    """Greedy parameters that run to `max_tokens`."""

    def make(max_tokens: int, **fields: Any) -> SamplingParams:
        return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | fields))

    return make


@pytest.fixture
def merged(tiny: Any, oracle: Any, tmp_path: Path) -> Callable[..., Merged]:
    """Makes adapters for a family's checkpoint."""

    def make(family: str = "qwen3", count: int = 3, **more: Any) -> Merged:
        return Merged(oracle(tiny(family=family, **more.pop("spec", {}))).folder, tmp_path, count, **more)

    return make
