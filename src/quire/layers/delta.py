"""Recurrent layers with the gated delta rule."""

from torch import Tensor

from quire.args.delta import DeltaArgs
from quire.args.layers import NormArgs
from quire.kernels.delta import DeltaForm, DeltaWeights
from quire.kernels.states import StateView
from quire.layers.branch import Branch
from quire.layers.context import Build, StepContext
from quire.layers.linear import Linear
from quire.layers.recurrence import Recurrence, RecurrentMixer


class GatedDelta(RecurrentMixer):
    """The mixer of a recurrent layer with the gated delta rule, with the heads of this rank.

    Its steps: projection to queries, keys, values and gates; that to strengths and decays; `kernels.delta`, which reads
    and updates the states of the step's requests; output projection. With `DeltaArgs.low_rank` the second projection is
    to strengths and to the few numbers that further projections turn into decays and gates.
    """

    def __init__(self, args: DeltaArgs, at: str, norm: NormArgs, build: Build) -> None:
        super().__init__()
        self.kernels, self.by_head = build.kernels, args.by_head
        self.input, self.rates = Linear(f"{at}.input", build), Linear(f"{at}.rates", build)
        self.low_rank = args.low_rank
        self.decays = Linear(f"{at}.decays", build) if self.low_rank else None
        self.gates = Linear(f"{at}.gates", build) if self.low_rank else None
        self.delta = Recurrence(f"{at}.rule", build.device, DeltaWeights)
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

    def mixed(self, x: Tensor, branch: Branch, ctx: StepContext, state: StateView) -> Tensor:
        """Return the input of the output projection, [T, numbers of heads]."""
        assert ctx.states is not None, "the step has states"
        channels, heads = self.form.channels, self.form.heads
        rows, rates = branch.projections((self.input, self.rates), x, ctx)
        gates, decays = rows[:, channels:], rates[:, heads:]
        if self.decays is not None and self.gates is not None:
            few, others = decays.split(self.low_rank, 1)
            decays, gates = self.decays(few.contiguous(), ctx), self.gates(others.contiguous(), ctx)
        y: Tensor = self.kernels.delta.mix(
            rows[:, :channels],
            gates,
            decays,
            rates[:, :heads],
            self.delta.weights,
            state,
            ctx.states,
            self.form,
        )
        return y
