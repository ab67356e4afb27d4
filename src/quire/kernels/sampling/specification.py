"""The specification of sampling: one row, float64, everything sorted, simple loops. Slow on purpose.

Only the noise comes from another file (noise.py), because it is exact. `philox4x32` here is the specification of that
noise, in Python integers.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.contracts.sampling import COLDEST, GREEDY_BELOW, SamplerSpec
from quire.kernels.sampling.noise import NoiseKey, gumbel


def philox4x32(counter: Sequence[int], key: Sequence[int], rounds: int = 10) -> tuple[int, ...]:
    """Return the four uint32 words of Philox4x32, for a counter of four and a key of two uint32 (Python integers)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product_0, product_1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (product_1 >> 32) ^ c1 ^ k0, product_1 & 0xFFFFFFFF
        c2, c3 = (product_0 >> 32) ^ c3 ^ k1, product_0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def edited(logits: Tensor, spec: SamplerSpec, tokens: Sequence[int]) -> Tensor:
    """Return logits [V] float64 after masks, bias and penalties of `spec`. tokens: the prompt and the output so far."""
    row = [float(value) for value in logits]
    if spec.allowed_ids:
        row = [value if token in spec.allowed_ids else -math.inf for token, value in enumerate(row)]
    for word in spec.bad_words:
        if len(word) - 1 <= len(tokens) and list(tokens[len(tokens) - len(word) + 1 :]) == list(word[:-1]):
            row[word[-1]] = -math.inf
    if len(tokens) < spec.min_length:
        for token in spec.stop_ids:
            row[token] = -math.inf
    for token, bias in spec.logit_bias:
        row[token] += bias
    output = list(tokens[spec.num_prompt :])
    for token in set(tokens):
        factor = spec.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(output):
        row[token] -= output.count(token) * spec.frequency_penalty + spec.presence_penalty
    return torch.tensor(row, dtype=torch.float64)


def probabilities(logits: Tensor, spec: SamplerSpec) -> Tensor:
    """Return the probabilities [V] float64 that a token is drawn with. logits: [V], after `edited`."""
    if spec.temperature < GREEDY_BELOW:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(torch.float64)
    scaled = logits.to(torch.float64) / max(spec.temperature, COLDEST)
    order = sorted(range(len(scaled)), key=lambda token: (-float(scaled[token]), token))
    weight = torch.softmax(scaled, dim=0)
    left = [token for token in order if weight[token] > 0 and weight[token] >= spec.min_p * weight[order[0]]]
    if spec.top_k > 0:
        boundary = float(scaled[order[min(spec.top_k, len(order)) - 1]])
        left = [token for token in left if float(scaled[token]) >= boundary]
    if spec.top_p < 1.0:
        total, reached, kept = float(weight[left].sum()), 0.0, []
        for token in left:
            if reached >= spec.top_p * total:
                break
            kept.append(token)
            reached += float(weight[token])
        left = kept
    result = torch.zeros_like(weight)
    result[left] = weight[left] / weight[left].sum()
    return result


def sample(logits: Tensor, spec: SamplerSpec, tokens: Sequence[int]) -> int:
    """Return the token that comes after `tokens`, from raw logits [V]."""
    row = edited(logits, spec, tokens)
    if spec.temperature < GREEDY_BELOW:
        return int(row.argmax())
    seed = spec.seed - (1 << 64) if spec.seed >> 63 else spec.seed
    key = NoiseKey(torch.tensor([seed]), torch.tensor([len(tokens)]))
    return int((probabilities(row, spec).log() + gumbel(key, 0, len(row))[0]).argmax())
