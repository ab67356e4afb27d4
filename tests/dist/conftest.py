"""Engines whose ranks are processes over gloo. No test asserts a time; limits are ten times the expected or more."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams

from ..support.many_ranks import SMALL, Left, nothing_left
from ..support.template_process import SWITCH, quick_starts
from ..support.tiny_models import Tiny, make_oracle, mixed_prompts

NUM_TOKENS = 32  # most tokens of an answer that is compared
GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "" if GLOO else "this PyTorch has no gloo"
    reason = reason or ("" if sys.platform == "linux" else "what is left is counted in /proc")
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks share the cores, and begin with torch imported: those of some tests start as real ones do (`real`).

    Not for a session, in which tests of other folders follow in the same process.
    """
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with quick_starts():
        yield


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks and servers of this test as the product does, not as copies of a template."""
    monkeypatch.setenv(SWITCH, "0")


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Left]:
    """The processes and temporary files of this test, of which none may be left."""
    with nothing_left(tmp_path / "tmp") as found:
        yield found


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tiny], Path]:
    """The folder of a tiny model, in which no greedy choice is close."""
    return cache(lambda spec: make_oracle(spec, mixed_prompts(), tmp_path_factory.mktemp, steps=NUM_TOKENS).folder)


@pytest.fixture(scope="session")
def checkpoint(folder_of: Callable[[Tiny], Path]) -> Callable[[str], Path]:
    """The folder of a tiny model of a family."""
    return lambda family: folder_of(Tiny(family=family))


def make_engine(folder: Path | str = "", **options: Any) -> LLM:
    """An engine of a folder's model, or of the bundled one with its tokenizer."""
    defaults = SMALL | {"max_num_seqs": 16, "max_model_len": 256, "kv_cache_memory_bytes": 16 << 20}
    if folder:
        defaults["skip_tokenizer_init"] = True
    if "num_gpu_blocks_override" in options:
        del defaults["kv_cache_memory_bytes"]
    return LLM(str(folder), **(defaults | options))


@pytest.fixture
def engine(left: Left) -> Iterator[Callable[..., LLM]]:
    """Makes engines; at the end none may hold anything."""
    made: list[LLM] = []

    def make(folder: Path | str = "", **options: Any) -> LLM:
        made.append(make_engine(folder, **options))
        return made[-1]

    yield make
    for llm in made:
        assert not llm.engine.core.has_work
        llm.engine.core.check()
        llm.close()


Asked = list[tuple[Any, SamplingParams]]


@pytest.fixture(scope="session")
def truth() -> Callable[..., list[RequestOutput]]:
    """The answers of one rank, `truth(asked, folder, **options)`: computed once for all engines that compare."""
    found: dict[str, list[RequestOutput]] = {}

    def answers(asked: Asked, folder: Path | str = "", **options: Any) -> list[RequestOutput]:
        key = repr((asked, str(folder), sorted(options.items())))
        if key not in found:
            with make_engine(folder, **options) as llm:
                found[key] = llm.generate(*map(list, zip(*asked, strict=True)), use_tqdm=False)
        return found[key]

    return answers
