"""Commands that look into the model of their own process, and so run on one device."""

from quire.config.engine import ParallelConfig
from quire.contracts.errors import ConfigError
from quire.plan.placement import parallel_sizes


def check_one_device(config: ParallelConfig, command: str) -> None:
    """Raise `ConfigError` if there are several ranks: `command` needs the whole model in its own process."""
    if (parallel := parallel_sizes(config)).size > 1:
        raise ConfigError(
            f"{parallel}: `{command}` cannot run with several ranks, because it looks into the model of "
            "its own process. Leave these options out, or use `quire trace`, which follows a request "
            "into every rank."
        )
