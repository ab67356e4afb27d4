"""Plans of `quire explain` for sizes of parallelism that are given as one value."""

from dataclasses import replace

from quire.config.engine import EngineConfig, ParallelConfig
from quire.contracts.parallel import ALONE, Parallel
from quire.explain.describe import plan_engine
from quire.reports.engine import PlanReport


def explained(config: EngineConfig, parallel: Parallel = ALONE, device: str = "") -> PlanReport:
    """The plan of an engine of these sizes, on the described device or on this machine."""
    sizes = ParallelConfig(
        tensor_parallel_size=parallel.tp,
        pipeline_parallel_size=parallel.pp,
        data_parallel_size=parallel.dp,
        enable_expert_parallel=parallel.experts,
        expert_placement_strategy="round_robin" if parallel.round_robin else "linear",
    )
    return plan_engine(replace(config, parallel=sizes), device)
