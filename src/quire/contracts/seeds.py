"""Seeds of the n completions of a request. Knows nothing of the noise that is drawn with them; never imports torch."""

import hashlib

SEED_BITS = 64


def child_seed(seed: int, index: int) -> int:
    """Return the uint64 seed of completion `index` (0-based) of a request with `n` > 1 and the seed `seed`.

    Completion 0 keeps the request's seed, so `n=1` gives the first completion of any larger n. Every other completion
    has the first eight bytes of sha256 over (seed, index), two little-endian uint64: unrelated for neighbouring seeds.
    """
    assert 0 <= seed < 1 << SEED_BITS and index >= 0, f"child_seed({seed}, {index}): seed is a uint64, index >= 0"
    if index == 0:
        return seed
    digest = hashlib.sha256(seed.to_bytes(8, "little") + index.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little")
