"""Counter-based noise: the number depends on request seed, position, stream and vocabulary id alone.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in exact integer
arithmetic on int64 tensors that hold uint32 values.

    key      = the two halves of the request's 64-bit seed, low half first
    counter  = (global vocabulary id // 4, position, stream, 0)
    word     = id % 4 of the four words of that block, so four neighbouring ids share a block

A word w becomes the uniform u = (w + 0.5) * 2^-32, exact in float64 and never 0 or 1. Gumbel noise is -log(-log(u)) in
float64, rounded to float32. If an implementation's logarithm is off by one unit in the last place, all but about one
value in 2^28 still round to the same float32. The ids that win have u near 1, where the exponential -log(u) still has
steps of 2^-32: fine enough that ties do not favour low ids in any vocabulary.

Knows nothing of logits, slots or requests.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SAMPLE, ACCEPT, RECOVER, DRAFT = range(4)  # streams: the purpose of the number

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
    """Keys of the noise of R rows. A row's noise depends on its key and on the vocabulary id alone.

    seeds       [R] int64, the bits of a uint64
    positions   [R] int64, position of the drawn token in its sequence
    stream      purpose of the noise: SAMPLE, ACCEPT, RECOVER or DRAFT
    """

    seeds: Tensor
    positions: Tensor
    stream: int = SAMPLE

    def rows(self, index: Tensor | slice) -> "NoiseKey":
        """Return the keys of the rows `index`."""
        return NoiseKey(self.seeds[index], self.positions[index], self.stream)


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Compute ten rounds of Philox4x32 on int64 tensors with values in [0, 2^32) that broadcast against each other.

    Products overflow int64 and wrap; both of their 32-bit halves are right. A tensor takes the full shape only when a
    round mixes it with another (ids differ along a row, positions and keys between rows), so the first two rounds cost
    a fraction of the others.
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
    """Return the four words of counter blocks `blocks` ([1, B] or [R, B] int64), each [R, B]."""
    seeds = key.seeds.unsqueeze(1)
    stream = torch.full((1, 1), key.stream, dtype=torch.int64, device=seeds.device)
    counter = (blocks, key.positions.unsqueeze(1), stream, torch.zeros_like(stream))
    return philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))


def words(key: NoiseKey, first_id: int, count: int) -> Tensor:
    """Return the random words of the vocabulary ids first_id .. first_id + count - 1: [R, count] int64 in [0, 2^32)."""
    first_block = first_id // WORDS
    last_block = (first_id + count - 1) // WORDS
    blocks = torch.arange(first_block, last_block + 1, device=key.seeds.device).unsqueeze(0)
    every = torch.stack(_blocks(key, blocks), dim=-1).flatten(1)
    skipped = first_id - first_block * WORDS
    return every[:, skipped : skipped + count]


def words_at(key: NoiseKey, ids: Tensor) -> Tensor:
    """Return the random words of the vocabulary ids `ids` [R, K]: [R, K] int64, equal to those of `words`."""
    four = torch.stack(_blocks(key, ids // WORDS), dim=-1)
    return four.gather(-1, (ids % WORDS).unsqueeze(-1)).squeeze(-1)


def uniform(raw: Tensor) -> Tensor:
    """Convert random words to uniform float64 noise in (0, 1), exactly: odd multiples of 2^-33."""
    return raw.to(torch.float64).add_(0.5).mul_(2.0**-32)


def exponential(raw: Tensor) -> Tensor:
    """Convert random words to float64 noise of the unit exponential distribution, in [2^-33, 22.9]."""
    return log_in_place(uniform(raw)).neg_()


def gumbel(key: NoiseKey, first_id: int, count: int) -> Tensor:
    """Return standard Gumbel noise of the ids first_id .. first_id + count - 1: [R, count] float32 in [-3.14, 22.88].

    argmax over ids of (logit + noise) is a draw from softmax(logits). A shard of the vocabulary passes its own range of
    global ids and gets the same numbers as the whole vocabulary there.
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
    """Return standard Gumbel noise of ids [R, K] int64: [R, K] float32, equal to `gumbel` at those ids."""
    return _gumbel_of(words_at(key, ids))


def _gumbel_of(raw: Tensor) -> Tensor:
    noise = exponential(raw)
    return log_in_place(noise).to(torch.float32).neg_()


def log_in_place(values: Tensor) -> Tensor:
    """Replace a float64 tensor by its natural logarithm; return it.

    NumPy computes small tensors on a CPU, because PyTorch uses several threads from 128 values on (MKL) and waits for
    the last: beside two busy processes on two cores that took 12 to 20 ms, NumPy takes 10 us. With AVX-512 both give
    the same bits (120 million compared); elsewhere they may differ in the last unit, see the top of this file.
    """
    if values.device.type == "cpu" and values.numel() < _FEW:
        array = values.numpy()
        np.log(array, out=array)
        return values
    return values.log_()
