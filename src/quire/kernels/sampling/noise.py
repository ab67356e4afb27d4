"""Counter-based noise: the same request, position and vocabulary id draw the same number everywhere.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in exact integer
arithmetic on int64 tensors that hold uint32 values.

    key      = the two halves of the request's 64-bit seed, low half first
    counter  = (global vocabulary id // 4, position, stream, 0)
    word     = id % 4 of the four words of that block, so four neighbouring ids share a block

A word w becomes the uniform u = (w + 0.5) * 2^-32, exact in float64 and never 0 or 1. Gumbel noise is -log(-log(u)) in
float64, rounded to float32: an implementation whose logarithm is off by one unit in the last place still rounds to the
same float32 but for about one value in 2^28. The ids that win have u near 1, where the exponential -log(u) still moves
in steps of 2^-32: fine enough that ties do not favour low ids in any vocabulary.

Knows nothing of logits, slots or requests.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SAMPLE, ACCEPT, RECOVER, DRAFT = range(4)  # streams: what the number is for

WORDS = 4  # 32-bit words per counter block
_ROUNDS = 10
_MIXED = 3  # after so many rounds every word depends on all inputs and has the full shape
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_KEY_STEP_0, _KEY_STEP_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_CHUNK = 1 << 17  # words per pass: 256 KiB per intermediate, so that they stay in the cache
_FEW = 1 << 15  # below so many values PyTorch's own operations take no second thread


@dataclass(frozen=True)
class NoiseKey:
    """Which noise each row draws: seeds [R] int64 (the bits of a uint64), positions [R] int64, and the stream."""

    seeds: Tensor
    positions: Tensor
    stream: int = SAMPLE

    def rows(self, index: Tensor | slice) -> "NoiseKey":
        """The keys of some rows."""
        return NoiseKey(self.seeds[index], self.positions[index], self.stream)


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32 on int64 tensors with values in [0, 2^32) that broadcast against each other.

    Products overflow int64 and wrap, which leaves both halves right. Words are broadcast no earlier than the rounds mix
    them (ids differ along a row, positions and keys between rows), so the first two cost a fraction of the rest.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        mix = _mix if number < _MIXED else _mix_in_place
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = mix(product_1 >> 32, k0, c1)
        c2 = mix(product_0 >> 32, k1, c3)
        c1, c3 = product_1, product_0  # high halves are masked away by the next mix
        k0 = (k0 + _KEY_STEP_0) & _MASK
        k1 = (k1 + _KEY_STEP_1) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def _mix(high: Tensor, key: Tensor, other: Tensor) -> Tensor:
    return (high ^ key ^ other) & _MASK


def _mix_in_place(high: Tensor, key: Tensor, other: Tensor) -> Tensor:
    return high.bitwise_xor_(key).bitwise_xor_(other).bitwise_and_(_MASK)


def _blocks(key: NoiseKey, blocks: Tensor) -> tuple[Tensor, ...]:
    """The four words of counter blocks `blocks` ([1, B] or [R, B] int64), each [R, B]."""
    seeds = key.seeds.unsqueeze(1)
    stream = torch.full((1, 1), key.stream, dtype=torch.int64, device=seeds.device)
    counter = (blocks, key.positions.unsqueeze(1), stream, torch.zeros_like(stream))
    return philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))


def words(key: NoiseKey, first_id: int, count: int) -> Tensor:
    """Raw words of the ids first_id .. first_id + count - 1: [R, count] int64 in [0, 2^32)."""
    first_block = first_id // WORDS
    last_block = (first_id + count - 1) // WORDS
    blocks = torch.arange(first_block, last_block + 1, device=key.seeds.device).unsqueeze(0)
    every = torch.stack(_blocks(key, blocks), dim=-1).flatten(1)
    skipped = first_id - first_block * WORDS
    return every[:, skipped : skipped + count]


def words_at(key: NoiseKey, ids: Tensor) -> Tensor:
    """Raw words of chosen ids [R, K] int64: [R, K] int64, equal to `words(...)` at those ids."""
    four = torch.stack(_blocks(key, ids // WORDS), dim=-1)
    return four.gather(-1, (ids % WORDS).unsqueeze(-1)).squeeze(-1)


def uniform(raw: Tensor) -> Tensor:
    """Words to float64 in (0, 1), exact: multiples of 2^-33."""
    return raw.to(torch.float64).add_(0.5).mul_(2.0**-32)


def exponential(raw: Tensor) -> Tensor:
    """Words to float64 noise of the unit exponential distribution, in [2^-33, 22.9]."""
    return log_in_place(uniform(raw)).neg_()


def gumbel(key: NoiseKey, first_id: int, count: int) -> Tensor:
    """Standard Gumbel noise of a range of the vocabulary: [R, count] float32 in [-3.14, 22.88].

    argmax over ids of (logit + noise) is a draw from softmax(logits). A shard of the vocabulary asks for its own range
    of global ids and gets what the whole would have had there.
    """
    rows = key.seeds.shape[0]
    step = max(1, _CHUNK // max(count, 1))
    if rows <= step:
        return _gumbel_of(words(key, first_id, count))
    noise = torch.empty((rows, count), dtype=torch.float32, device=key.seeds.device)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        noise[part] = _gumbel_of(words(key.rows(part), first_id, count))
    return noise


def gumbel_at(key: NoiseKey, ids: Tensor) -> Tensor:
    """Standard Gumbel noise of chosen ids: ids [R, K] int64 -> [R, K] float32, equal to `gumbel` at those ids."""
    return _gumbel_of(words_at(key, ids))


def _gumbel_of(raw: Tensor) -> Tensor:
    noise = exponential(raw)
    return log_in_place(noise).to(torch.float32).neg_()


def log_in_place(values: Tensor) -> Tensor:
    """The natural logarithm of a float64 tensor; returns it.

    PyTorch's takes threads from 128 values on (MKL's vector functions), and where others compute, too, waits for them
    a time slice: 12 to 20 ms beside two busy processes on two cores, numpy's 10 us. With AVX-512 both give the same
    bits (120 million compared); elsewhere what is said above of a last unit holds.
    """
    if values.device.type == "cpu" and values.numel() < _FEW:
        plain = values.numpy()
        np.log(plain, out=plain)
        return values
    return values.log_()
