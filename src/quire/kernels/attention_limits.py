"""Limits of kernels that plans need, too. No torch."""

MOST_SEQUENCES = 4096  # of a step: the most that the attention plan's kernel is compiled for
PREFILL_DIMS = (64, 128, 256, 512)  # head sizes of Hopper's prefill kernel
PREFILL_TILE = 64  # keys: the kernel needs blocks of whole tiles
SCRATCH = 512 << 20  # bytes for keys and values that prompts read: 131,072 tokens of 8 heads of 128; 0.7% of 80 GB


def widened_blocks(kv_heads: int, head_dim: int, block_size: int) -> int:
    """Return the most blocks of an 8-bit KV cache that a layer widens to two bytes for Hopper's prefill kernel.

    0 for sizes that the kernel does not support.
    """
    supported = head_dim in PREFILL_DIMS and block_size % PREFILL_TILE == 0
    return SCRATCH // (4 * kv_heads * head_dim * block_size) if supported else 0
