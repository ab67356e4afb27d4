"""Paged attention on Hopper (compute capability 9.0): the Triton kernels, and a warp-specialized prefill in Gluon."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView, triton
from quire.kernels.attention.eight_bits import is_coded
from quire.kernels.attention.hopper_prefill import prefill_kernel
from quire.kernels.attention.triton_plan import SEQUENCE, TABLE_ROW, TILE_WORDS, Plan, multiprocessors
from quire.kernels.attention.triton_widen import find_pages, widen
from quire.kernels.attention_limits import PREFILL_DIMS, PREFILL_TILE, widened_blocks
from quire.kernels.triton_runtime import descriptors, gl


@dataclass(frozen=True)
class Tiling:
    """The tiling of the prefill kernel for a head size. Queries and all stages fill shared memory.

    rows     rows of a tile of queries
    keys     keys of an iteration, at most
    stages   tiles of keys, and of values, in shared memory
    """

    rows: int
    keys: int
    stages: int


TILINGS = {  # two stages of heads of 128 are up to 4% slower over long contexts (H200, docs/log.md)
    64: Tiling(128, 128, 3),
    128: Tiling(128, 128, 3),
    256: Tiling(128, 64, 2),
    512: Tiling(64, 32, 2),
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
    return _Call(q, kv, meta, scale, window, soft_cap, sinks).run()


class _Call(triton.AttentionCall):
    """A call that uses the Hopper prefill if it can, else the Triton one.

    Conditions: blocks of whole tiles of keys, a head size of PREFILL_DIMS, consecutive rows of each sequence, and no
    attention in chunks. The pages of an 8-bit cache are copied to a scratch before, see `triton_widen.find_pages`; not
    of a step with few rows.
    """

    @property
    def _fits(self) -> bool:
        q, kv = self.q, self.kv
        dim, size, group = q.shape[2], kv.block_size, q.shape[1] // kv.k.shape[1]
        strange = self.meta.row_positions is not None or q.element_size() != 2 or q.stride(1) != dim
        strange = strange or (self.window or 0) < 0
        if strange or dim not in PREFILL_DIMS or 64 % group or size % PREFILL_TILE:
            return False
        return not is_coded(kv.k) or len(q) * q.shape[1] // TILINGS[dim].rows >= multiprocessors()

    def prefill_config(self, padded: int) -> triton.Config:
        """Return the tiling of the prefill kernel: tiles of Hopper's rows, however few, if its kernel can run."""
        if not self._fits:
            return super().prefill_config(padded)
        return replace(triton.PREFILL[padded], rows=TILINGS[padded].rows)

    def _divides(self, config: triton.Config) -> bool:
        """Return False for copied pages: no rehearsal runs a step between divided and copied ones."""
        return not (self._fits and is_coded(self.kv.k)) and super()._divides(config)

    def prefill(self, plan: Plan, out: Tensor, config: triton.Config) -> None:
        """Launch attention of sequences with more rows than a decode, into `out`. See `triton.AttentionCall`."""
        kv = self.kv
        kv_heads, dim, size = kv.k.shape[1], self.q.shape[2], kv.block_size
        group = self.q.shape[1] // kv_heads
        if not self._fits:
            super().prefill(plan, out, config)
            return
        assert config.rows == TILINGS[dim].rows, "the plan has other tiles than the kernel"
        if not is_coded(kv.k):
            self._launch(plan, out, TABLE_ROW, None)
        elif found := find_pages(self.meta, size, self.window, group, widened_blocks(kv_heads, dim, size)):
            wide = widen(kv, found, self.meta, self.q.dtype)
            own = replace(self, kv=wide, meta=replace(self.meta, block_tables=found.table))
            own._launch(plan, out, SEQUENCE, kv.v_scale)
        else:
            super().prefill(plan, out, config)

    def _launch(self, plan: Plan, out: Tensor, row: int, v_scale: float | None) -> None:
        """Launch Hopper's kernel. row: word of a tile that is its row of the block tables; v_scale: of the values."""
        q, kv = self.q, self.kv
        dim, kv_heads, size = q.shape[2], kv.k.shape[1], kv.block_size
        group = q.shape[1] // kv_heads
        tiling = TILINGS[dim]
        tile, width = tiling.keys if size % tiling.keys == 0 else PREFILL_TILE, dim * tiling.rows // 128
        block, head, _token, table, scale, cap = self.numbers()
        prefill_kernel[(min(multiprocessors(), len(plan.tiles) * kv_heads),)](
            out,
            describe(q, [tiling.rows // group, group, width]),
            *(_rows(side, tile, width) for side in (kv.k, kv.v)),
            self.meta.block_tables,
            plan.tiles,
            self.sinks,
            out.stride(0),
            block // dim,
            head // dim,
            table,
            scale,
            cap,
            v_scale,
            GROUP=group,
            SIZE=size,
            TILE=tile,
            D=dim,
            STAGES=tiling.stages,
            PARTS=dim // width,
            WINDOW=self.window or 0,
            CAPPED=self.soft_cap is not None,
            WORDS=TILE_WORDS,
            ROW=row,
            **self.parts(plan),
            num_warps=4,
            maxnreg=168,
        )


def _rows(side: Tensor, tile: int, width: int) -> object:
    """Describe a cache's keys or values as rows [R, D] from the first row of block 0 on, for the copy engine (TMA).

    tile, width   rows and columns of a copy
    Rows between the blocks of this layer (other layers' pages) are never read.
    """
    blocks, heads, size, dim = side.shape
    last = (blocks - 1) * side.stride(0) + (heads - 1) * side.stride(1) + size * dim
    assert side.stride()[2:] == (dim, 1) and side.stride(0) % dim == 0 and side.stride(1) % dim == 0
    return describe(side, [tile, width], (last // dim, dim))


def describe(base: Tensor, box: list[int], rows: tuple[int, int] | None = None) -> object:
    """Return a descriptor of a tensor for the copy engine (TMA).

    box    shape of the tile that one copy reads
    rows   (R, D): describe the tensor's memory as R contiguous rows of D; None: by its own shape and strides
    """
    shape, strides = (base.shape, base.stride()) if rows is None else (rows, (rows[1], 1))
    types = {1: gl.float8e4nv, 2: gl.bfloat16, 4: gl.int32}  # nothing but their widths matters
    layout = gl.NVMMASharedLayout.get_default_for(box, types[base.element_size()])
    return descriptors.TensorDescriptor(base, list(shape), list(strides), box, layout)
