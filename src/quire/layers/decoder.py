"""A pre-norm decoder: embedding, blocks of attention and feed-forward layers, norm, head."""

from collections.abc import Sequence

from torch import Tensor, nn

from quire.config.checkpoint import ModelArgs
from quire.kernels.attention import KVView
from quire.layers.attention import Attention
from quire.layers.context import Build, StepContext
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.latent import LatentAttention
from quire.layers.linear import pack_layers
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE
from quire.layers.norm import RMSNorm
from quire.layers.params import Param
from quire.layers.rope import Rotary, Rotation


class DecoderBlock(nn.Module):
    """hidden + attention(norm(hidden)), then that + mlp(norm(that)); the config says which kinds of both."""

    def __init__(self, args: ModelArgs, layer: int, build: Build) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.hidden_size, args.norm_eps, build)
        self.attention = LatentAttention(args, build) if args.latent else Attention(args, build)
        self.mlp_norm = RMSNorm(args.hidden_size, args.norm_eps, build)
        self.mlp: MoE | GatedMLP
        if args.moe is not None and layer in args.moe.layers:
            self.mlp = MoE(args, build)
        else:
            self.mlp = GatedMLP(args.hidden_size, args.intermediate_size, args.mlp_bias, build)

    def forward(self, hidden: Tensor, rotation: Rotation, ctx: StepContext, kv: KVView) -> Tensor:
        """hidden [T, hidden] -> [T, hidden], perhaps in its memory."""
        hidden = self.attention(hidden, self.attention_norm, rotation, ctx, kv)
        return self.mlp(hidden, self.mlp_norm)


class Decoder(nn.Module):
    """The model that every family is so far.

    layout      where its parameters lie in a checkpoint;  elsewhere  tensors of the checkpoint that other ranks own
    """

    def __init__(self, args: ModelArgs, layout: Sequence[Param], build: Build, *,
                 elsewhere: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.args, self.layout, self.elsewhere, self.kernels = args, layout, elsewhere, build.kernels
        self.embed = VocabEmbedding(args.vocab_size, args.hidden_size, build)
        self.layers = nn.ModuleList(DecoderBlock(args, layer, build) for layer in range(args.num_layers))
        self.norm = RMSNorm(args.hidden_size, args.norm_eps, build)
        tied = self.embed if args.tie_word_embeddings else None
        self.head = LMHead(args.vocab_size, args.hidden_size, tied, build)
        width = args.latent.rope_dim if args.latent else args.head_dim
        self.rotary = Rotary(args.rope, args.rotary_dim, build.device, width=width)

    def pack(self) -> None:
        """Turn loaded weights into the kernels' layout; once, before the first step."""
        pack_layers(self)
