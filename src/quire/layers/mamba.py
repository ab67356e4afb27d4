"""Recurrent layers with Mamba 2."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.args.layers import NormArgs
from quire.args.mamba import MambaArgs
from quire.kernels.mamba import MambaForm, MambaWeights
from quire.kernels.states import StateView
from quire.layers.branch import Branch
from quire.layers.context import Build, StepContext
from quire.layers.linear import Linear
from quire.layers.recurrence import Recurrence, RecurrentMixer


class Mamba(RecurrentMixer):
    """The mixer of a recurrent layer with Mamba 2, with the heads of this rank.

    Its steps: projection to gates, values, inputs and outputs of states, and steps; `kernels.mamba`, which reads and
    updates the states of the step's requests; output projection.
    """

    def __init__(self, args: MambaArgs, at: str, norm: NormArgs, build: Build) -> None:
        super().__init__()
        self.kernels, self.eps = build.kernels, norm.eps
        self.input, self.rule = Linear(f"{at}.input", build), Recurrence(f"{at}.rule", build.device, MambaWeights)
        self.output = Linear(f"{at}.output", build)
        sizes = {part.name: part.rows for part in build.params[f"{at}.input.weight"].parts}
        self.form = MambaForm(
            heads=sizes["t"],
            groups=sizes["b"] // args.state_dim,
            head_dim=args.head_dim,
            state_dim=args.state_dim,
            norm=args.norm,
            eps=norm.eps,
            lowest=args.steps[0],
            highest=args.steps[1],
        )
        self.tp = (
            build.groups.tp if args.groups == 1 and args.norm else None
        )  # whose ranks have parts of the norm's numbers
        self.scales: Tensor | None = None
        if args.scales:
            parts = [torch.full((size,), scale) for size, scale in zip(sizes.values(), args.scales, strict=True)]
            self.scales = torch.cat(parts).to(build.device, build.dtype)

    def mixed(self, x: Tensor, branch: Branch, ctx: StepContext, state: StateView) -> Tensor:
        """Return the input of the output projection, [T, numbers of heads]."""
        assert ctx.states is not None, "the step has states"
        rows = branch.project(self.input, x, ctx)
        if self.scales is not None:
            rows = rows * self.scales
        form, weights = self.form, self.rule.weights
        own = form if self.tp is None else replace(form, norm="")
        gate, inner, step = rows.split((form.width, form.channels, form.heads), 1)
        y: Tensor = self.kernels.mamba.mix(inner, gate, step, weights, state, ctx.states, own)
        if self.tp is None:
            return y
        assert weights.norm is not None, "ranks share a norm"
        squares = self.tp.all_reduce(y.float().square().sum(1, keepdim=True))
        factors = torch.rsqrt(squares / (form.width * self.tp.size) + self.eps)
        return (y.float() * factors * weights.norm).to(y.dtype)
