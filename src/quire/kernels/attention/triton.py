"""Paged attention on NVIDIA GPUs: the launches of three kernels over work lists (triton_plan), made once per step.

    triton_decode    sequences of few rows
    triton_prefill   sequences of many rows, and the sum of their parts
    triton_prefix    decodes that share the beginning of their context

Tuned for heads of 64, 128 and 256; correct up to 512. The host reads nothing from the device: a step can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.attention.eight_bits import is_coded
from quire.kernels.attention.triton_decode import decode_kernel
from quire.kernels.attention.triton_plan import (
    ITEM_WORDS,
    MAX_PARTS,
    PREFIX_ROWS,
    TILE_WORDS,
    Plan,
    Shape,
    multiprocessors,
    plan_step,
    shared_memory,
)
from quire.kernels.attention.triton_prefill import merge_kernel, prefill_kernel
from quire.kernels.attention.triton_prefix import prefix_kernel
from quire.kernels.attention.triton_tiles import LOG2E


@dataclass(frozen=True)
class Config:
    """The tiling of an attention kernel.

    rows       query rows of a tile (tokens times query heads of a KV head)
    keys       keys of an iteration
    stages     iterations in flight (num_stages of Triton)
    programs   programs that run on a multiprocessor at the same time
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 2


# By head size padded to a power of two, for two-byte elements; tiles of four-byte elements are half as large. Those for
# heads of 128, 256 and 512 are the best of about ten, measured on an H200 (docs/log.md).
DECODE = {
    64: Config(16, 64, 4, 4),
    128: Config(16, 64, 4, 3, programs=3),
    256: Config(16, 64, 4, 2),
    512: Config(16, 32, 4, 2),
}
DECODE_FEW = {  # if sequences * KV heads are at most as many as its programs on all multiprocessors
    128: Config(16, 128, 4, 2),
    256: Config(16, 128, 8, 2, programs=1),
    512: Config(16, 64, 8, 2, programs=1),
}
DECODE_MANY, MANY = Config(16, 64, 4, 2, programs=4), 1024  # heads of 128, if sequences * KV heads <= MANY
DECODE_OWN = Config(16, 32, 2, 3, programs=6)  # heads of 128, in steps with shared prefixes: the rest is short
PREFILL = {
    64: Config(128, 64, 8, 3, 1),
    128: Config(128, 64, 8, 3, 1),
    256: Config(128, 64, 8, 2, 1),
    512: Config(64, 32, 8, 2, 1),
}
PREFILL_FEW = Config(64, 64, 4, 2)  # heads up to 128, when larger tiles would leave multiprocessors idle
MERGED, SHARES = 16, 2  # lanes that a program of `merge_kernel` adds at a time; programs for each part
PREFIX = {
    64: Config(PREFIX_ROWS, 64, 4, 3),
    128: Config(PREFIX_ROWS, 64, 4, 3),
    256: Config(PREFIX_ROWS, 32, 8, 2),
    512: Config(PREFIX_ROWS, 32, 8, 2),
}


def paged_attention(
    q: Tensor,
    kv: KVView,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of query rows over the paged cache. See `quire.kernels.attention`."""
    return AttentionCall(q, kv, meta, scale, window, soft_cap, sinks).run()


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of a call of `paged_attention`. `run` launches its kernels."""

    q: Tensor
    kv: KVView
    meta: AttentionMeta
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None

    def run(self) -> Tensor:
        """Launch the kernels for the sequences of the step. Return the attention [T, Hq, D]."""
        q = self.q
        tokens, heads, dim = q.shape
        assert self.meta.row_positions is None or not self.meta.decode_len, "a decode's row is its sequence's last"
        k, size = self.kv.k, self.kv.block_size
        assert q.stride()[1:] == (dim, 1) and k.stride(-1) == 1 and k.stride() == self.kv.v.stride()
        group = heads // k.shape[1]
        padded = max(16, _power(dim))
        decode = self._fit(self._decode_config(padded), max(1, self.meta.decode_len) * group)
        prefill = self._fit(self.prefill_config(padded))
        shape = Shape(
            heads,
            group,
            dim,
            size,
            self.window or 0,
            decode.keys,
            prefill.rows,
            decode.programs,
            dividing=prefill.programs if self._divides(prefill) else 0,
        )
        out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
        if not tokens:
            return out
        plan = plan_step(self.meta, shape, tokens)
        if len(plan.items):
            if plan.shared is not None:
                self._prefix(plan, self._fit(PREFIX[max(64, padded)]))
            self._decode(plan, out, decode)
        if len(plan.tiles):
            self.prefill(plan, out, prefill)
            if len(plan.divided):
                self._merge(plan, out, prefill)
        return out

    def _decode_config(self, padded: int) -> Config:
        programs = len(self.meta.seq_lens) * self.kv.k.shape[1]
        if self.meta.shared is not None:
            return DECODE_OWN if padded == 128 else DECODE[max(64, padded)]
        few = DECODE_FEW.get(padded)
        if few is not None and programs <= few.programs * multiprocessors():
            return few
        return DECODE_MANY if padded == 128 and programs <= MANY else DECODE[max(64, padded)]

    def prefill_config(self, padded: int) -> Config:
        """Return the tiling of the prefill kernel. padded: head size padded to a power of two."""
        config = PREFILL[max(64, padded)]
        tiles = len(self.q) * self.q.shape[1] // config.rows
        return config if tiles >= multiprocessors() or padded > 128 else PREFILL_FEW

    def _divides(self, config: Config) -> bool:
        """Return True if tiles of queries are so few that their contexts may be divided among programs.

        The answer depends on the number of the step's rows alone, as the choice of the tiling: a CUDA graph does not
        know contexts, and every kernel is compiled before requests come. The plan's kernel knows the contexts.
        """
        tiles = len(self.q) * self.q.shape[1] // config.rows
        return self.meta.row_positions is None and tiles < 2 * config.programs * multiprocessors()

    def _fit(self, config: Config, needed: int = 1) -> Config:
        """Fit a tiling to this dtype, block size and GPU.

        needed   least number of rows of a tile

        Sizes become powers of two. Blocks of 64 tokens or more hold whole tiles of keys. Tiles of keys are halved while
        shared memory does not hold two stages, down to 32 keys; then tiles of rows, down to 64; then both further. More
        warps keep the sums of a thread at 128 numbers.
        """
        half = 2 if self.q.dtype == torch.float32 else 1
        keys, size = max(16, config.keys // half), self.kv.block_size
        keys = min(keys, 1 << size.bit_length() - 1) if size >= 64 else keys
        least = max(16, _power(max(needed, self.q.shape[1] // self.kv.k.shape[1])))
        rows, dim = max(least, config.rows // half), max(16, _power(self.q.shape[2]))
        held = shared_memory() // (self.q.element_size() * dim)  # rows of queries, keys and values
        for fewest, some in ((32, 64), (16, 16)):
            while keys > fewest and held - rows < _two_stages(rows) * keys:
                keys //= 2
            while rows > max(some, least) and held - rows < _two_stages(rows) * keys:
                rows //= 2
        stages = max((held - rows) // (2 * keys), 1 + (held - rows >= _two_stages(rows) * keys))
        warps = max(config.warps, min(16, rows * dim >> 12))
        return replace(config, rows=rows, keys=keys, stages=min(config.stages, stages), warps=warps)

    def _options(self, config: Config) -> dict[str, object]:
        """Return the constants that every kernel takes."""
        dim = self.q.shape[2]
        return {
            "CAPPED": self.soft_cap is not None,
            "EXACT": "ieee" if self.q.dtype == torch.float32 else "tf32",
            "SIZE": self.kv.block_size,
            "TILE": config.keys,
            "D": dim,
            "DP": max(16, _power(dim)),
            "GROUP": self.q.shape[1] // self.kv.k.shape[1],
            "num_warps": config.warps,
            "num_stages": config.stages,
        }

    def numbers(self) -> tuple[int, int, int, int, float, float]:
        """Return the numeric arguments that all three kernels take: four strides, `scale` and `cap`.

        The strides, in elements, are those of blocks, heads and tokens of the cache, and of rows of the block tables.
        `scale` and `cap` are as in `triton_tiles.rescore`.
        """
        strides = (*self.kv.k.stride()[:3], self.meta.block_tables.stride(0))
        scale = self.scale * self.kv.k_scale
        if self.soft_cap is None:
            return *strides, scale * LOG2E, 0.0
        return *strides, scale / self.soft_cap, self.soft_cap * LOG2E

    @property
    def _v_scale(self) -> float | None:
        return self.kv.v_scale if is_coded(self.kv.v) else None

    def _decode(self, plan: Plan, out: Tensor, config: Config) -> None:
        group, kv_heads = self.q.shape[1] // self.kv.k.shape[1], self.kv.k.shape[1]
        rows = plan.limit * group
        decode_kernel[(len(plan.items), kv_heads)](
            self.q,
            out,
            self.kv.k,
            self.kv.v,
            self.meta.block_tables,
            plan.items,
            plan.counters,
            plan.sums,
            plan.stats,
            self.sinks,
            self.q.stride(0),
            out.stride(0),
            *self.numbers(),
            self._v_scale,
            WINDOW=self.window or 0,
            ROWS=rows,
            M=max(16, _power(rows)),
            HEADS=kv_heads,
            ITEM_WORDS=ITEM_WORDS,
            PARTS=MAX_PARTS if plan.shared is None else 2 * MAX_PARTS,
            SHARED=plan.shared is not None,
            **self._options(config),
        )

    def prefill(self, plan: Plan, out: Tensor, config: Config) -> None:
        """Launch the prefill kernel: it writes the attention of all sequences that are no decodes to `out`."""
        kv = self.kv
        prefill_kernel[(len(plan.tiles), kv.k.shape[1])](
            self.q,
            out,
            kv.k,
            kv.v,
            self.meta.block_tables,
            plan.tiles,
            self.sinks,
            self.meta.row_positions,
            self.q.stride(0),
            out.stride(0),
            *self.numbers(),
            self._v_scale,
            WINDOW=self.window or 0,
            M=config.rows,
            TILE_WORDS=TILE_WORDS,
            **self.parts(plan),
            **self._options(config),
        )

    def parts(self, plan: Plan) -> dict[str, object]:
        """Return the arguments of a prefill kernel for the parts of divided contexts."""
        divided = bool(len(plan.divided))
        return {
            "sums_at": plan.tile_sums if divided else None,
            "stats_at": plan.tile_stats if divided else None,
            "HEADS": self.kv.k.shape[1],
            "DIVIDED": divided,
        }

    def _merge(self, plan: Plan, out: Tensor, config: Config) -> None:
        dim, kv_heads = self.q.shape[2], self.kv.k.shape[1]
        merge_kernel[(len(plan.divided), kv_heads, SHARES)](
            out,
            plan.tiles,
            plan.divided,
            plan.tile_sums,
            plan.tile_stats,
            self.sinks,
            out.stride(0),
            D=dim,
            DP=max(16, _power(dim)),
            GROUP=self.q.shape[1] // kv_heads,
            M=config.rows,
            HEADS=kv_heads,
            PARTS=MAX_PARTS,
            TILE_WORDS=TILE_WORDS,
            LANES=MERGED,
            SHARES=SHARES,
            num_warps=4,
        )

    def _prefix(self, plan: Plan, config: Config) -> None:
        shared, meta = plan.shared, self.meta
        assert shared is not None
        group, kv_heads = self.q.shape[1] // self.kv.k.shape[1], self.kv.k.shape[1]
        rows, groups = plan.limit * group, len(shared.starts) - 1
        lanes = config.rows if len(shared.members) * rows > 32 else min(config.rows, 32)
        num_tiles = len(shared.members) * rows // lanes + groups
        prefix_kernel[(num_tiles, kv_heads, plan.prefix_parts)](
            self.q,
            self.kv.k,
            self.kv.v,
            meta.block_tables,
            meta.table_rows,
            meta.query_start,
            meta.seq_lens,
            shared.starts,
            shared.members,
            shared.blocks,
            plan.sums,
            plan.stats,
            groups,
            len(plan.items),
            plan.prefix_parts,
            self.q.stride(0),
            *self.numbers(),
            self._v_scale,
            ROWS=rows,
            M=lanes,
            HEADS=kv_heads,
            WIDTH=max(8, _power(groups)),
            **self._options(config),
        )


def _power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _two_stages(rows: int) -> int:
    """Return the tiles of keys and values for which two stages need room; with few rows, registers hold one tile."""
    return 4 if rows >= 64 else 3
