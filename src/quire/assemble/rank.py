"""A rank's model on its device: the part of the assembly for one device that is each rank's part of one for many."""

from collections.abc import Callable

from quire.assemble.cpu import load_without_triton
from quire.assemble.loaded import Loaded, Loading
from quire.distributed.mesh import RankGroups
from quire.plan.engine import EnginePlan
from quire.platforms.cpu import read_cpu_facts
from quire.platforms.cuda import CudaFacts


def load_rank(
    plan: EnginePlan,
    groups: RankGroups,
    gpu: CudaFacts | None,
    *,
    on_loading: Loading,
    end_phase: Callable[[str], None],
) -> Loaded:
    """Load the model of a rank's plan on its device; raises a `UserError` that names the fix.

    groups       process groups of this rank (tensor and pipeline parallelism)
    gpu          name and memory of its GPU; None on a CPU
    on_loading   called with (bytes done, bytes in all) while weights are read
    end_phase    called with the name of each start-up phase when it ends
    """
    if gpu is not None:
        from quire.assemble.cuda import load_cuda

        return load_cuda(plan, groups, gpu, on_loading=on_loading, end_phase=end_phase)
    return load_without_triton(
        plan, groups, on_loading=on_loading, end_phase=end_phase, free_bytes=lambda: read_cpu_facts().free_memory
    )
