"""Values of an 8-bit KV cache, in PyTorch: the rule that every kernel follows.

    code  = round(clamp(number * (1 / scale), -most, most))      in float32, to the nearest, ties to even; NaN stays NaN
    value = code * scale

`number` has the type of the computation, as an unquantized cache would hold it. Codes are exact in float16 and in
bfloat16, so kernels multiply codes; the scale of keys enters the scale of the scores, that of values the result.
"""

import torch
from torch import Tensor

MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # the largest numbers


def is_coded(cache: Tensor) -> bool:
    """Return True if the cache holds 8-bit codes, so that its values are codes times a scale."""
    return cache.dtype in MOST


def encode(numbers: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the codes of `numbers` for an 8-bit cache of type `dtype`. For other types return `numbers` unchanged."""
    if dtype not in MOST:
        return numbers
    return (numbers.float() * (1.0 / scale)).clamp(-MOST[dtype], MOST[dtype]).to(dtype)


def gather(cache: Tensor, index: tuple[Tensor | slice, ...] | Tensor) -> Tensor:
    """Return cache[index]. 8-bit floating-point caches are gathered as integers, as PyTorch on a GPU requires."""
    return cache.view(torch.uint8)[index].view(cache.dtype) if is_coded(cache) else cache[index]
