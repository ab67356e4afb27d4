"""Rotary position embedding: cos and sin of positions, with the scalings that Hugging Face defines."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.args.rope import RopeArgs, Rotation

Turn = tuple[Tensor, Tensor]  # cos and signed sin, each [T, D]
Turns = tuple[Turn, ...]  # of each rotation of a model
Rows = Callable[[Tensor, Tensor, float, torch.dtype], Turn]  # (positions, frequencies, scale, type)


class Rotary:
    """Rotation angles of RoPE: frequencies [D / 2] float32, and `scale`, the factor on cos and sin.

    A head's D dimensions (`width`) form D / 2 pairs: the first `rotated` / 2 pairs are rotated, the rest have angle 0.
    """

    def __init__(self, args: RopeArgs, rotated: int, device: torch.device, *, width: int) -> None:
        frequencies, self.scale = rope_frequencies(args, rotated)
        self.frequencies = torch.nn.functional.pad(frequencies, (0, (width - rotated) // 2)).to(device)
        self._kernel = _kernel(device)

    def rows(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """Return cos and sin [T, D] of positions [T], from float32 angles. The first half of sin is negated."""
        return self._rows(positions, self.scale, dtype)

    def differences(self, shifts: Tensor) -> Turn:
        """Return cos and sin [T, D] float32 that move cached keys by `shifts` [T] positions. See `kernels/blend`."""
        return self._rows(shifts, 1.0, torch.float32)

    def _rows(self, positions: Tensor, scale: float, dtype: torch.dtype) -> Turn:
        if self._kernel is not None:
            return self._kernel(positions, self.frequencies, scale, dtype)
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


class Rotaries:
    """The rotations of a model's layers, most often one."""

    def __init__(self, rotations: Sequence[Rotation], device: torch.device) -> None:
        self._each = [Rotary(one.rope, one.rotated, device, width=one.width) for one in rotations]

    def rows(self, positions: Tensor, dtype: torch.dtype) -> Turns:
        """Return cos and sin of positions [T], of each rotation. See `Rotary`."""
        return tuple(one.rows(positions, dtype) for one in self._each)

    def differences(self, shifts: Tensor) -> Turns:
        """Return cos and sin that move cached keys by `shifts` [T] positions, of each rotation. See `Rotary`."""
        return tuple(one.differences(shifts) for one in self._each)


def _kernel(device: torch.device) -> Rows | None:
    """Return the kernel for a device; None where PyTorch computes the rows. A CPU need not import Triton."""
    if device.type != "cuda":
        return None
    from quire.kernels.rope.triton import rotation_rows
    from quire.kernels.triton_runtime import missing

    return None if missing() else rotation_rows


def rope_frequencies(args: RopeArgs, head_dim: int) -> tuple[Tensor, float]:
    """Return radians per position of each pair of dimensions, [head_dim / 2] float32, and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if args.kind == "none":
        return torch.zeros_like(exponents), 1.0
    unscaled = 1.0 / (args.theta**exponents)
    if args.kind == "proportional":
        turned = torch.arange(head_dim // 2) < int(args.part * head_dim // 2)
        return torch.where(turned, unscaled / args.factor, 0.0), 1.0
    if args.kind == "linear":
        return unscaled / args.factor, 1.0
    if args.kind == "llama3":
        return _llama3(unscaled, args), 1.0
    if args.kind == "longrope":
        return unscaled / torch.tensor(args.divisors[args.long]), args.attention_factor or 1.0
    if args.kind == "yarn":
        return _yarn(unscaled, args, head_dim), _yarn_scale(args)
    return unscaled, 1.0  # default, and dynamic up to the trained length


def _llama3(unscaled: Tensor, args: RopeArgs) -> Tensor:
    """Llama 3.1: wavelengths above original / low are stretched by factor, below original / high kept, else blended.

    With low = high, as in Llama 4, nothing is blended.
    """
    turns = args.original_max_position * unscaled / (2 * math.pi)  # rotations over the trained length
    low, high = args.low_freq_factor, args.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= low).to(turns.dtype)
    return unscaled * kept + unscaled / args.factor * (1 - kept)


def _yarn(unscaled: Tensor, args: RopeArgs, head_dim: int) -> Tensor:
    """YaRN (Peng et al., 2023, section 3.2): pairs that turn often are kept, slow ones stretched, a ramp between."""

    def pair_with(turns: float) -> float:
        return head_dim * math.log(args.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(args.theta))

    low, high = pair_with(args.beta_fast), pair_with(args.beta_slow)
    if args.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return unscaled * kept + unscaled / args.factor * (1 - kept)


def _yarn_scale(args: RopeArgs) -> float:
    """YaRN's attention temperature as a factor on cos and sin (section 3.4 of the paper)."""
    if args.attention_factor is not None:
        return args.attention_factor

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(args.factor) + 1.0 if args.factor > 1 else 1.0

    if args.mscale and args.mscale_all_dim:
        return temperature(args.mscale) / temperature(args.mscale_all_dim)
    return temperature(1.0)
