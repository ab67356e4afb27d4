"""Rendezvous hashing with weights and bounded load: routers that know the same backends choose the same one.

Every backend gets a score for a key from a hash of both; the highest one is the key's home. A backend that goes away
moves its own keys alone, since all other scores stay. A backend that is beyond its share of the load is left out, and
the key goes to the next score. No state: a restarted router chooses as before.

    score = -weight / ln(u)     u in (0, 1): the hash. A backend is the home of weight / all weights of the keys
"""

import math
from collections.abc import Collection
from hashlib import blake2b
from typing import Protocol, TypeVar

LEAST_BOUND = 8  # requests of a backend that are never too many: batches of a few requests cost it little
MASK = 2**64 - 1


class Placed(Protocol):
    """A backend, as far as hashing knows it. seed: hash of its URL"""

    seed: int
    weight: float
    in_flight: int


One = TypeVar("One", bound=Placed)


def hash_of(data: bytes) -> int:
    """Return 64 bits, the same in every process."""
    return int.from_bytes(blake2b(data, digest_size=8).digest())


def score(seed: int, key: int, weight: float) -> float:
    """Return the score of a backend for a key. seed: hash of the backend's URL"""
    mixed = (seed ^ key) * 0xBF58476D1CE4E5B9 & MASK  # the finalizer of splitmix64: a multiplication carries upwards
    mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EB & MASK  # alone, so that the upper half is mixed into the lower
    mixed ^= mixed >> 29
    return -weight / math.log(((mixed >> 12) + 0.5) * 2**-52)  # 52 bits and a half: neither 0 nor 1


def home(key: int, backends: Collection[One]) -> One:
    """Return the backend with the highest score."""
    return max(backends, key=lambda backend: score(backend.seed, key, backend.weight))


def place(key: int, backends: Collection[One], bound: float) -> tuple[One, bool]:
    """Return the backend with the highest score among those that are not beyond their share of the load.

    bound   times the even share of the requests in flight that a backend may have
    True is returned with it if the home of the key had more than its share.
    """
    first = home(key, backends)
    if first.in_flight < LEAST_BOUND:
        return first, False
    share = bound * (1 + sum(backend.in_flight for backend in backends)) / sum(backend.weight for backend in backends)
    if first.in_flight + 1 <= share * first.weight:
        return first, False
    free = [one for one in backends if one.in_flight + 1 <= max(LEAST_BOUND, share * one.weight)]
    return home(key, free or backends), True
