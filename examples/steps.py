"""The engine core step by step, without a model: its plans, printed.

    python examples/steps.py SCENE

Scheduler, KV blocks and prefix cache are those of a server; `MockExecutor` makes up the tokens. A KV block has four
tokens here, so that a few short requests fill the cache. Scenes:

    batch    requests enter and leave between two steps
    chunks   a long prompt beside a running decode
    blocks   two requests need more KV blocks than there are
    prefix   prompts that share a beginning, or nearly
    drafts   decodes with guessed tokens (speculative decoding)
    order    requests with priorities

A line of a step names each request with its work:

    step 3: A decodes 1 (5 tokens in 2 blocks); B prefills 4 of 9 (4 tokens in 3 blocks); 59 of 64 blocks free
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.output import StepOutputs
from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.engine.core import EngineCore
from quire.engine.mock_core import build_mock_core
from quire.engine.plan_writer import InFlight

BLOCK = 4  # tokens of a KV block
LONG = range(100, 124)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request of a scene. at: number of the step before which it comes."""

    name: str
    prompt: Sequence[int]
    tokens: int
    at: int = 0
    priority: int = 0
    salt: str = ""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Requests, and the options of their engine, see `EngineConfig.from_flat`."""

    requests: tuple[Asked, ...]
    options: dict[str, Any]


SCENES = {
    "batch": Scene(
        requests=(
            Asked(name="A", prompt=range(3), tokens=5),
            Asked(name="B", prompt=range(10, 16), tokens=2, at=1),
            Asked(name="C", prompt=range(20, 22), tokens=2, at=2),
        ),
        options={},
    ),
    "chunks": Scene(
        requests=(Asked(name="A", prompt=range(3), tokens=6), Asked(name="B", prompt=LONG, tokens=2, at=1)),
        options={"max_num_batched_tokens": 9, "max_num_seqs": 2},
    ),
    "blocks": Scene(
        requests=(
            Asked(name="A", prompt=range(8), tokens=9),
            Asked(name="B", prompt=range(20, 28), tokens=8),
        ),
        options={"num_gpu_blocks_override": 6},
    ),
    "prefix": Scene(
        requests=(
            Asked(name="first", prompt=range(17), tokens=1),
            Asked(name="same", prompt=range(17), tokens=1, at=1),
            Asked(name="one block", prompt=(0, 1, 2, 3, *range(50, 63)), tokens=1, at=2),
            Asked(name="other start", prompt=(9, *range(16)), tokens=1, at=3),
            Asked(name="salted", prompt=range(17), tokens=1, at=4, salt="s-7"),
            Asked(name="whole blocks", prompt=range(16), tokens=1, at=5),
        ),
        options={},
    ),
    "drafts": Scene(
        requests=(Asked(name="A", prompt=range(3), tokens=9),),
        options={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ),
    "order": Scene(
        requests=(
            Asked(name="A", prompt=range(4), tokens=3),
            Asked(name="B", prompt=range(4), tokens=1, at=1, priority=5),
            Asked(name="C", prompt=range(4), tokens=1, at=1, priority=1),
        ),
        options={"max_num_seqs": 1, "scheduling_policy": "priority"},
    ),
}


def main(*words: str) -> None:
    """Run the scene that is named."""
    if len(words) != 1 or words[0] not in SCENES:
        sys.exit(f"give one scene: {', '.join(SCENES)}")
    scene = SCENES[words[0]]
    plain = {"num_gpu_blocks_override": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": BLOCK}
    config = EngineConfig.from_flat(model=str(bundled_model()), **plain | scene.options)
    core = build_mock_core(config, bundled_model())
    names = {handle: one.name for handle, one in enumerate(scene.requests)}
    step = 0
    while core.has_work or any(one.at >= step for one in scene.requests):
        for handle, one in enumerate(scene.requests):
            if one.at == step:
                core.add(request(handle, one))
                print(f"        {one.name} comes: {len(one.prompt)} tokens, {one.tokens} to make")
        planned = core.begin_step()
        if planned is not None:
            print(f"step {step}: {'; '.join(work(core, planned, names))}; {free(core)}")
            core.submit(planned)
        for line in news(core.confirm() if core.in_flight else core.state(), names):
            print(f"        {line}")
        step += 1


def request(handle: int, one: Asked) -> NewRequest:
    """Return the request as the core gets it: token ids, and no default left open."""
    return NewRequest(
        handle=handle,
        request_id=one.name,
        token_ids=array("I", one.prompt).tobytes(),
        max_tokens=one.tokens,
        sampler=SamplerSpec(seed=handle, num_prompt=len(one.prompt)),
        priority=one.priority,
        cache_salt=one.salt,
    )


def work(core: EngineCore, planned: InFlight, names: dict[int, str]) -> list[str]:
    """Return the work of each slot of a plan, in the plan's order: decodes, then chunks of prompts."""
    plan, told = planned.plan, list[str]()
    for place, (slot, count) in enumerate(zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True)):
        running = core.scheduler.table.requests[slot]
        assert running is not None
        blocks = int(core.scheduler.allocator.capacity[slot]) // BLOCK
        before = int(core.scheduler.table.planned[slot]) - count
        held = f"({before} tokens in {blocks} block{'s' * (blocks != 1)})"
        if place < plan.num_decodes:
            told.append(f"{names[running.new.handle]} decodes {count} {held}")
        else:
            told.append(f"{names[running.new.handle]} prefills {count} of {len(running.tokens)} {held}")
    return told


def free(core: EngineCore) -> str:
    """Return the number of free KV blocks, in words."""
    return f"{core.scheduler.allocator.pool.num_free} of {core.facts.num_blocks} blocks free"


def news(outputs: StepOutputs, names: dict[int, str]) -> list[str]:
    """Return the preempted and finished requests of a step, and what the prefix cache had for new ones."""
    told = [f"{names[handle]} is preempted: its blocks go to others" for handle in outputs.preempted]
    for handle, cached in outputs.cached.items():
        if cached:
            told.append(f"{names[handle]} reuses {cached} tokens of the prefix cache")
    told += [f"{names[handle]} misses {report}" for handle, report in outputs.prefixes.items()]
    accepted = dict[int, int]()
    for handle in outputs.handles.tolist():
        accepted[handle] = accepted.get(handle, 0) + 1
    told += [f"{names[handle]} gets {count} tokens at once" for handle, count in accepted.items() if count > 1]
    return told + [f"{names[one.handle]} ends: {one.reason}" for one in outputs.finished]


if __name__ == "__main__":
    main(*sys.argv[1:])
