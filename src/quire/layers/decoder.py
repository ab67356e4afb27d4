"""The block of a dense pre-norm decoder: attention, then feed-forward, each added to the residual stream."""

from torch import Tensor, nn

from quire.config.checkpoint import ModelArgs
from quire.kernels.attention import KVView
from quire.layers.attention import Attention
from quire.layers.context import Build, StepContext
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rotation


class DecoderBlock(nn.Module):
    """hidden + attention(norm(hidden)), then that + mlp(norm(that))."""

    def __init__(self, args: ModelArgs, build: Build) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.hidden_size, args.norm_eps, build)
        self.attention = Attention(args, build)
        self.mlp_norm = RMSNorm(args.hidden_size, args.norm_eps, build)
        self.mlp = GatedMLP(args.hidden_size, args.intermediate_size, args.mlp_bias, build)

    def forward(self, hidden: Tensor, rotation: Rotation, ctx: StepContext, kv: KVView) -> Tensor:
        """hidden [T, hidden] -> [T, hidden], perhaps in its memory."""
        hidden = self.attention(hidden, self.attention_norm, rotation, ctx, kv)
        return self.mlp(hidden, self.mlp_norm)
