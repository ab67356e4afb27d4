"""The operations of a rank on the memory that it holds for long: what sleep and weight updates need of an assembly."""

from functools import partial
from pathlib import Path

from quire.assemble.obtain import read_args
from quire.kernels.native import memory
from quire.kernels.virtual_memory import IMPLEMENTATIONS
from quire.layers.in_place import packed_tensors
from quire.layers.stack import Model
from quire.plan.engine import EnginePlan
from quire.weights.cache_scales import Scales, read_scales
from quire.weights.files import read_checkpoint
from quire.worker.held_memory import HeldMemory, Regions
from quire.worker.new_weights import NewWeights
from quire.worker.regions import HostPages, MappedRegion
from quire.worker.runner import StepRunner


def make_regions(plan: EnginePlan, model: Model) -> Regions | None:
    """Return the memory that sleep frees, with the weights of a model in it; None: the engine does not sleep.

    Call it before anything keeps the address of a weight: on a GPU the weights move.
    """
    if not plan.config.life.enable_sleep_mode:
        return None
    virtual = IMPLEMENTATIONS.get(model.device.type)
    made = [HostPages() if virtual is None else MappedRegion(virtual(model.device), model.device) for _ in range(3)]
    made[0].adopt(packed_tensors(model))
    if model.draft is not None:
        made[1].adopt(packed_tensors(model.draft))
    return Regions(*made)


def hold_memory(
    worker: StepRunner, model: Model, plan: EnginePlan, scales: list[Scales], regions: Regions | None
) -> None:
    """Let a runner sleep and take new weights, as far as the options allow it."""
    life = plan.config.life
    if not life.backend and regions is None:
        return
    new = NewWeights(life.backend, first=plan.mesh.rank.number == 0) if life.backend else None
    folder = None if plan.config.load.load_format == "dummy" else Path(plan.folder)
    worker.features.attach(HeldMemory(model, folder, new, partial(_differs, plan, scales), regions))


def empty_of(regions: Regions | None) -> memory.Empty | None:
    """Return the function that makes the memory of caches; None: the usual one."""
    return None if regions is None else regions.caches.empty


def _differs(plan: EnginePlan, scales: list[Scales], folder: Path) -> str:
    """Return the reason why the weights in `folder` are of another model than the engine's; "": they are not.

    A folder without config.json holds tensors alone, whose names and shapes the loader compares.
    """
    own = Path(plan.folder)
    if (folder / "config.json").is_file() and read_args(plan.config, folder) != read_args(plan.config, own):
        return "its config.json describes another model than the engine's"
    if plan.cache.scaled and read_scales(read_checkpoint(folder), plan.args) != scales:
        return "its scales of the KV cache are others, and steps are made with them"
    return ""
