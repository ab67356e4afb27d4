"""Memory of the states of recurrent layers: how many requests run at once, and how many checkpoints there are.

Three things share a device's memory: slots (states of running requests), checkpoints, and KV blocks. Without
`state_memory_fraction` the blocks are sized first. With it, states have this share of all three; slots take at most
half of the share, and checkpoints take the rest.
"""

from quire.config.engine import EngineConfig
from quire.contracts.blocks import KVGeometry

PER_SLOT = 8  # checkpoints for each running request, at most, by default
SLOTS_SHARE = (
    8  # states of running requests take at most 1 / 8 of a GPU's memory by default, unless max_num_seqs is given
)


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


def divide(
    geometry: KVGeometry, fraction: float | None, kv_bytes: int, room: int, running: tuple[int, int]
) -> tuple[int, int]:
    """Return (requests that run at once, checkpoints) beside a KV cache of `kv_bytes`.

    room      bytes that are left beside it
    running   bytes of a request's slot, and max_num_seqs
    """
    each, most = running
    if not geometry.states:
        return most, 0
    if fraction is not None:
        room = min(room, beside(kv_bytes, fraction))
    slots = max(1, min(most, room // 2 // each))
    left = room - slots * each
    if fraction is None:
        return slots, num_checkpoints(geometry, kv_bytes, left, slots)
    return slots, checkpoints_in(geometry, kv_bytes, left)


def num_checkpoints(geometry: KVGeometry, kv_bytes: int, free_bytes: int, max_num_seqs: int) -> int:
    """Return the number of checkpoints by default: as many as half the bytes of the KV cache hold; 0: none are needed.

    free_bytes   memory that is left
    Each running request may hold one, and none leaves its prompt's behind if there is not one more.
    """
    if not geometry.states:
        return 0
    most = min(kv_bytes // 2, free_bytes) // geometry.state_bytes
    return max(1, min(most, PER_SLOT * max_num_seqs))


def checkpoints_in(geometry: KVGeometry, kv_bytes: int, room: int) -> int:
    """Return the number of checkpoints that `room` bytes hold, at most one for each place in the KV cache."""
    if not geometry.states:
        return 0
    places = geometry.num_tokens(kv_bytes // geometry.page_bytes) // geometry.hit_size
    return max(1, min(room // geometry.state_bytes, places))


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
