"""Largest differences that rounding explains, of a step that is compared with the reference on the same input."""

from typing import NamedTuple

from quire.kernels.latent_rows import DS_MLA
from quire.plan.cache_dtype import E4M3, E5M2

# Rounding of a step, relative to its row, is at most 2.5e-6 (5e-7 where it is a norm): in the bundled and random models
# of every family, and in random ones with the widths of Llama 3.1 8B, Qwen3 8B and DeepSeek-V2-Lite, also with a
# channel that is 5,000 times the others. The bounds are 6 to 12 times that. A wrong number that matters is far above: a
# tensor that is 1.001 times too large differs by 1e-3.
BOUND, NORM_BOUND = 3e-5, 3e-6
# Experts quantize their activations a second time inside the step: rounding of float32 before may turn a value to its
# neighbour. At most 1.2e-4 (FP8) was measured on quire-tiny-moe; without quantization a step is 1e-2 off or more.
EXPERTS_BOUND = 2e-3
TURN = 2.5e-7  # of a rotation per position: an angle is a float32 product, and two of its roundings are so much
# Half of the distance of two neighbours among the numbers of a KV cache, of numbers just above a power of two.
CACHES = {E4M3: 2.0**-4, E5M2: 2.0**-3, DS_MLA: 2.0**-4}
TURNED_KEYS = {DS_MLA: 2.0**-8}  # which are bfloat16 there
# Some products of float32 on a GPU are of TF32, which has 10 bits behind the point: 2^-11 for either number.
TF32, TF32_BOUND = ("experts", "recurrence"), 3e-3
CODED_BOUND = 3e-3  # of attention over codes on a GPU, whose products are of 16-bit numbers


class Bounds(NamedTuple):
    """Facts about an engine on which bounds depend.

    rows     tokens of the sequence
    rounds   True: activations are quantized
    cache    type of a KV cache of codes; "": the KV cache is float32
    gpu      True: Quire computes on a GPU
    """

    rows: int
    rounds: bool
    cache: str
    gpu: bool

    def of(self, step: str, *, cached: bool) -> float:
        """Return the bound of a step, relative to its row. cached: its result is read from the KV cache"""
        bound = NORM_BOUND if step.endswith("norm") else BOUND
        if step in ("queries", "keys"):
            bound += TURN * self.rows
        if step == "experts" and self.rounds:
            bound = EXPERTS_BOUND
        if self.gpu and step in TF32:
            bound = max(bound, TF32_BOUND)
        if self.gpu and step == "attention" and self.cache:
            bound = CODED_BOUND
        if cached and self.cache:
            bound += TURNED_KEYS.get(self.cache, CACHES[self.cache]) if step == "keys" else CACHES[self.cache]
        return bound
