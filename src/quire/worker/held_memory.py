"""The memory that a rank holds for long, its weights and its KV cache: sleep, wake, and weights that are replaced.

Operations between two steps, on every rank; `quire.procs.life` gives their order.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from quire.contracts.errors import ConfigError, WeightsError
from quire.layers.stack import Model
from quire.weights.load import load_weights, prove
from quire.worker.features import StepFeature
from quire.worker.new_weights import NewWeights
from quire.worker.regions import Region

Differs = Callable[[Path], str]  # folder -> the reason why its config.json or KV scales are of another model; "": none


class Regions(NamedTuple):
    """The memory that sleep frees.

    drafts   weights of a draft model or EAGLE head, which go to host memory at both levels: no update brings them
    caches   KV cache and states
    """

    weights: Region
    drafts: Region
    caches: Region


class HeldMemory(StepFeature):
    """The weights and the KV cache of a rank, between two steps.

    folder    of the model's files; None: its weights are made up, and cannot be read again
    new       weights of an update; None: weights are not replaced
    differs   compares a folder with the model
    regions   memory that sleep frees; None: the engine does not sleep
    """

    def __init__(
        self, model: Model, folder: Path | None, new: NewWeights | None, differs: Differs, regions: Regions | None
    ) -> None:
        self._model, self._folder, self._new, self._differs = model, folder, new, differs
        self._regions = regions

    @property
    def controls(self) -> Mapping[str, Callable[..., object]]:  # type: ignore[override]
        """Operations by name. See `StepFeature`."""
        found: dict[str, Callable[..., object]] = {}
        if self._regions is not None:
            found |= {"sleep": self._sleep, "wake": self._wake}
        if (new := self._new) is not None:
            found |= {
                "init_weights": new.join,
                "start_weights": new.start,
                "update_weights": new.update,
                "staged": lambda: new.staged,
                "end_weights": new.end,
                "prove_weights": self._prove,
                "load_weights": lambda folder: self._load(Path(folder)),
            }
        return found

    def _sleep(self, level: int) -> None:
        assert self._regions is not None
        weights, drafts, caches = self._regions
        self._wait()
        try:
            weights.sleep(keep=level == 1)
            drafts.sleep(keep=True)
        except RuntimeError as error:
            raise ConfigError(f"host memory has no room for the weights ({error}): use level 2.") from error
        caches.sleep(keep=False)
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _wake(self, parts: Sequence[str], load: bool) -> None:
        """Bring parts back. load: read the weights from the model's files. Parts that are awake stay as they are."""
        assert self._regions is not None
        weights, drafts, caches = self._regions
        if load and self._folder is None:
            raise ConfigError(
                "made-up weights (load_format=dummy) cannot be read again: wake the tag weights, and send new ones."
            )
        try:
            if "weights" in parts:
                weights.wake()
                drafts.wake()
            if "kv_cache" in parts:
                caches.wake()
                caches.clear()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the device has too little free memory to wake up ({error}): end what has taken it, and wake again."
            ) from error
        if load:
            assert self._folder is not None
            self._load(self._folder)

    def _prove(self, folder: str) -> None:
        prove(self._model, Path(folder))
        if why := self._differs(Path(folder)):
            raise WeightsError(f"{folder}: {why}: restart the engine with this folder.")

    def _load(self, folder: Path) -> None:
        load_weights(self._model, folder, again=True)
        self._wait()

    def _wait(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
