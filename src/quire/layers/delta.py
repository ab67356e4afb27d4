"""Recurrent layers with the gated delta rule."""

import torch
from torch import Tensor, nn

from quire.args.delta import DeltaArgs
from quire.args.layers import NormArgs
from quire.kernels.delta import DeltaForm, DeltaWeights
from quire.kernels.rope.rotary import Turns
from quire.kernels.states import StateView
from quire.layers.branch import Branch
from quire.layers.context import Build, StepContext
from quire.layers.linear import Linear


class Recurrence(nn.Module):
    """Weights of the gated delta rule: convolution, rates and shifts of the decay, norm of heads."""

    weights: DeltaWeights

    def __init__(self, at: str, device: torch.device) -> None:
        super().__init__()
        self.at, self.device = at, device

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        """Move the weights to the layer's device, in the form that kernels read. See `Loads`."""
        own = {name: tensor.to(self.device).float().contiguous() for name, tensor in tensors.items()}
        conv = own["conv"].flatten(1).T.contiguous()
        self.weights = DeltaWeights(conv=conv, rate=own["rate"], shift=own["shift"], norm=own["norm"])

    def rows(self, name: str) -> Tensor:
        """Return a parameter as it was stored: the convolution [C, 1, K]."""
        found: Tensor = getattr(self.weights, name)
        return found.T[:, None] if name == "conv" else found


class GatedDelta(nn.Module):
    """The mixer of a recurrent layer with the gated delta rule, with the heads of this rank.

    Its steps: projection to queries, keys, values and gates; that to strengths and decays; `kernels.delta`, which reads
    and updates the states of the step's requests; output projection. With `DeltaArgs.low_rank` the second projection is
    to strengths and to the few numbers that further projections turn into decays and gates.
    """

    def __init__(self, args: DeltaArgs, at: str, norm: NormArgs, build: Build) -> None:
        super().__init__()
        self.kernels, self.by_head = build.kernels, args.by_head
        self.parts = {name: build.params[f"{at}.{name}.weight"].parts for name in ("input", "rates")}  # as stored
        self.input, self.rates = Linear(f"{at}.input", build), Linear(f"{at}.rates", build)
        self.low_rank = args.low_rank
        self.decays = Linear(f"{at}.decays", build) if self.low_rank else None
        self.gates = Linear(f"{at}.gates", build) if self.low_rank else None
        self.delta = Recurrence(f"{at}.rule", build.device)
        self.output = Linear(f"{at}.output", build)
        heads = self.output.in_features // args.value_dim
        self.form = DeltaForm(
            key_heads=heads * args.key_heads // args.heads,
            heads=heads,
            key_dim=args.key_dim,
            value_dim=args.value_dim,
            eps=args.eps or norm.eps,
            act=args.act,
            doubled=args.doubled,
            lowest=args.lowest,
        )

    def forward(
        self,
        x: Tensor,
        branch: Branch,
        turns: Turns,
        ctx: StepContext,
        state: StateView,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return residual + the mixer of x by way of `branch`, [T, hidden]; it may reuse the memory of the residual.

        residual   None: x
        Updates the states of the step's requests in `state`.
        """
        assert ctx.states is not None, "the step has states"
        channels, heads = self.form.channels, self.form.heads
        rows, rates = branch.projections((self.input, self.rates), x, ctx)
        gates, decays = rows[:, channels:], rates[:, heads:]
        if self.decays is not None and self.gates is not None:
            few, others = decays.split(self.low_rank, 1)
            decays, gates = self.decays(few.contiguous(), ctx), self.gates(others.contiguous(), ctx)
        mixed = self.kernels.delta.mix(
            rows[:, :channels],
            gates,
            decays,
            rates[:, :heads],
            self.delta.weights,
            state,
            ctx.states,
            self.form,
        )
        return branch.add(self.output, mixed, x if residual is None else residual, ctx)
