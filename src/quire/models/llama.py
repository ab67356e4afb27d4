"""Llama 2 and 3 (Meta): biases only where the config asks, rope scaling "llama3" from 3.1 on."""

from torch import nn

from quire.config.checkpoint import ModelArgs
from quire.layers.context import Build
from quire.layers.decoder import DecoderBlock
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import pack_layers
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rotary
from quire.models import names

NAME_MAP = (
    *names.EMBEDDING_AND_HEAD,
    *names.BLOCK_NORMS,
    *names.ATTENTION,
    *names.QKV_BIAS,
    *names.OUTPUT_BIAS,
    *names.GATED_MLP,
    *names.MLP_BIAS,
)


class Llama(nn.Module):
    """A dense decoder with grouped-query attention and a gated feed-forward layer; every bias is optional."""

    name_map = NAME_MAP

    def __init__(self, args: ModelArgs, build: Build) -> None:
        super().__init__()
        self.args, self.kernels = args, build.kernels
        self.embed = VocabEmbedding(args.vocab_size, args.hidden_size, build)
        self.layers = nn.ModuleList(DecoderBlock(args, build) for _ in range(args.num_layers))
        self.norm = RMSNorm(args.hidden_size, args.norm_eps, build)
        tied = self.embed if args.tie_word_embeddings else None
        self.head = LMHead(args.vocab_size, args.hidden_size, tied, build)
        self.rotary = Rotary(args.rope, args.head_dim, build.device)

    def pack(self) -> None:
        """Turn loaded weights into the kernels' layout; once, before the first step."""
        pack_layers(self)
