"""The model runner, one for every device.

The order of a step: apply the plan, build inputs, run layers, run the head, (release) sample, write the tokens to the
history, return results. Step features add what else happens in a step (`features.py`). The launches of a step depend
only on numbers that the host knows (slots, counts of tokens), never on values that the device computed, so only
`collect` waits for the device. Devices differ in four parts: step operations, sampler operations, upload and recorder.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from quire.contracts.step import I32, NO_MASKS, StepPlan, StepResult
from quire.kernels.select import Choice
from quire.kernels.step import StepWords
from quire.kernels.step.state import DeviceState, Limits
from quire.kernels.step.upload import Upload
from quire.layers.stack import first_of_each_kind
from quire.worker.features import Results
from quire.worker.graphs import Graphs
from quire.worker.programs import Programs
from quire.worker.recorder import Key, StepShape
from quire.worker.results import RunningStep, sampled_slots

EAGER_TOKENS = (64, 128, 256, 512, 1024, 2048)  # rehearsed sizes: kernels choose their tiles by the number of tokens
NO_ROWS = np.empty((3, 0), np.int32)


class _Launched(NamedTuple):
    """A step whose logits are launched and whose sampling is not."""

    plan: StepPlan
    shape: StepShape
    found: tuple[Results, ...]


class StepRunner:
    """The model runner: runs step plans in order. At most `limits.depth` steps may be submitted and not collected yet.

    parts      implementations of step operations, sampler, upload and recorder, with the reasons for the choice
    features   step features, whose hooks each step calls
    """

    def __init__(
        self, programs: Programs, state: DeviceState, upload: Upload, *, limits: Limits, parts: tuple[Choice, ...]
    ) -> None:
        self.programs, self.state, self.limits, self.parts = programs, state, limits, parts
        self.model, self.sampler, self.recorder = programs.model, programs.sampler, programs.recorder
        self.features, self._upload = programs.features, upload
        self._running: deque[RunningStep] = deque()
        self._launched: deque[_Launched] = deque()  # the last submitted step, until its grammar masks come

    @property
    def step(self) -> StepWords:
        """Inputs of the step sent last, on the device."""
        return self._upload.step

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Launch a step, without waiting for the device. A step with grammar masks samples only after `release`."""
        own = [change for feature in self.features.apply for change in feature.apply(plan)]
        self._upload.send(plan, self.state.apply(plan) + own)
        for feature in self.features.before:
            feature.before(plan)
        if not len(plan.slots):
            self.programs.idle(plan)
            self._began(RunningStep(plan, plan.slots, 0, lambda: NO_ROWS), plan.slots)
            return
        shape = self.programs.shape(plan)
        hidden = self.programs.compute(shape, plan)
        found = () if hidden is None else [each.computed(plan, hidden) for each in self.features.computed]
        self._launched.append(_Launched(plan, shape, tuple(results for results in found if results is not None)))
        if not len(plan.grammar):
            self._end()

    @torch.inference_mode()
    def release(self, masks: I32) -> None:
        """Launch the sampling of the step submitted last, with its grammar masks; see `Executor.release`.

        `masks` is empty when the executor shuts down: the step then samples without masks.
        """
        assert self._launched, "released twice"
        plan = self._launched[0].plan
        if len(masks):
            self.programs.sampler.take_masks(sampled_slots(plan)[2], plan.grammar, masks)
        self._end()

    def _end(self) -> None:
        """Launch the work after the logits: sampling, log-probabilities and the copy of the tokens to the host."""
        plan, shape, found = self._launched.popleft()
        slots, counts, rows = sampled_slots(plan)
        programs = self.programs
        programs.end(shape, rows)
        if len(rows) and programs.sampler.table.scored and self.model.last:
            scored = programs.sampler.logprobs(programs.whole_logits(len(rows)), rows)
            found = found if scored is None else (*found, scored)
        fetch, num_tokens = self._upload.fetch(programs.out), self._upload.step.num_tokens
        self._began(RunningStep(plan, slots, num_tokens, fetch, found, counts), rows)

    def _began(self, step: RunningStep, rows: I32) -> None:
        """Note a step whose launches are done; then the features do what comes after it. rows: see `after`."""
        for feature in self.features.after:
            feature.after(step.plan, rows, self.state.buffers, self.programs.out)
        self._running.append(step)

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step and return its result."""
        return self._running.popleft().collect(self.features.results)

    def run(self, plan: StepPlan, get_masks: Callable[[], I32] = lambda: NO_MASKS) -> StepResult:
        """Submit a plan, wait for the step and return its result.

        get_masks   returns the grammar masks, laid out as in `Executor.release`; called only for a plan with grammars
        """
        self.submit(plan)
        if len(plan.grammar):
            self.release(get_masks())
        return self.collect()

    def describe(self) -> dict[str, object]:
        """Return a dict for display: the chosen `parts`, counts of recordings, and the steps that are not recorded."""
        return {
            "parts": [str(choice) for choice in self.parts],
            "steps": dict(self.recorder.counts),
            "recordings": len(self.recorder),
            "not recorded": self.recorder.unrecorded(),
            "features": [type(feature).__name__ for feature in self.features.all],
        }

    @torch.inference_mode()
    def rehearse(self, plans: list[StepPlan]) -> None:
        """Launch once every kernel that these plans and `warm_up` need, to have it compiled. Results are discarded.

        Only one layer of each kind runs. Inside `compiling_ahead()` the kernels are compiled and not run.
        """
        slots, tokens = self.limits.num_slots, self.limits.max_tokens
        # Without graph sizes: a kernel that is not rehearsed here would be compiled while requests wait.
        sizes = self.limits.graph_sizes or tuple(sorted({1, min(16, slots), slots}))
        prompts = self.limits.graph_tokens or tuple(sorted({min(count, tokens) for count in EAGER_TOKENS}))
        self.programs.some = first_of_each_kind(zip(self.model.layers, self.programs.kv, strict=False))
        try:
            for plan in plans:
                self.submit(plan)
                self._running.pop()
            queries = self.limits.queries
            if not self.limits.graph_sizes and self.limits.num_drafts:
                queries = 1, 1 + self.limits.num_drafts
            exchanges = self.limits.exchanges
            more = {"joint": exchanges.joint, "adapted": self.limits.adapters, "even": exchanges.even}
            graphs = Graphs(sizes, prompts, slots, exchanges.bounds, queries, **more)
            graphs.short = self.limits.short
            for _, work in self.programs.recordings(graphs.shapes()):
                work()
        finally:
            self.programs.some = range(len(self.model.layers))
        torch.cuda.synchronize()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture all CUDA graphs, then replay the smallest of each kind. Call it after `rehearse`.

        So a kernel that fails does so at start-up. No request runs meanwhile: the tables describe empty sequences.
        """
        smallest: dict[tuple[str, int], tuple[Key, Callable[[], None]]] = {}
        for key, work in self.programs.recordings(self.recorder.shapes()):
            self.recorder.capture(key, work)
            smallest[key[0], key[2]] = key, work
        for key, work in smallest.values():
            self.recorder.run(key, work)
        torch.cuda.synchronize()
