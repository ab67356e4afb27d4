"""Memory of the states of recurrent layers: how many requests run at once, and how many checkpoints there are.

A running request may hold a checkpoint of its answer. So there is one more than requests, where the memory has room:
the prompt of the last one leaves one, too. There are no more checkpoints than something takes: see `StateUse`.

Three things share a device's memory: slots (states of running requests), checkpoints, and KV blocks. Without
`state_memory_fraction` the blocks are sized first. With it, states have this share of all three; slots take at most
half of the share, and checkpoints take the rest.
"""

from dataclasses import dataclass

from quire.config.checkpoints import CheckpointPlaces, read_places
from quire.config.engine import EngineConfig
from quire.contracts.blocks import KVGeometry

PER_SLOT = 8  # checkpoints for each running request, at most, by default
# States of running requests take at most 1 / 8 of a GPU's memory by default, unless max_num_seqs is given.
SLOTS_SHARE = 8
NOWHERE = CheckpointPlaces(prompt=False, branch=False, turn=False)


@dataclass(frozen=True, kw_only=True)
class StateUse:
    """The memory that is asked for states, and the checkpoints that have a use.

    fraction   `state_memory_fraction`
    per_slot   most checkpoints for each running request: PER_SLOT; 1: only running requests and their completions use
               them; 0: none is taken, and none comes from elsewhere
    """

    fraction: float | None = None
    per_slot: int = PER_SLOT

    def most(self, slots: int) -> int:
        """Return the most checkpoints for so many running requests. A pool of checkpoints has at least one."""
        return max(1, self.per_slot * slots, enough(slots) * bool(self.per_slot))


USUAL = StateUse()


def state_use(config: EngineConfig, *, elsewhere: bool = False) -> StateUse:
    """Return the use of states of a configuration.

    elsewhere   True: checkpoints may come from files or from other engines, also if this engine takes none
    """
    per_slot = PER_SLOT if config.cache.enable_prefix_caching else 1
    if read_places(config.state.state_checkpoint) == NOWHERE:
        per_slot = int(elsewhere)
    return StateUse(fraction=config.state.state_memory_fraction, per_slot=per_slot)


def enough(slots: int) -> int:
    """Return the checkpoints with which each running request can hold one and a prompt can leave one."""
    return slots + 1


def state_dtype(config: EngineConfig) -> str:
    """Return the dtype of the matrices that recurrent layers keep.

    "auto" is float32, also where config.json names another type: in bfloat16 a matrix loses what many tokens add to it
    little by little, and drafts are accepted less often (docs/log.md has the numbers).
    """
    asked = config.state.mamba_ssm_cache_dtype
    return "float32" if asked == "auto" else asked


def beside(kv_bytes: int, fraction: float) -> int:
    """Return the bytes of states beside a KV cache of so many bytes, if states have `fraction` of both together."""
    return int(kv_bytes * fraction / (1 - fraction))


def divide(geometry: KVGeometry, use: StateUse, kv_bytes: int, room: int, running: tuple[int, int]) -> tuple[int, int]:
    """Return (requests that run at once, checkpoints) beside a KV cache of `kv_bytes`.

    room      bytes that are left beside it
    running   bytes of a request's slot, and max_num_seqs
    A slot for rows of padding lies beside those of requests.
    """
    each, most = running
    if not geometry.states:
        return most, 0
    if use.fraction is not None:
        room = min(room, beside(kv_bytes, use.fraction))
    room -= geometry.state_bytes
    one_more = geometry.state_bytes * (use.fraction is not None)
    slots = max(1, min(most, (room - one_more) // 2 // each))
    left = room - slots * each
    if use.fraction is None:
        return slots, num_checkpoints(geometry, kv_bytes, left, slots, use)
    return slots, checkpoints_in(geometry, kv_bytes, left, slots, use)


def num_checkpoints(geometry: KVGeometry, kv_bytes: int, free_bytes: int, slots: int, use: StateUse) -> int:
    """Return the number of checkpoints by default: as many as half the bytes of the KV cache hold; 0: none are needed.

    free_bytes   memory that is left
    slots        requests that run at once
    There are enough for them, also beside a small KV cache, as far as half of the memory that is left has room.
    """
    if not geometry.states:
        return 0
    usual = min(kv_bytes // 2, free_bytes) // geometry.state_bytes
    least = min(enough(slots), free_bytes // 2 // geometry.state_bytes)
    return max(1, min(max(usual, least), use.most(slots)))


def checkpoints_in(geometry: KVGeometry, kv_bytes: int, room: int, slots: int, use: StateUse) -> int:
    """Return the number of checkpoints that `room` bytes hold, at most one for each place in the KV cache.

    slots   requests that run at once: there are enough for them, also if the KV cache has fewer places
    """
    if not geometry.states:
        return 0
    most = max(num_places(geometry, kv_bytes), enough(slots)) if use.per_slot == PER_SLOT else use.most(slots)
    return max(1, min(room // geometry.state_bytes, most))


def num_places(geometry: KVGeometry, kv_bytes: int) -> int:
    """Return the number of places in a KV cache at which a checkpoint can stand."""
    return geometry.num_tokens(kv_bytes // geometry.page_bytes) // geometry.hit_size


def divide_tier(geometry: KVGeometry, num_bytes: int, kv_bytes: int, checkpoints: int) -> tuple[int, int]:
    """Return (bytes of KV blocks, bytes of checkpoints) of a tier below the device, divided as the device's memory is.

    num_bytes   of the tier; it holds at least one checkpoint, if any
    """
    if not geometry.states:
        return num_bytes, 0
    size = checkpoints * geometry.state_bytes
    states = min(num_bytes, max(geometry.state_bytes, num_bytes * size // (size + kv_bytes)))
    return num_bytes - states, states


def slots_limit(total: int, fraction: float | None, state_bytes: int) -> int:
    """Return the most requests whose states a GPU of `total` bytes holds, unless max_num_seqs is given.

    With `fraction` slots have a quarter of that share of the memory: weights need most of the rest.
    """
    share = 1 / SLOTS_SHARE if fraction is None else fraction / 4
    return max(1, int(total * share) // state_bytes)
