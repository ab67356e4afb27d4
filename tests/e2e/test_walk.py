"""A random walk over sets of features of tiny real engines: each gives the plain engine's tokens, and nothing leaks.

An engine is one of `walked.MODELS` with random features, and answers 30 random requests. 150 engines in the full run.
"""

import gc
import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutput

from ..support.engines import cores_of
from ..support.full import FULL
from ..support.many_ranks import until
from .walked import BASE, MODELS, Asked, Case, differs, features

REQUESTS = 30
CI_ENGINES = [("qwen3_next+mtp", 11)]  # recurrent layers, experts, drafts of a layer, adapters, tiers; of one rank


def ask(llm: LLM, case: Case, options: dict[str, Any], asked: list[Asked], rng: random.Random) -> list[RequestOutput]:
    """Answer the requests, each with what the engine has: parts that are reused, embeddings, adapters."""
    prompts, params = list[Any](), []
    for one in asked:
        more: dict[str, Any] = {}
        prompt: Any = one.prompt
        if options.get("enable_cache_blend") and one.chunks and not one.embeds:
            more = {"kv_chunks": one.chunks, "blend_ratio": 1.0}
        if options.get("enable_prompt_embeds") and one.embeds:
            prompt = {"prompt_embeds": case.embedding[torch.tensor(one.prompt)]}
        prompts.append(prompt)
        params.append(case.params(one, **more))
    adapters = [case.named[one.adapter] for one in asked] if options.get("enable_lora") else None
    priority = [rng.randint(-1, 1) for _ in asked] if options["scheduling_policy"] == "priority" else None
    return llm.generate(prompts, params, lora_request=adapters, priority=priority, use_tqdm=False)


def resources() -> dict[str, set[str]]:
    """Return what a process holds: children, memory that processes share, open files, by what they are."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    files = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if exists(number)]
    return {"processes": set(children), "shared memory": set(os.listdir("/dev/shm")), "files": set(files)}


def exists(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def serve(case: Case, options: dict[str, Any], rng: random.Random) -> None:
    """Run an engine: requests in two turns, clients that leave between them, and the books of each core at the end."""
    known = [one for one in case.asked if not one.adapter or options.get("enable_lora")]
    with LLM(str(case.folder), **BASE | options) as llm:
        for turn in range(2):
            asked = [rng.choice(known) for _ in range(REQUESTS // 2)]
            for found, one in zip(ask(llm, case, options, asked, rng), asked, strict=True):
                assert one.answer is not None
                assert not (words := differs(found, one.answer)), f"{words}: {one.prompt} {one.params}"
            for one in rng.sample(known, 2 * (1 - turn)):
                with closing(llm.stream(one.prompt, case.params(one, max_tokens=20, n=1))) as stream:
                    next(stream)
        while llm.engine.core.has_work:
            llm.engine.core.step()
        for core in cores_of(llm):
            core.check()
            assert core.scheduler.table.num_free == core.facts.num_slots, "a slot leaked"


def walk(number: int, case: Case, tmp: Path, *, ranks: bool | None = None) -> None:
    """Run the engine of this number, and look for what it left behind."""
    rng, before = random.Random(f"{case.name} {number}"), resources()
    options = features(case, rng, tmp, ranks=ranks)
    try:
        serve(case, options, rng)
        gc.collect()
        for kind, had in before.items():  # other tests, too, have names in /dev/shm for a while
            until(lambda: resources()[kind] <= had, lambda: f"{kind}: {resources()[kind] - had}")  # noqa: B023
        assert not [*tmp.rglob("*.tmp*")], "files that were not finished"
    except Exception as fault:
        fault.add_note(f"{case.name} {number}: {options}")
        raise


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Makes a model, its requests and their answers once."""
    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in made:
            made[name] = Case(name, tmp_path_factory.mktemp("walk"))
        return made[name]

    return make


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name in MODELS for number in range(6)] if FULL else CI_ENGINES
)
def test_random_sets_of_features(name: str, number: int, case: Any, tmp_path: Path) -> None:
    walk(number, case(name), tmp_path, ranks=None if FULL else False)
