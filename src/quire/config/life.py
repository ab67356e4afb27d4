"""Options of the life of an engine: sleep, weights that are replaced while it runs, and restarts after a fault."""

from dataclasses import dataclass
from typing import Any

from quire.config.option import option
from quire.contracts.errors import ConfigError

BACKENDS = ("files", "gloo")
REFUSED = {
    "nccl": "tensors do not come by NCCL: use gloo, which sends them through host memory",
    "ipc": "memory of another process's GPU is not mapped: use files, in /dev/shm for instance, or gloo",
}


@dataclass(frozen=True, kw_only=True)
class LifeConfig:
    """Sleep, weights that are replaced, and restarts."""

    enable_sleep_mode: bool = option(
        False, "let /sleep and LLM.sleep free the memory of weights and KV cache, and /wake_up bring both back"
    )
    weight_transfer_config: dict[str, Any] | None = option(
        None,
        'let /update_weights and LLM.update_weights replace the weights, as JSON: {"backend": "files"}; files = from a '
        "folder of safetensors; gloo = from a process of a group that torch.distributed makes",
    )
    restart: int = option(
        0,
        "times that a server starts a dead engine core again, with its ranks; they are forgotten when the engine has "
        "served for ten minutes; 0: the server ends with its engine",
        least=0,
    )

    @property
    def backend(self) -> str:
        """Way of new weights, "files" or "gloo"; "": weights cannot be replaced."""
        return "" if self.weight_transfer_config is None else str(self.weight_transfer_config.get("backend", "files"))


def check_life(config: LifeConfig) -> None:
    """Raise `ConfigError` for settings of weight updates that do not exist."""
    given = config.weight_transfer_config or {}
    if unknown := sorted(given.keys() - {"backend"}):
        raise ConfigError(f"weight_transfer_config: {unknown[0]!r} is not known: use the key backend alone.")
    if config.backend and config.backend not in BACKENDS:
        why = REFUSED.get(config.backend, f"use {' or '.join(BACKENDS)}")
        raise ConfigError(f"weight_transfer_config: backend {config.backend!r}: {why}.")
