"""The arguments of Mamba 2's kernels on a GPU, and parts of these kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from quire.kernels.mamba import MambaForm, MambaWeights
from quire.kernels.state_chunks import padded
from quire.kernels.state_rows import softplus
from quire.kernels.states import StateMeta, StateView
from quire.kernels.triton_runtime import jit, tl

NORMS = ("", "gated", "first")  # in the order of their numbers in kernels


@dataclass(frozen=True)
class MambaCall:
    """The arguments of `mix`, and its result y. See `quire.kernels.mamba`."""

    inner: Tensor
    gate: Tensor
    step: Tensor
    weights: MambaWeights
    state: StateView
    meta: StateMeta
    form: MambaForm
    y: Tensor

    @property
    def places(self) -> tuple[Tensor, ...]:
        """Tensors that say which rows and states sequences have."""
        meta = self.meta
        return meta.query_start, meta.seq_lens, meta.slots, meta.kept_at, meta.kept

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from row to row of inner, gate and step, and from state to state of columns and matrices."""
        assert self.state.matrix is not None
        return (*(one.stride(0) for one in (self.inner, self.gate, self.step, self.state.columns, self.state.matrix)),)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Constants of all kernels: sizes of the form; those that end with P are padded to powers of two."""
        form = self.form
        return {
            "G": form.groups,
            "H": form.heads,
            "N": form.state_dim,
            "P": form.head_dim,
            "NP": padded(form.state_dim),
        }

    @property
    def taps(self) -> dict[str, int]:
        """Constants of kernels that read the convolution's inputs."""
        return {"TAPS": len(self.weights.conv)}

    @property
    def columns(self) -> dict[str, int]:
        """Constants of kernels that write columns."""
        taps = len(self.weights.conv)
        return {"TAPS": taps, "TAPSP": 1 << max(0, taps - 2).bit_length()}


@jit
def step_of(raw, lowest, highest):
    """Return d of raw steps, shifts included."""
    return tl.minimum(tl.maximum(softplus(raw), lowest), highest)


@jit
def norm_group(
    sums,
    outputs,
    group,
    PER: tl.constexpr,
    P: tl.constexpr,
    PARTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """Norm the results of a group of PER heads at a row, which other programs have written.

    sums       rows of sums of squares, of PARTS parts of each head, and of results in float32
    outputs    rows of gate, norm and y, and eps
    MEMBERS    parts of the group, padded;  BLOCK  numbers that are normed at a time;  NORM  index in `NORMS`
    """
    squares, results = sums
    gate, norm, y, eps = outputs
    member = tl.arange(0, MEMBERS)
    shown = member < PER * PARTS
    parts = tl.load(squares + group * (PER * PARTS) + member, mask=shown, other=0.0, cache_modifier=".cg")
    factor = tl.rsqrt(tl.sum(parts) / (PER * P) + eps)
    for start in tl.static_range(0, PER * P, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside, column = column < PER * P, group * (PER * P) + column
        scale = tl.load(norm + column, mask=inside, other=0.0) * factor
        if NORM == 2:
            z = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
            scale *= z * tl.sigmoid(z)
        result = scale * tl.load(results + column, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(y + column, result.to(y.dtype.element_ty), mask=inside)
