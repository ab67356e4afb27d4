"""Paged attention on NVIDIA GPUs: few rows per sequence (triton_decode), many (triton_prefill), and decodes that share
the beginning of their context (triton_prefix), over work lists made once per step (triton_plan).

Beyond the contract, `fresh_attention` reads keys and values from the step's own rows. Heads of 64 and 128 are what
this is made for; others up to 256 are right. Nothing is read from the device, so a step can be captured.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.attention.triton_decode import decode_kernel
from quire.kernels.attention.triton_plan import (
    ITEM_WORDS,
    MAX_PARTS,
    PREFIX_ROWS,
    TILE_WORDS,
    Plan,
    Shape,
    plan_step,
)
from quire.kernels.attention.triton_prefill import prefill_kernel
from quire.kernels.attention.triton_prefix import prefix_kernel
from quire.kernels.attention.triton_tiles import LOG2E
from quire.kernels.select import Support
from quire.kernels.triton_runtime import INTERPRETED, jit, missing, tl

SUPPORT = Support(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({"float32", "bfloat16", "float16"}),
    features=frozenset({"window", "soft_cap", "sinks"}),
    missing=missing(),
    max_head_dim=256,
)


@dataclass(frozen=True)
class Config:
    """How a kernel is cut: query rows of a tile, keys of an iteration, warps, iterations in flight, whether the copy
    engine of Hopper and later reads unmasked tiles (else, and elsewhere, threads do), and how many programs of a decode
    run on a multiprocessor at the same time."""

    rows: int
    keys: int
    warps: int
    stages: int
    copy_engine: bool = False
    programs: int = 2


# By head dimension padded to a power of two, for two-byte elements; four-byte ones get half the tiles.
# The decodes and the prefill of 128 are the best of ten cuts each, measured on an H200 (docs/log.md).
DECODE = {64: Config(16, 64, 4, 4), 128: Config(16, 64, 4, 3, programs=3), 256: Config(16, 32, 4, 3)}
DECODE_MANY = Config(16, 64, 4, 2, programs=4)  # heads of 128, for as many sequences:
MANY = range(16, 129)
PREFILL = {64: Config(128, 128, 8, 3, True), 128: Config(128, 128, 8, 3, True), 256: Config(64, 64, 8, 2)}
PREFILL_FEW = Config(64, 64, 4, 2)  # when larger tiles would leave multiprocessors idle
PREFIX = {64: Config(PREFIX_ROWS, 64, 8, 3), 128: Config(PREFIX_ROWS, 64, 8, 3), 256: Config(PREFIX_ROWS, 32, 8, 2)}


def write_kv(k: Tensor, v: Tensor, kv: KVView, kv_slots: Tensor) -> None:
    """See `quire.kernels.attention`."""
    tokens, heads, dim = k.shape
    assert k.stride()[1:] == (dim, 1) and v.stride() == k.stride() and kv.k.stride() == kv.v.stride()
    if tokens:
        _write_kernel[(tokens,)](
            k, v, kv.k, kv.v, kv_slots, k.stride(0), kv.k.stride(0), kv.k.stride(1), kv.k.stride(2),
            SIZE=kv.block_size, D=dim, WIDTH=heads * dim, BLOCK=_power(heads * dim), num_warps=4,
        )  # fmt: skip


def paged_attention(
    q: Tensor,
    kv: KVView,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `quire.kernels.attention`."""
    return _Call(q, kv.k, kv.v, kv.block_size, meta, scale, window, soft_cap, sinks).run()


def fresh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` for a step in which query_len == seq_len for every sequence: k, v [T, Hkv, D] are read instead
    of the cache, which need not hold them yet."""
    assert k.stride() == v.stride()
    return _Call(q, k, v, 0, meta, scale, window, soft_cap, sinks).run()


@dataclass(frozen=True)
class _Call:
    """One call: keys and values are [num_blocks, Hkv, size, D] views of blocks or, with size 0, rows [T, Hkv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    size: int
    meta: AttentionMeta
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None

    def run(self) -> Tensor:
        """Launch what the step may need."""
        q = self.q
        tokens, heads, dim = q.shape
        assert q.stride()[1:] == (dim, 1) and self.k.stride(-1) == 1 and self.k.stride() == self.v.stride()
        group = heads // self.k.shape[1]
        padded = max(16, _power(dim))
        many = padded == 128 and len(self.meta.seq_lens) in MANY
        chosen = DECODE_MANY if many else DECODE[max(64, padded)]
        decode, prefill = (self._fit(c) for c in (chosen, self._prefill_config(padded)))
        shape = Shape(heads, group, dim, self.size, self.window or 0, self.size == 0, decode.keys, prefill.rows,
                      decode.programs)  # fmt: skip
        out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
        if not tokens:
            return out
        plan = plan_step(self.meta, shape, tokens)
        if len(plan.items):
            if plan.shared is not None:
                self._prefix(plan, self._fit(PREFIX[max(64, padded)]))
            self._decode(plan, out, decode)
        if len(plan.tiles):
            self._prefill(plan, out, prefill)
        return out

    def _prefill_config(self, padded: int) -> Config:
        config = PREFILL[max(64, padded)]
        tiles = len(self.q) * self.q.shape[1] // config.rows
        return config if tiles >= _multiprocessors() or config.rows <= PREFILL_FEW.rows else PREFILL_FEW

    def _fit(self, config: Config) -> Config:
        """`config` for this dtype and block size: blocks of 64 and more hold whole tiles of keys."""
        half = 2 if self.q.dtype == torch.float32 else 1
        keys = max(16, config.keys // half)
        group = self.q.shape[1] // self.k.shape[1]
        return Config(
            max(16, _power(group), config.rows // half),
            min(keys, self.size) if self.size >= 64 else keys,
            config.warps,
            config.stages,
            config.copy_engine and self.size >= 64 and self.q.shape[2] in (64, 128) and _has_copy_engine(),
            config.programs,
        )

    def _options(self, config: Config) -> dict[str, object]:
        """Constants that every kernel takes."""
        dim = self.q.shape[2]
        return {
            "CAPPED": self.soft_cap is not None, "EXACT": "ieee" if self.q.dtype == torch.float32 else "tf32",
            "SIZE": self.size, "TILE": config.keys, "D": dim, "DP": max(16, _power(dim)),
            "GROUP": self.q.shape[1] // self.k.shape[1], "num_warps": config.warps, "num_stages": config.stages,
        }  # fmt: skip

    def _numbers(self) -> tuple[int | float, ...]:
        """Strides of keys and block tables, then scale and cap as `triton_tiles.rescore` wants them."""
        block = 0 if self.size == 0 else self.k.stride(0)
        token = self.k.stride(0) if self.size == 0 else self.k.stride(2)
        table = self.meta.block_tables.stride(0)
        if self.soft_cap is None:
            return block, self.k.stride(1), token, table, self.scale * LOG2E, 0.0
        return block, self.k.stride(1), token, table, self.scale / self.soft_cap, self.soft_cap * LOG2E

    def _decode(self, plan: Plan, out: Tensor, config: Config) -> None:
        group, kv_heads = self.q.shape[1] // self.k.shape[1], self.k.shape[1]
        rows = plan.limit * group
        decode_kernel[(len(plan.items), kv_heads)](
            self.q, out, self.k, self.v, self.meta.block_tables, plan.items, plan.counters, plan.sums, plan.stats,
            self.sinks, self.q.stride(0), out.stride(0), *self._numbers(), WINDOW=self.window or 0, ROWS=rows,
            M=max(16, _power(rows)), HEADS=kv_heads, ITEM_WORDS=ITEM_WORDS,
            PARTS=MAX_PARTS if plan.shared is None else 2 * MAX_PARTS, SHARED=plan.shared is not None,
            **self._options(config),
        )  # fmt: skip

    def _prefill(self, plan: Plan, out: Tensor, config: Config) -> None:
        described = (
            (_describe(self.k, config.keys), _describe(self.v, config.keys)) if config.copy_engine else (None,) * 2
        )
        prefill_kernel[(len(plan.tiles), self.k.shape[1])](
            self.q, out, self.k, self.v, *described, self.meta.block_tables, plan.tiles, self.sinks, self.q.stride(0),
            out.stride(0), *self._numbers(), WINDOW=self.window or 0, M=config.rows, TILE_WORDS=TILE_WORDS,
            **self._options(config),
        )  # fmt: skip

    def _prefix(self, plan: Plan, config: Config) -> None:
        shared, meta = plan.shared, self.meta
        assert shared is not None
        group, kv_heads = self.q.shape[1] // self.k.shape[1], self.k.shape[1]
        rows, groups = plan.limit * group, len(shared.starts) - 1
        lanes = config.rows if len(shared.members) * rows > 32 else 32
        num_tiles = len(shared.members) * rows // lanes + groups
        prefix_kernel[(num_tiles, kv_heads, plan.prefix_parts)](
            self.q, self.k, self.v, meta.block_tables, meta.table_rows, meta.query_start, meta.seq_lens, shared.starts,
            shared.members, shared.blocks, plan.sums, plan.stats, groups, len(plan.items), plan.prefix_parts,
            self.q.stride(0), *self._numbers(), ROWS=rows, M=lanes, HEADS=kv_heads, WIDTH=max(8, _power(groups)),
            **self._options(config),
        )  # fmt: skip


def _describe(side: Tensor, keys: int) -> object:
    """A cache's tiles [1, 1, keys, D] for the copy engine."""
    tools = importlib.import_module("triton.tools.tensor_descriptor")
    return tools.TensorDescriptor(side, list(side.shape), list(side.stride()), [1, 1, keys, side.shape[3]])


def _power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@functools.cache
def _multiprocessors() -> int:
    return 4 if INTERPRETED else torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@functools.cache
def _has_copy_engine() -> bool:
    return INTERPRETED or torch.cuda.get_device_capability()[0] >= 9


@jit
def _write_kernel(
    k, v, k_cache, v_cache, slots, stride, stride_block, stride_head, stride_token,
    SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < WIDTH
    source = row * stride + lanes
    target = slot // SIZE * stride_block + slot % SIZE * stride_token + lanes // D * stride_head + lanes % D
    tl.store(k_cache + target, tl.load(k + source, mask=inside), mask=inside)
    tl.store(v_cache + target, tl.load(v + source, mask=inside), mask=inside)
