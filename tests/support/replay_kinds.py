"""A step feature that counts the CUDA graphs that a rank replays, by their kinds; `attach` brings it into a rank."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from quire.contracts.parallel import Rank
from quire.worker.features import StepFeature
from quire.worker.graphs import Graphs
from quire.worker.recorder import Key
from quire.worker.runner import StepRunner


class ReplayKinds(StepFeature):
    """Counts replays. The control "replays" returns kind ("decode", "mixed", "join", "sample") -> count."""

    def __init__(self, recorder: Graphs) -> None:
        self.controls = {"replays": lambda: dict(self._counts)}
        self._counts, self._run, self._graphs = Counter[str](), recorder.run, recorder._graphs
        recorder.run = self._counted  # type: ignore[method-assign]

    def _counted(self, key: Key, work: Callable[[], None]) -> None:
        self._counts[key[0]] += key in self._graphs
        self._run(key, work)


def make(runner: StepRunner, rank: Rank) -> StepFeature:
    """Return the feature for a runner that captures CUDA graphs."""
    recorder: Any = runner.recorder
    return ReplayKinds(recorder)
