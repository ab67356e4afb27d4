"""Noise: exact integers, keyed by (seed, position, stream, global id), the right distribution."""

import math
import random

import pytest
import torch

from quire.contracts.seeds import child_seed
from quire.kernels.sampling import noise, specification
from quire.kernels.sampling.noise import ACCEPT, DRAFT, RECOVER, SAMPLE, NoiseKey

# Known answers of Philox4x32-10 published with the Random123 library: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def key(*seeds: int, position: int = 0, stream: int = SAMPLE) -> NoiseKey:
    bits = [seed - (1 << 64) if seed >> 63 else seed for seed in seeds]
    return NoiseKey(torch.tensor(bits), torch.full((len(seeds),), position), stream)


def on_tensors(counter: tuple[int, ...], philox_key: tuple[int, ...]) -> tuple[int, ...]:
    words = noise.philox4x32(
        tuple(torch.tensor([[c]]) for c in counter), tuple(torch.tensor([[k]]) for k in philox_key)
    )
    return tuple(int(word) for word in words)


@pytest.mark.parametrize(("counter", "philox_key", "expected"), KNOWN)
def test_published_known_answers(counter, philox_key, expected):
    assert specification.philox4x32(counter, philox_key) == expected
    assert on_tensors(counter, philox_key) == expected


def test_tensors_equal_python_integers():
    draw = random.Random(1)
    for _ in range(50):
        counter = tuple(draw.getrandbits(32) for _ in range(4))
        philox_key = tuple(draw.getrandbits(32) for _ in range(2))
        assert on_tensors(counter, philox_key) == specification.philox4x32(counter, philox_key)


def test_words_follow_the_documented_counter_and_key():
    seed, position, stream = 0xFEDCBA9876543210, 31_337, RECOVER
    words = noise.words(key(seed, position=position, stream=stream), 0, 23)
    for token in range(23):
        block = specification.philox4x32((token // 4, position, stream, 0), (seed & 0xFFFFFFFF, seed >> 32))
        assert int(words[0, token]) == block[token % 4]


@pytest.mark.parametrize("bounds", [(0, 64), (1, 63), (7, 9), (250_000, 250_013), (3, 4)])
def test_a_shard_draws_what_the_whole_vocabulary_draws(bounds):
    start, end = bounds
    both = key(5, 2**64 - 1, position=9)
    assert torch.equal(noise.words(both, start, end - start), noise.words(both, 0, end)[:, start:])
    assert torch.equal(noise.gumbel(both, start, end - start), noise.gumbel(both, 0, end)[:, start:])


def test_candidates_draw_what_the_whole_vocabulary_draws():
    three = NoiseKey(torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30]))
    ids = torch.randint(0, 50_000, (3, 999), generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise.gumbel_at(three, ids), noise.gumbel(three, 0, 50_000).gather(1, ids))


def test_a_row_draws_the_same_alone_and_in_a_batch_of_any_size():
    rows, vocab = 70, 4_099
    many = NoiseKey(torch.arange(rows), torch.arange(rows) * 3)
    together = noise.gumbel(many, 0, vocab)
    for row in (0, 1, 33, rows - 1):
        assert torch.equal(noise.gumbel(many.rows(slice(row, row + 1)), 0, vocab)[0], together[row])


def test_every_part_of_the_key_matters():
    base = noise.words(key(1, position=5), 0, 64)
    others = [key(2, position=5), key(1 << 32 | 1, position=5), key(1, position=6)]
    others += [key(1, position=5, stream=stream) for stream in (ACCEPT, RECOVER, DRAFT)]
    for other in others:
        assert (noise.words(other, 0, 64) != base).float().mean() > 0.95


def test_uniform_is_inside_the_open_interval_at_both_ends():
    ends = noise.uniform(torch.tensor([[0, 0xFFFFFFFF]]))
    assert ends.tolist() == [[2.0**-33, 1 - 2.0**-33]]
    assert torch.isfinite(noise.exponential(torch.tensor([[0, 0xFFFFFFFF]]))).all()


def test_uniform_and_gumbel_moments():
    wide = key(77, position=3)
    sample = noise.uniform(noise.words(wide, 0, 200_000))
    counts = torch.histc(sample.float(), bins=50, min=0.0, max=1.0)
    assert ((counts - 4000) ** 2 / 4000).sum() < 85.4  # chi-square, 49 degrees of freedom, p = 0.001
    gumbel = noise.gumbel(wide, 0, 200_000).double()
    assert abs(float(gumbel.mean()) - 0.5772157) < 0.015
    assert abs(float(gumbel.var()) - math.pi**2 / 6) < 0.03


def test_children_of_a_seed_are_distinct_and_child_zero_is_the_request_itself():
    seeds = {child_seed(parent, index) for parent in (0, 1, 2**64 - 1) for index in range(1000)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert child_seed(42, 0) == 42
    assert child_seed(42, 1) == 0x0D003F0283B253C9
