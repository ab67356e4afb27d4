"""Layout of a token in an FP8 cache of latents with scales of their own (fp8_ds_mla, DeepSeek-V3.2). No torch.

    | L codes e4m3 | pad to 4 | a float32 scale for each TILE codes | R rotated numbers, bfloat16 |

With L 512 and R 64 these are 656 bytes. value = code * scale. Tokens of a block follow each other without gaps, as
FlashMLA reads them in blocks of 64.
"""

from typing import NamedTuple

DS_MLA = "fp8_ds_mla"  # value of kv_cache_dtype
FEATURE = "ds_mla cache"  # of kernels that read and write it
TILE = 128  # codes that share a scale
TAIL = 16  # bytes behind the sums of a head in a part of a divided context: its lse; so heads begin at 16 bytes


class LatentRow(NamedTuple):
    """Byte offsets in a row, and its size.

    scales, rope   offsets of the scales and of the rotated numbers; codes begin at 0
    tiles          number of scales
    """

    scales: int
    tiles: int
    rope: int
    size: int


def latent_row(kv_rank: int, rope_dim: int) -> LatentRow:
    """Return the layout of a row with a latent of `kv_rank` numbers and `rope_dim` rotated ones, an even number."""
    scales, tiles = -(-kv_rank // 4) * 4, -(-kv_rank // TILE)
    rope = scales + 4 * tiles
    return LatentRow(scales, tiles, rope, rope + 2 * rope_dim)
