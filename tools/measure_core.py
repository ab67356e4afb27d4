"""Microseconds of Python that the engine core takes per step, on the mock executor: no model, no torch.

    python tools/measure_core.py [--steps N] [--json]

What counts for the core is everything between two results: accepting requests, planning, blocks and their hashes,
confirming and finishing, the output records and their encoding for another process. The mock's own time is subtracted.
The front end's part (`RequestOutput` objects without text) is measured apart: it does not run in the core's loop.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import numpy as np

from quire.config.engine import SchedulerConfig
from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.output import StepOutputs
from quire.contracts.request import NewRequest
from quire.contracts.sampling import OutputKind, SamplingParams
from quire.contracts.step import I32, NO_MASKS, SAMPLE, StepPlan, StepResult
from quire.engine.core import EngineCore
from quire.engine.mock_executor import MockExecutor
from quire.entry.cli.table import format_table
from quire.entry.core_request import FrontLimits
from quire.entry.front_end import FrontEnd
from quire.entry.prompts import Prompt
from quire.kv.allocator import KVAllocator
from quire.kv.hashing import namespace_digest
from quire.kv.pool import BlockPool
from quire.procs.wire import encode

BLOCK_SIZE, NUM_PROMPT, NUM_OUTPUTS, NUM_CHURN_OUTPUTS = 16, 64, 512, 64
VOCAB_SIZE, EOS = 151_936, 151_645  # the mock never samples an id as high as this EOS
MAX_STEPS = 400
WARM_UP = 48  # steps before measuring: enough to admit all
ABOUT = """\
Python per step of the engine core, in microseconds. p50 and mean: planning, finishing, blocks and hashes, output
records and their encoding together. Then means: the parts, from a second run with clocks inside; and what runs
elsewhere, the front end's output objects and a plan's encoding for workers in other processes.

"""
BLOCK_WORK = ("match", "can_admit", "admit", "grow", "grow_many", "publish", "free")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measurement: number of running requests, steps in flight, and churn: requests come and go.

    With churn every request has 64 outputs, and a new one is added for each that ends; without, none ends.
    """

    num_running: int
    depth: int
    churn: bool


@dataclass(kw_only=True)
class CoreTimes:
    """Microseconds per step, one entry per measured step. `parts` are means of a second run with clocks inside:
    plan and finish, blocks (the share of both that goes into blocks and hashes), encode.
    """

    case: Case
    core: list[float] = field(default_factory=list)
    front_end: list[float] = field(default_factory=list)
    plan_encoding: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    num_finished: int = 0


CASES = tuple(
    Case(num_running=n, depth=depth, churn=churn) for n in (256, 1) for depth in (1, 2) for churn in (False, True)
)


def measure_core(case: Case, num_steps: int = MAX_STEPS) -> CoreTimes:
    """Time `num_steps` steps; a second run tells the parts apart."""
    assert num_steps <= MAX_STEPS < NUM_OUTPUTS - WARM_UP, "without churn no request may end"
    times = CoreTimes(case=case)
    load = _Load(case, record_plans=True)
    load.warm_up()
    for _ in range(num_steps):
        load.step(times)
    _measure_parts(times, num_steps)
    return times


class _Clock:
    """Collects nanoseconds of wrapped calls."""

    def __init__(self) -> None:
        self.spent = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent += perf_counter_ns() - start

        return timed


class _TimedExecutor(MockExecutor):
    """The mock, with its time kept apart so that it can be subtracted."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.spent = 0
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        start = perf_counter_ns()
        self.plans.append(plan)
        super().submit(plan)
        super().release(plan.step, NO_MASKS)
        self.spent += perf_counter_ns() - start

    def release(self, step: int, masks: I32) -> None:
        pass  # done in submit, where the clock runs

    def _run(self, plan: StepPlan, masks: dict[int, I32]) -> StepResult:
        """Return arbitrary tokens, which cost nothing per request."""
        slots = plan.slots[(plan.outputs & SAMPLE) > 0]
        tokens = (slots * 31 + plan.step) % VOCAB_SIZE
        return StepResult(
            step=plan.step,
            slots=slots,
            tokens=tokens.astype(np.int32)[:, None],
            num_accepted=np.ones(len(slots), np.int32),
        )

    def collect(self) -> StepResult:
        start = perf_counter_ns()
        result = super().collect()
        self.spent += perf_counter_ns() - start
        return result


class _Load:
    """A core with a steady number of running requests. Requests come from a real front end without a tokenizer."""

    def __init__(self, case: Case, *, record_plans: bool = False) -> None:
        self._case = case
        self._random = random.Random(0)
        length = NUM_PROMPT + BLOCK_SIZE + NUM_OUTPUTS
        num_blocks = (case.num_running + 8) * (-(-length // BLOCK_SIZE) + 1)
        config = SchedulerConfig(max_num_seqs=case.num_running)
        self.executor = _TimedExecutor(
            num_slots=case.num_running,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            max_model_len=length,
            depth=case.depth,
        )
        component = KVComponent("k", 8, 128, "bfloat16", 2)
        geometry = KVGeometry(groups=(KVGroup(block_size=BLOCK_SIZE, layers=(0,), components=(component,)),))
        root = namespace_digest(model="bench", revision="", dtype="bfloat16", block_size=BLOCK_SIZE, geometry=geometry)
        allocator = KVAllocator(BlockPool(num_blocks), geometry, num_slots=case.num_running)
        self.core = EngineCore(self.executor, config, allocator, root_key=root)
        limits = FrontLimits(max_model_len=length, vocab_size=VOCAB_SIZE, max_logprobs=20, eos_ids=(EOS,))
        self.front = FrontEnd(None, limits)
        self._num_started = 0
        self._record_plans = record_plans
        for _ in range(case.num_running):
            self.core.add(self.new_request())

    def new_request(self) -> NewRequest:
        """Prompts of 64 to 79 tokens, so that blocks fill up, and with churn requests end, at different steps."""
        offset = self._num_started % BLOCK_SIZE
        prompt = [self._random.randrange(1000, 30_000) for _ in range(NUM_PROMPT + offset)]
        outputs = NUM_OUTPUTS
        if self._case.churn:
            first = self._num_started < self._case.num_running
            outputs = 1 + self._num_started % NUM_CHURN_OUTPUTS if first else NUM_CHURN_OUTPUTS
        params = SamplingParams(max_tokens=outputs, detokenize=False, output_kind=OutputKind.DELTA)
        self._num_started += 1
        return self.front.start(Prompt(token_ids=prompt), params)[1][0]

    def warm_up(self) -> None:
        """Admit everything, then some steps more."""
        for _ in range(WARM_UP):
            for _ in self.core.step().finished:
                self.core.add(self.new_request())

    def step(self, times: CoreTimes) -> StepOutputs:
        """Run a step and append its times. Requests that ended are replaced, which counts, too."""
        executor, core = self.executor, self.core
        executor.plans.clear()
        executor.spent = 0
        start = perf_counter_ns()
        outputs = core.step()
        encode(outputs)
        spent = perf_counter_ns() - start - executor.spent
        times.num_finished += len(outputs.finished)
        start = perf_counter_ns()
        self.front.apply(outputs)
        times.front_end.append((perf_counter_ns() - start) / 1000)
        for _ in outputs.finished:
            request = self.new_request()
            start = perf_counter_ns()
            core.add(request)
            spent += perf_counter_ns() - start
        times.core.append(spent / 1000)
        if self._record_plans and executor.plans:
            start = perf_counter_ns()
            encode(executor.plans[0])
            times.plan_encoding.append((perf_counter_ns() - start) / 1000)
        return outputs


def _measure_parts(times: CoreTimes, num_steps: int) -> None:
    """The mean of each part, from a run of its own: the clocks inside cost time themselves."""
    load = _Load(times.case)
    clocks = {name: _Clock() for name in ("plan", "finish", "blocks")}
    scheduler, finisher = load.core.scheduler, load.core._finisher
    vars(scheduler)["plan"] = clocks["plan"].wrap(scheduler.plan)
    vars(finisher)["apply"] = clocks["finish"].wrap(finisher.apply)
    for name in BLOCK_WORK:
        vars(scheduler.allocator)[name] = clocks["blocks"].wrap(getattr(scheduler.allocator, name))
    load.warm_up()
    for clock in clocks.values():
        clock.spent = 0
    encoding = _Clock()
    timed_encode = encoding.wrap(encode)
    sink = CoreTimes(case=times.case)
    for _ in range(num_steps):
        timed_encode(load.step(sink))
    times.parts = {name: clock.spent / num_steps / 1000 for name, clock in (clocks | {"encode": encoding}).items()}


def row(times: CoreTimes) -> dict[str, Any]:
    """Return a line of the table."""
    case = times.case
    return {
        "running": case.num_running,
        "depth": case.depth,
        "churn": "yes" if case.churn else "no",
        "p50": round(statistics.median(times.core), 1),
        "mean": _mean(times.core),
        **{name: round(value, 1) for name, value in times.parts.items()},
        "front_end": _mean(times.front_end),
        "plan_encoding": _mean(times.plan_encoding),
    }


def _mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 1)


def main() -> None:
    """Measure every case, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=ABOUT)
    parser.add_argument(
        "--steps",
        type=int,
        default=MAX_STEPS,
        choices=range(1, MAX_STEPS + 1),
        metavar="N",
        help="steps to measure, at most %(default)s, because then requests would end",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    rows = [row(measure_core(case, args.steps)) for case in CASES]
    if args.json:
        print(json.dumps({"unit": "microseconds of Python per step", "rows": rows}, indent=1))
    else:
        print(ABOUT + format_table([name.replace("_", " ") for name in rows[0]], [list(r.values()) for r in rows]))


if __name__ == "__main__":
    main()
