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
