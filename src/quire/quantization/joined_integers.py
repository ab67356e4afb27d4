"""The scheme that holds the numbers of integers of several schemes, for experts that lie in one stack. No torch."""

from collections.abc import Sequence
from math import gcd

from msgspec.structs import replace

from quire.contracts.scheme import Scheme


def are_integers(scheme: Scheme) -> bool:
    """True for weights of 4- and 8-bit integers whose activations are not quantized."""
    return scheme.values in ("w4", "w8") and not scheme.inputs


def common_scheme(schemes: Sequence[Scheme]) -> Scheme:
    """Return the scheme of integers in which matrices of all these schemes have the same numbers.

    Values have the most bits, groups are the largest that divide all, and there are zero points if any scheme has some:
    4 bits in groups of 128 and 8 bits in groups of 32 become 8 bits in groups of 32.
    """
    first = max(schemes, key=lambda scheme: scheme.bits)
    wide = gcd(*(scheme.block[1] for scheme in schemes))  # 0: the whole row
    return replace(first, block=(1, wide), zeros=any(scheme.zeros for scheme in schemes))
