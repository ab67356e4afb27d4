"""Methods of `LLM` about the life of its engine, with vLLM's names: sleep, and weights that are replaced. Routes of the
server have the same names.

    llm = LLM(model, enable_sleep_mode=True)
    llm.sleep(level=1)
    llm.wake_up()

llm = LLM(model, weight_transfer_config={"backend": "files"})
llm.start_weight_update()
llm.update_weights({"update_info": {"path": "folder"}})     or a list of (name, tensor), in one call or several
llm.finish_weight_update()
"""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from quire.assemble.engine import Engine
from quire.contracts.errors import ConfigError, InvalidParameter
from quire.procs.life import Life

NO_UPDATES = 'weights cannot be replaced: make the engine with weight_transfer_config={"backend": "files"}.'
OWN_FORMAT = (
    "is_checkpoint_format=False: tensors in the layout of kernels are not taken, because each engine packs weights for "
    "its own kernels: send them as a checkpoint has them."
)


class Living(Protocol):
    """An `LLM`, for its methods here. life: that of its engine"""

    @property
    def engine(self) -> Engine:
        """Engine of the `LLM`."""

    life: Life


def init_weight_transfer_engine(llm: Living, request: dict[str, Any]) -> None:
    """Join the group of a trainer. request: {"init_info": {"master_address", "master_port", "rank_offset",
    "world_size"}}; with backend "files" {"init_info": {}}."""
    _check(llm)
    llm.life.init_weights(_part(request, "init_info"))


def start_weight_update(llm: Living, is_checkpoint_format: bool = True) -> None:
    """Begin an update of the weights. Open streams are held."""
    _check(llm)
    if not is_checkpoint_format:
        raise InvalidParameter(OWN_FORMAT, param="is_checkpoint_format")
    llm.life.start_weights()


def update_weights(llm: Living, request: dict[str, Any] | Iterable[tuple[str, Any]]) -> None:
    """Take new weights: {"update_info": ...} as the server's route, or pairs of a name and a tensor (backend "files").

    All tensors of the checkpoint must have come before `finish_weight_update`; until then no weight changes.
    """
    _check(llm)
    if isinstance(request, dict):
        llm.life.update_weights(_part(request, "update_info"))
        return
    from safetensors.torch import save_file

    found = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in request}
    if llm.life.folder is None:
        llm.life.folder = tempfile.TemporaryDirectory(prefix="quire-weights-")
    folder = Path(llm.life.folder.name)
    save_file(found, folder / f"part-{len(list(folder.iterdir())):05}.safetensors")
    llm.life.update_weights({"path": str(folder)})


def finish_weight_update(llm: Living) -> None:
    """Replace the weights by those of the update, and forget all KV. Raises a `UserError` that says what is missing."""
    _check(llm)
    try:
        llm.life.finish_weights()
    finally:
        if llm.life.folder is not None:
            llm.life.folder.cleanup()
            llm.life.folder = None


def sleep(llm: Living, level: int = 1, mode: str = "abort") -> None:
    """Free the memory of weights and KV cache; needs enable_sleep_mode=True.

    level   1: the weights go to host memory; 2: they are dropped, and `wake_up` reads them from the files
    mode    for open streams: "abort" ends them, "wait" lets them come to their end, "keep" goes on after `wake_up`
    """
    _check_sleep(llm)
    if not llm.life.level:
        llm.life.quiet(mode)
        while not llm.life.settled:
            llm.life.advance()
    llm.life.sleep(level)


def wake_up(llm: Living, tags: Sequence[str] | None = None) -> None:
    """Bring the memory back, all of it or the parts `tags`: "weights", "kv_cache". See `sleep`."""
    _check_sleep(llm)
    llm.life.wake_up(tags)


def _check_sleep(llm: Living) -> None:
    if not llm.engine.config.life.enable_sleep_mode:
        raise ConfigError("the engine cannot sleep: make it with enable_sleep_mode=True.")


def _check(llm: Living) -> None:
    if not llm.engine.config.life.backend:
        raise ConfigError(NO_UPDATES)


def _part(request: dict[str, Any], name: str) -> dict[str, Any]:
    if set(request) != {name} or not isinstance(request[name], dict):
        raise InvalidParameter(f"give a dict with the key {name!r} alone, whose value is a dict.", param=name)
    found: dict[str, Any] = request[name]
    return found
