"""Size of the KV cache and length of the context: pure functions of measured bytes, for any device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.config.engine import CacheConfig, ModelConfig, check_context
from quire.contracts.blocks import KVGeometry
from quire.contracts.errors import ConfigError
from quire.plan.state_memory import USUAL, StateUse, divide

GIB = 1024**3
SLOT_BYTES = 272  # of a slot's row in the tables of scheduler, worker and sampler, without parts that grow with context
QUARTER = "a quarter"  # of the free memory is the KV cache's by default


@dataclass(frozen=True, kw_only=True)
class DeviceBudget:
    """Shares of a GPU's memory in bytes.

    working   activations and CUDA graphs;  outside  other processes;  states  of recurrent layers, with checkpoints
    """

    total: int
    utilization: float
    weights: int
    working: int
    outside: int
    kv: int
    states: int = 0

    def __str__(self) -> str:
        free = self.total - self.weights - self.working - self.kv - self.outside - self.states
        total, weights, working, kv, outside, free_gib = (
            f"{count / GIB:.1f}" for count in (self.total, self.weights, self.working, self.kv, self.outside, free)
        )
        states = f"states {self.states / GIB:.1f}, " if self.states else ""
        return (
            f"{total} GiB: weights {weights}, activations and graphs {working}, KV cache {kv}, {states}other processes "
            f"{outside}, free {free_gib} (gpu_memory_utilization {self.utilization:g})"
        )


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Size of the KV cache. `notes` are lines for the user; `budget` prints the shares of a GPU's memory.

    host_blocks, host_checkpoints   blocks and checkpoints of the tier in host memory; 0: there is no such tier
    checkpoints   checkpoints of states; 0: no layer keeps states
    num_slots     requests that run at once: max_num_seqs, or as many as have room for their states; 0: max_num_seqs
    """

    geometry: KVGeometry
    num_blocks: int
    max_model_len: int
    kv_bytes: int
    free_bytes: int
    notes: tuple[str, ...] = ()
    budget: DeviceBudget | None = None
    host_blocks: int = 0
    host_checkpoints: int = 0
    checkpoints: int = 0
    num_slots: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the KV cache holds."""
        return self.geometry.num_tokens(self.num_blocks)


def check_cpu_weights(weights: int, free_bytes: int, dtype: str) -> None:
    """Raise `ConfigError` when `weights` bytes exceed `free_bytes`. `dtype` of the weights; "": quantized."""
    if weights >= free_bytes:
        less = "use dtype=bfloat16 (--dtype bfloat16), which halves them, or " if dtype == "float32" else ""
        raise ConfigError(
            f"{as_gib(weights)} of weights{' in ' * bool(dtype)}{dtype} exceed the {as_gib(free_bytes)} "
            f"of free memory: {less}choose a smaller model, or end other programs."
        )


def resolve_memory(
    geometry: KVGeometry,
    model: ModelConfig,
    cache: CacheConfig,
    *,
    context: int,
    chunk: int,
    max_num_seqs: int,
    free_bytes: int,
    states: StateUse = USUAL,
) -> MemoryPlan:
    """Size the KV cache and the context length.

    context, free_bytes   the model's longest sequence in tokens, and the memory that is free after the weights
    chunk                 most tokens of a request in unfinished steps
    states                the memory that is asked for them, and the checkpoints that have a use
    By default the cache takes a quarter of the free memory. It takes less when max_num_seqs sequences of full length
    need less, and more when a sequence of the given max_model_len needs more. An unset max_model_len shrinks until it
    fits. Raises `ConfigError` when a given max_model_len, or cache and the tables of requests together, do not fit.
    """
    asked = model.max_model_len
    check_context(model, context)
    length = asked or context
    whole = geometry.request_blocks(length, chunk)
    share = states.fraction if geometry.states else None
    num_blocks, source, remedy = _budget(geometry, cache, max_num_seqs * whole, free_bytes, share)
    if asked and source.startswith(QUARTER) and num_blocks < whole:  # the default share grows
        tables, most_states = max_num_seqs * slot_bytes(asked, geometry), int((share or 0.5) * free_bytes)
        room = free_bytes - (min(tables, most_states) if geometry.states else tables)
        if (most := min(whole, room // geometry.page_bytes - 1)) > num_blocks:
            num_blocks, source, remedy = most, f"the {as_gib(free_bytes)} of free memory", "end other programs"
    if num_blocks < len(geometry.groups):
        raise ConfigError(
            f"the KV cache ({source}) does not hold one block of {as_gib(geometry.page_bytes)}: "
            f"{remedy}, or choose a smaller model."
        )
    notes: tuple[str, ...] = ()
    if (longest := geometry.most_tokens(num_blocks, chunk, length)) < length:
        if asked is not None:
            needed, given = (as_gib(count * geometry.page_bytes) for count in (whole, num_blocks))
            raise ConfigError(
                f"max_model_len={asked} needs {needed} of KV cache, and {source} gives {given}: lower "
                f"max_model_len to {longest}, or {remedy}."
            )
        length = longest
        notes = (f"context shortened from {context} to {length} tokens: the KV cache ({source}) holds no more.",)
    kv_bytes = (num_blocks + 1) * geometry.page_bytes
    each = slot_bytes(length, geometry)
    slots, checkpoints = divide(geometry, states, kv_bytes, free_bytes - kv_bytes, (each, max_num_seqs))
    _check_free(source, kv_bytes, slots, slots * each + geometry.state_bytes, free_bytes)  # and of padding
    return MemoryPlan(
        geometry=geometry,
        num_blocks=num_blocks,
        max_model_len=length,
        kv_bytes=kv_bytes,
        free_bytes=free_bytes,
        notes=notes + _running_note(geometry, slots, max_num_seqs, share),
        checkpoints=checkpoints,
        num_slots=slots,
    )


def shared_sizes(sizes: Sequence[MemoryPlan]) -> list[MemoryPlan]:
    """Return the plans of all ranks, changed to the fewest blocks and checkpoints and the shortest context."""
    blocks, length = min(one.num_blocks for one in sizes), min(one.max_model_len for one in sizes)
    host = min(one.host_blocks for one in sizes)
    kept = [(one.checkpoints, one.host_checkpoints) for one in sizes if one.geometry.states]  # a stage may have none
    copies, host_copies = (min(counts, default=0) for counts in zip(*(kept or [(0, 0)]), strict=True))
    return [
        replace(
            one,
            num_blocks=blocks,
            max_model_len=length,
            kv_bytes=(blocks + 1) * one.geometry.page_bytes,
            host_blocks=host,
            host_checkpoints=host_copies,
            checkpoints=copies,
            num_slots=min(one.num_slots for one in sizes),
        )
        for one in sizes
    ]


def slot_bytes(max_model_len: int, geometry: KVGeometry) -> int:
    """Return the bytes that a running request takes beside its blocks: its states, and its rows of tables.

    A row has SLOT_BYTES, and 4 for each token and each block.

    The block tables of all groups have room for as many blocks as the group with the most has.
    """
    entries = max(group.num_blocks(max_model_len) for group in geometry.groups)
    return geometry.state_bytes + SLOT_BYTES + 4 * (max_model_len + len(geometry.groups) * entries)


def _check_free(source: str, kv_bytes: int, num_slots: int, tables: int, free_bytes: int) -> None:
    if kv_bytes > free_bytes:
        raise ConfigError(
            f"{source} asks for {as_gib(kv_bytes)} of KV cache, and {as_gib(free_bytes)} of memory are "
            f"free: lower {source}."
        )
    if kv_bytes + tables > free_bytes:
        what, remedy = f"max_num_seqs={num_slots} needs", "lower max_num_seqs or max_model_len"
        if num_slots == 1:  # given, or all that is left of max_num_seqs
            what = "a running request needs"
            remedy = f"lower {'max_model_len' if source.startswith(QUARTER) else source}, or choose a smaller model"
        raise ConfigError(
            f"{what} {as_gib(tables)} of tables and states beside {as_gib(kv_bytes)} of KV cache, and "
            f"{as_gib(free_bytes)} of memory are free: {remedy}."
        )


def _budget(
    geometry: KVGeometry, cache: CacheConfig, useful: int, free_bytes: int, states: float | None
) -> tuple[int, str, str]:
    """Return (blocks, what set their number, how to get more). By default the number is at most `useful`.

    states   share of the memory that states have; None: none is given
    """
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override, "num_gpu_blocks_override", "raise num_gpu_blocks_override"
    if cache.kv_cache_memory_bytes is not None:
        blocks = cache.kv_cache_memory_bytes // geometry.page_bytes - 1
        return blocks, "kv_cache_memory_bytes", "raise kv_cache_memory_bytes"
    source = f"{QUARTER} of the {as_gib(free_bytes)} of free memory"
    most = min(free_bytes // 4, int((1 - (states or 0)) * free_bytes))
    return min(most // geometry.page_bytes - 1, useful), source, "set kv_cache_memory_bytes"


def _running_note(geometry: KVGeometry, slots: int, max_num_seqs: int, share: float | None) -> tuple[str, ...]:
    """Return a line if fewer requests run at once than max_num_seqs."""
    if slots == max_num_seqs:
        return ()
    whose = "beside the KV cache" if share is None else "of states: raise state_memory_fraction or the KV cache"
    return (
        f"{slots} request{'s run' if slots > 1 else ' runs'} at once, not max_num_seqs={max_num_seqs}: each has "
        f"{as_gib(geometry.state_bytes)} of states of recurrent layers, which take at most half of the memory {whose}.",
    )


def as_gib(count: int) -> str:
    """Return a size in words, in GiB, MiB or KiB."""
    if count < 2**20 // 10:
        return f"{count / 1024:.2f} KiB"
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / 2**20:.2f} MiB"
