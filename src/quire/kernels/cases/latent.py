"""Cases of decodes with latent attention: to all tokens and to chosen ones, from caches of numbers and of rows."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from quire.args.latent import LatentArgs
from quire.kernels.attention import AttentionMeta
from quire.kernels.cases import KernelCase, KernelSetup, Pair
from quire.kernels.latent import LatentView, ref
from quire.kernels.latent.rows import row_view, write_rows
from quire.kernels.latent_rows import DS_MLA, FEATURE, latent_row
from quire.kernels.select import KernelNeeds, load_kernel, select

DEEPSEEK = (128, 512, 64)  # heads, latent and rotated key of DeepSeek-V3; GLM-5 has as wide latents
RANKS = 8  # heads are also divided among so many ranks, where each has eight or more
TOP_K = 2048  # chosen tokens of a row
DRAWN = 64  # blocks with numbers of their own; others repeat them


def latent_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield decodes with all heads, and with those of a rank; of DeepSeek-V3, if the model has no latent attention."""
    own = next((one for one in setup.args.mixers if isinstance(one, LatentArgs)), None)
    heads, width, turned = (own.num_heads, own.kv_rank, own.rope_dim) if own else DEEPSEEK
    counts = (heads // RANKS, heads) if heads >= 8 * RANKS else (heads,)
    name = str(setup.dtype).removeprefix("torch.")
    stored = {name: (width + turned) * setup.item, DS_MLA: latent_row(width, turned).size}  # bytes of a token
    for count, chosen, (seqs, context), (cache, size) in product(counts, (False, True), setup.latent, stored.items()):
        few = min(TOP_K, context)
        read = seqs * (few if chosen else context)
        yield KernelCase(
            shape=f"{cache}: {seqs} x 1 of {context}{f', {few} chosen' if chosen else ''}, {count}x{width}+{turned}",
            num_bytes=read * size + seqs * count * (2 * width + turned) * setup.item,
            flops=2 * read * count * (2 * width + turned),
            make=partial(_pairs, setup, (count, width, turned), seqs, context, chosen, cache == DS_MLA),
        )


def _pairs(
    setup: KernelSetup, sizes: tuple[int, int, int], seqs: int, context: int, chosen: bool, rows: bool, count: int
) -> list[Pair]:
    (heads, width, turned), blocks, device = sizes, -(-context // setup.block_size), setup.device
    needs = KernelNeeds(
        device=device.type,
        dtype=str(setup.dtype).removeprefix("torch."),
        features=frozenset({"chosen", FEATURE}),
    )
    kernel = setup.kernels.latent or load_kernel("latent", select("latent", needs).name)
    i32: Any = {"dtype": torch.int32, "device": device}
    meta = AttentionMeta(
        query_start=torch.arange(seqs + 1, **i32),
        seq_lens=torch.full((seqs,), context, **i32),
        block_tables=torch.randperm(seqs * blocks, **i32).view(seqs, blocks),
        kv_slots=torch.zeros(seqs, dtype=torch.int64, device=device),
        table_rows=torch.arange(seqs, **i32),
        max_query_len=1,
        decode_len=1,
    )
    few = min(TOP_K, context)
    positions = torch.stack([torch.randperm(context, **i32)[:few].sort().values for _ in range(seqs)])
    more = (positions,) if chosen else ()

    def pair() -> Pair:
        cache = _cache(setup, width, turned, seqs * blocks, rows)
        q, q_rope = setup.randn(seqs, heads, width, scale=width**-0.5), setup.randn(seqs, heads, turned)
        given = q, q_rope, cache, meta, (width + turned) ** -0.5, *more
        run, expected = ((one.chosen if chosen else one.absorbed) for one in (kernel, ref))
        return Pair(partial(run, *given), None, partial(expected, *given))

    return [pair() for _ in range(count)]


def _cache(setup: KernelSetup, width: int, turned: int, blocks: int, rows: bool) -> LatentView:
    """Return a cache of random latents of about 1, in rows or as numbers."""
    size = setup.block_size
    drawn, every = min(DRAWN, blocks), torch.arange(blocks, device=setup.device) % DRAWN
    latent, rope = setup.randn(drawn * size, width), setup.randn(drawn * size, turned)
    if not rows:
        pages, keys = (side.view(drawn, 1, size, side.shape[1])[every] for side in (latent, rope))
        return LatentView(pages, keys)
    raw = torch.zeros(drawn, 1, size, latent_row(width, turned).size, dtype=torch.uint8, device=setup.device)
    write_rows(latent, rope, row_view(raw, width, turned), torch.arange(drawn * size, device=setup.device))
    return row_view(raw[every], width, turned)
