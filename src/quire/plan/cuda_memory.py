"""Division of a GPU's memory: pure functions of measured bytes. Their errors name changes that would make it fit."""

import math
from dataclasses import dataclass, replace

from quire.config.engine import EngineConfig, SchedulerConfig, check_context
from quire.contracts.blocks import KVGeometry
from quire.contracts.errors import ConfigError
from quire.kernels.attention_limits import MOST_SEQUENCES
from quire.plan.memory import GIB, DeviceBudget, MemoryPlan
from quire.plan.state_memory import USUAL, StateUse, beside, checkpoints_in, num_checkpoints

CUDA_TOKENS = 8192  # of a step
WIDE_TOKENS = 16384  # of a step when tokens are not streamed: more tokens fill the experts' tiles (docs/log.md)
LARGE_GPU, LARGE_SEQUENCES = 70 * GIB, 1024  # memory of a large GPU, and the requests that it runs at once
SPARE = 256 << 20  # bytes left free for late allocations of libraries
MAX_BLOCKS = 1 << 17  # a block costs the scheduler about 0.5 KB, and a tiny model's page is tiny
MOST_UTILIZATION = 0.98  # the largest that a message proposes


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Measured memory of a GPU when its KV cache is sized; all in bytes.

    at_start, free   free memory when only this process's CUDA context existed, and free memory now
    weights          parameters as the kernels store them
    later            memory that activations, buffers and CUDA graphs take after the KV cache is allocated
    others           memory of other processes; None: unknown, then all memory used at the start counts as theirs
    per_seq, per_token   memory for each unit of max_num_seqs and of max_num_batched_tokens; 0: unknown
    """

    total: int
    at_start: int
    free: int
    weights: int
    later: int = 0
    others: int | None = None
    per_seq: int = 0
    per_token: int = 0

    @property
    def outside(self) -> int:
        """Bytes held by other processes. If `others` is None, all memory that was in use at the start."""
        return self.total - self.at_start if self.others is None else min(self.others, self.total - self.at_start)

    @property
    def working(self) -> int:
        """Bytes of this process beside weights and KV cache: CUDA context, activations, buffers, CUDA graphs."""
        return max(0, self.total - self.outside - self.free - self.weights) + self.later

    @property
    def ours(self) -> int:
        """Bytes of this process without the KV cache: weights and working memory."""
        return self.weights + self.working


def resolve_batch(scheduler: SchedulerConfig, total: int, wide: bool = False, running: int = 0) -> SchedulerConfig:
    """Return `scheduler` with unset max_num_seqs and max_num_batched_tokens filled in for a GPU of `total` bytes.

    A GPU of 70 GiB or more runs more requests, because their KV caches fit.
    wide          take more tokens per step on such a GPU, for a mixture-of-experts model whose tokens are not streamed
    running       most requests that states have room for; 0: no layer keeps states
    """
    seqs = scheduler.max_num_seqs or (LARGE_SEQUENCES if total >= LARGE_GPU else scheduler.sequences())
    tokens = scheduler.max_num_batched_tokens
    if scheduler.max_num_seqs is None:
        seqs = min(seqs, tokens or seqs, running or seqs)
    most = WIDE_TOKENS if wide and total >= LARGE_GPU else CUDA_TOKENS
    return replace(scheduler, max_num_seqs=seqs, max_num_batched_tokens=tokens or max(most, seqs))


def check_sequences(config: EngineConfig) -> None:
    """Raise `ConfigError` when max_num_seqs exceeds MOST_SEQUENCES, the limit of the GPU kernels for one step."""
    if config.scheduler.sequences() > MOST_SEQUENCES:
        raise ConfigError(
            f"max_num_seqs={config.scheduler.max_num_seqs}: a step on a GPU has at most {MOST_SEQUENCES} "
            "sequences, the others wait: lower max_num_seqs."
        )


def check_weights(weights: int, total: int, free: int, config: EngineConfig, *, dtype: str) -> None:
    """Raise `ConfigError` when `weights` bytes do not fit into a GPU with `free` of `total` bytes. `dtype` is shown."""
    memory = DeviceMemory(total=total, at_start=free, free=free - weights, weights=weights)
    missing = memory.ours + SPARE - _limit(memory, config)
    if missing > 0:
        raise ConfigError(
            f"the weights need {_size(weights)} in {dtype}, and {_room(memory, config)}: "
            f"{_size(missing)} are missing. Try {_advice(memory, config, dtype, SPARE)}"
        )


def no_room_for_steps(weights: int, free: int, config: EngineConfig) -> str:
    """Return an error text: in `free` bytes, the largest step does not fit beside `weights` bytes of parameters."""
    seqs, tokens = config.scheduler.sequences(), config.scheduler.token_budget(CUDA_TOKENS)
    fewer = max(1, seqs // 4)
    return (
        f"buffers and activations of a step of {tokens} tokens and {seqs} sequences do not fit beside "
        f"{_size(weights)} of weights in {_size(free)} of free GPU memory. Try --max-num-seqs {fewer} "
        f"--max-num-batched-tokens {max(fewer, tokens // 4)}, or a smaller model."
    )


def resolve_cuda_memory(
    geometry: KVGeometry,
    config: EngineConfig,
    memory: DeviceMemory,
    *,
    context: int,
    chunk: int,
    dtype: str,
    states: StateUse = USUAL,
) -> MemoryPlan:
    """Return the size of the KV cache and the context length on a GPU.

    context, chunk   the model's longest sequence, and the most tokens of a request in unfinished steps
    states           the memory that is asked for them, and the checkpoints that have a use
    The KV cache takes the memory that gpu_memory_utilization leaves, unless an option sets its size, and checkpoints
    of states take a third of it. The states of running requests are in the measured memory. An unset max_model_len
    shrinks until one request fits. Raises `ConfigError` with the missing bytes and options that help.
    """
    check_context(config.model, context)
    checkpoints = _checkpoints(geometry, config, memory, states)
    memory = replace(memory, later=memory.later + checkpoints * geometry.state_bytes)
    asked, page = config.model.max_model_len, geometry.page_bytes
    length = asked or context
    num_blocks, source = _num_blocks(config, memory, page)
    wanted = ((geometry.request_blocks(length, chunk) if asked else len(geometry.groups)) + 1) * page
    given = max(0, (num_blocks + 1) * page)
    forced = source != "gpu_memory_utilization"
    room = max(0, memory.free - memory.later - SPARE)
    if forced and given > room:
        raise _too_much(source, given, room, page)
    if given < wanted:
        shorter = geometry.most_tokens(num_blocks, chunk, length) if asked else 0
        there_is = f"{source} gives {_size(given)}" if forced else _room(memory, config)
        more = f"a larger {source}." if forced else _advice(memory, config, dtype, wanted)
        cause = f"the smallest KV cache, of a page and one for padding, needs {_size(wanted)}"
        if asked:
            cause = f"max_model_len={asked} needs {_size(wanted)} of KV cache"
        missing = wanted - given if forced else memory.ours + wanted - _limit(memory, config)
        held = "" if forced else f" beside {_size(memory.ours)} of weights, activations and graphs"
        cut = f"--max-model-len {shorter}, or " if shorter > 0 else ""
        raise ConfigError(f"{cause}{held}, and {there_is}: {_size(missing)} are missing. Try {cut}{more}")
    notes: tuple[str, ...] = ()
    if geometry.most_tokens(num_blocks, chunk, length) < length:
        length = geometry.most_tokens(num_blocks, chunk, length)
        notes = (
            f"context shortened from {context} to {length} tokens: the KV cache of {_size(given)} ({source}) "
            "holds no more.",
        )
    if not forced:
        notes += _crowded(memory, config)
    return MemoryPlan(
        geometry=geometry,
        num_blocks=num_blocks,
        max_model_len=length,
        kv_bytes=given,
        free_bytes=memory.free,
        notes=notes,
        budget=_budget(config, memory, given, checkpoints, geometry.state_bytes),
        checkpoints=checkpoints,
    )


def _budget(config: EngineConfig, memory: DeviceMemory, kv: int, checkpoints: int, state_bytes: int) -> DeviceBudget:
    states = min(memory.working, (config.scheduler.sequences() + 1 + checkpoints) * state_bytes)
    return DeviceBudget(
        total=memory.total,
        utilization=config.cache.gpu_memory_utilization,
        weights=memory.weights,
        working=memory.working - states,
        outside=memory.outside,
        kv=kv,
        states=states,
    )


def _checkpoints(geometry: KVGeometry, config: EngineConfig, memory: DeviceMemory, use: StateUse) -> int:
    """Return the number of checkpoints of states beside a KV cache of twice their bytes; 0: no layer keeps states.

    With `state_memory_fraction`, slots and checkpoints have that share of the memory that both have with the KV cache.
    """
    cache, seqs, share = config.cache, config.scheduler.sequences(), use.fraction
    asked, slots = cache.kv_cache_memory_bytes, (seqs + 1) * geometry.state_bytes
    if cache.num_gpu_blocks_override is not None:
        asked = (cache.num_gpu_blocks_override + 1) * geometry.page_bytes
    if asked is not None:
        left = memory.free - memory.later - SPARE - asked
        if share is None:
            return num_checkpoints(geometry, asked, left, seqs, use)
        return checkpoints_in(geometry, asked, min(left, beside(asked, share) - slots), seqs, use)
    left = _limit(memory, config) - memory.ours
    if share is None:
        return num_checkpoints(geometry, 2 * left // 3, left, seqs, use)
    room = int(share * (left + slots)) - slots
    return checkpoints_in(geometry, left - room, room, seqs, use)


def _limit(memory: DeviceMemory, config: EngineConfig) -> int:
    """Return the largest number of bytes that weights, working memory and KV cache may take together."""
    return min(int(config.cache.gpu_memory_utilization * memory.total), memory.total - memory.outside - SPARE)


def _num_blocks(config: EngineConfig, memory: DeviceMemory, page: int) -> tuple[int, str]:
    """Return (usable blocks, the option that set their number). Block 0 is reserved and counts as cache."""
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override, "num_gpu_blocks_override"
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes // page - 1, "kv_cache_memory_bytes"
    blocks = (_limit(memory, config) - memory.ours) // page - 1
    return min(blocks, MAX_BLOCKS), "gpu_memory_utilization"


def _too_much(source: str, given: int, room: int, page: int) -> ConfigError:
    """Return the error of a KV cache whose size the option `source` sets, and which exceeds `room` bytes."""
    most = room // page - 1 if source == "num_gpu_blocks_override" else room
    return ConfigError(
        f"{source} asks for {_size(given)} of KV cache, and {_size(room)} of the GPU's memory are "
        f"free: lower it to {most}, or leave it out."
    )


def _crowded(memory: DeviceMemory, config: EngineConfig) -> tuple[str, ...]:
    """Return a line if other processes leave less memory than gpu_memory_utilization allows."""
    share = config.cache.gpu_memory_utilization
    if _limit(memory, config) >= int(share * memory.total):
        return ()
    return (
        f"other processes hold {_size(memory.outside)} of the GPU's memory: less than gpu_memory_utilization={share:g} "
        "is left.",
    )


def _room(memory: DeviceMemory, config: EngineConfig) -> str:
    """Return the available memory, in words."""
    share = config.cache.gpu_memory_utilization
    if _limit(memory, config) < int(share * memory.total):
        return (
            f"{_size(max(0, _limit(memory, config)))} of the GPU's {_size(memory.total)} can be had (other "
            f"processes hold {_size(memory.outside)})"
        )
    return f"gpu_memory_utilization={share:g} allows {_size(int(share * memory.total))} of {_size(memory.total)}"


def _advice(memory: DeviceMemory, config: EngineConfig, dtype: str, needed: int) -> str:
    """Return every change, with its value, that would make `needed` bytes fit beside our memory."""
    missing = memory.ours + needed - _limit(memory, config)
    ways = []
    share = math.ceil(100 * (memory.ours + needed) / memory.total) / 100
    if share <= MOST_UTILIZATION and memory.ours + needed <= memory.total - memory.outside - SPARE:
        ways.append(f"--gpu-memory-utilization {share:g}")
    batch = config.scheduler
    for flag, value, each, least in (
        ("--max-num-seqs", batch.sequences(), memory.per_seq, 1),
        ("--max-num-batched-tokens", batch.token_budget(CUDA_TOKENS), memory.per_token, batch.sequences()),
    ):
        lower = value - math.ceil(missing / each) if each else 0
        if lower >= least:
            ways.append(f"{flag} {lower}")
    if dtype == "float32" and missing <= memory.weights // 2:
        ways.append("--dtype bfloat16")
    if memory.outside > GIB // 2 and missing <= memory.outside:
        ways.append("without the other processes on this GPU")
    spread = math.ceil((memory.ours + needed) / max(1, int(MOST_UTILIZATION * memory.total)))
    larger = f"a GPU with {(memory.ours + needed) / config.cache.gpu_memory_utilization / GIB:.0f} GiB"
    last = "a smaller model" + (f", or {larger}" if spread > 1 else "")
    return f"{', or '.join([*ways, last])}."


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / 2**20:.0f} MiB"
