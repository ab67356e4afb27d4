"""A decoder: embedding, blocks of attention and feed-forward layers, norm, head."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.args.checkpoint import ModelArgs
from quire.args.delta import DeltaArgs
from quire.args.experts import MoEArgs
from quire.args.latent import LatentArgs
from quire.args.layers import NONE, AttentionArgs, BesideArgs, DenseArgs, FeedForwardArgs, GroupedArgs, RecurrentArgs
from quire.args.mamba import MambaArgs
from quire.args.shortconv import ShortConvArgs
from quire.contracts.params import Param
from quire.kernels.attention import KVView
from quire.kernels.rope.rotary import Rotaries, Turns
from quire.kernels.states import BothViews, StateView
from quire.layers.adapters import AdapterBank
from quire.layers.attention import Attention
from quire.layers.beside import MLPBesideExperts
from quire.layers.branch import Branch
from quire.layers.context import Build, DecoderModules, Loads, LoadsInPlace, StepContext
from quire.layers.delta import GatedDelta
from quire.layers.eagle import DraftIds, EagleLayer
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.latent import LatentAttention
from quire.layers.layer_inputs import LayerInputs, OwnInput
from quire.layers.linear import Linear
from quire.layers.mamba import Mamba
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE
from quire.layers.norm import LayerFactor, Norm
from quire.layers.read_states import ReadStates
from quire.layers.shortconv import ShortConv
from quire.layers.streamed import StreamedLayers

FeedForward = GatedMLP | MoE | MLPBesideExperts
Recurrent = GatedDelta | ShortConv | Mamba
ATTENTION: Mapping[type[AttentionArgs], Callable[..., Attention | LatentAttention]] = {
    GroupedArgs: Attention,
    LatentArgs: LatentAttention,
}

RECURRENT: Mapping[type[RecurrentArgs], tuple[Callable[..., Recurrent], str]] = {  # with its name below the layer
    DeltaArgs: (GatedDelta, "delta"),
    ShortConvArgs: (ShortConv, "conv"),
    MambaArgs: (Mamba, "mamba"),
}
FEED_FORWARDS: Mapping[type[FeedForwardArgs], Callable[..., FeedForward]] = {
    DenseArgs: lambda args, at, hidden_size, build, norm: GatedMLP(at, build, args.act, args.gate_scale),
    MoEArgs: lambda args, at, hidden_size, build, norm: MoE(args, at, hidden_size, build),
    BesideArgs: MLPBesideExperts,
}


class DecoderBlock(nn.Module):
    """A decoder layer: h = hidden + attention(hidden), then h + mlp(h), each by way of its `Branch`.

    `args.layers` choose grouped-query or latent attention, a gated MLP or experts, and the norms. With one norm for
    both halves: hidden + attention(norm(hidden)) + mlp(norm(hidden)). A layer may lack a half (`NoneArgs`).
    """

    def __init__(self, args: ModelArgs, layer: int, build: Build) -> None:
        super().__init__()
        at = f"layers.{layer}"
        own = args.layers[layer]
        mixes, feeds = own.mixer != NONE, own.feed_forward != NONE
        self.attention_branch = Branch(f"{at}.attention", own, args.norm, build) if mixes else None
        self.attention = _mixer(args, layer, build) if mixes else None
        self.beside = _beside(args, layer, build)
        self.factor = LayerFactor(f"{at}.factor", build.device) if own.scaled else None
        factor = None if own.inputs else self.factor
        self.mlp_branch = Branch(f"{at}.mlp", own.part(2), args.norm, build, factor) if feeds else None
        self.own_input = OwnInput(args, layer, build, self.factor) if own.inputs else None
        self.norm = Norm(f"{at}.norm", args.norm, build) if own.norms == "shared" else None
        self.mlp: FeedForward | None = None
        if feeds:
            part = FEED_FORWARDS[type(own.feed_forward)]
            self.mlp = part(own.feed_forward, f"{at}.mlp", args.hidden_size, build, args.norm)

    def forward(self, hidden: Tensor, turns: Turns, ctx: StepContext, kv: KVView | StateView | BothViews) -> Tensor:
        """Run the layer on hidden [T, hidden] and return [T, hidden]; it may reuse the memory of `hidden`."""
        if self.norm is not None:
            assert self.attention is not None and self.mlp is not None, "the halves share a norm"
            x = self.norm(hidden)
            hidden = self.attention(x, self.attention_branch, turns, ctx, kv, hidden)
            return self.mlp(x, self.mlp_branch, ctx, hidden)
        if self.beside is not None:
            hidden = self.beside(hidden, self, turns, ctx, kv)
        elif self.attention is not None:
            hidden = self.attention(hidden, self.attention_branch, turns, ctx, kv)
        if self.mlp is not None:
            hidden = self.mlp(hidden, self.mlp_branch, ctx)
        return hidden if self.own_input is None else self.own_input(hidden, ctx)

    @property
    def experts(self) -> MoE | None:
        """The layer's experts; None: it has none."""
        part = self.mlp.moe if isinstance(self.mlp, MLPBesideExperts) else self.mlp
        return part if isinstance(part, MoE) else None

    @property
    def shares_experts(self) -> bool:
        """True if replicas in lock-step share the layer's experts."""
        return self.experts is not None and self.experts.exchange is not None

    def join(self, ctx: StepContext) -> None:
        """Take part in the layer's exchange with other replicas, in a step without tokens of this one."""
        if self.experts is not None:
            self.experts.join(ctx)


def _mixer(args: ModelArgs, layer: int, build: Build) -> Attention | LatentAttention | Recurrent:
    """Return the mixer of a layer."""
    own = args.layers[layer].mixer
    if isinstance(own, RecurrentArgs):
        return _recurrent(own, layer, args, build)
    group, turn = build.group_of(args.kept_by(layer)), args.rotations.index(own.rotation)
    return ATTENTION[type(own)](own, f"layers.{layer}.attention", args.norm, build, group, turn)


class Beside(nn.Module):
    """The recurrent mixer beside attention: both read the same norm of the states, and both results are added."""

    def __init__(self, args: ModelArgs, layer: int, build: Build) -> None:
        super().__init__()
        own = args.layers[layer]
        self.branches = [Branch("", own.part(place), args.norm, build) for place in (0, 1)]
        self.mixer = _recurrent(own.beside, layer, args, build)

    def forward(self, hidden: Tensor, block: DecoderBlock, turns: Turns, ctx: StepContext, kv: BothViews) -> Tensor:
        """Return hidden + attention(x) + mixer(x) of x = norm(hidden), [T, hidden], with the factors of both."""
        assert block.attention is not None and block.attention_branch is not None, "the layer has both"
        x = block.attention_branch.read(hidden)
        hidden = block.attention(x, self.branches[0], turns, ctx, kv.kv, hidden)
        mixed: Tensor = self.mixer(x, self.branches[1], turns, ctx, kv.state, hidden)
        return mixed


def _beside(args: ModelArgs, layer: int, build: Build) -> Beside | None:
    return None if args.layers[layer].beside is None else Beside(args, layer, build)


def _recurrent(own: RecurrentArgs, layer: int, args: ModelArgs, build: Build) -> Recurrent:
    module, name = RECURRENT[type(own)]
    return module(own, f"layers.{layer}.{name}", args.norm, build)


def _layer(args: ModelArgs, layer: int, build: Build, modules: DecoderModules | None) -> nn.Module:
    """Return a layer of a decoder, by its number: that of a model, of an EAGLE head, or of transformers."""
    if modules is not None:
        return modules.block(layer)
    return (EagleLayer if args.eagle else DecoderBlock)(args, layer, build)


class DraftLayer(nn.Module):
    """A layer that predicts the token after the next (multi-token prediction, MTP), as DeepSeek-V3, GLM-4.5 and
    Qwen3.5 have it.

    It joins the embedding of token i with the model's hidden state at i - 1, after the final norm, and runs a decoder
    layer on it. The head of the model turns its output, after `norm`, into logits of token i + 1.
    """

    def __init__(self, args: ModelArgs, layer: int, build: Build) -> None:
        super().__init__()
        at = f"layers.{layer}"
        self.token_norm = Norm(f"{at}.token_norm", args.norm, build)
        self.state_norm = Norm(f"{at}.state_norm", args.norm, build)
        self.join = Linear(f"{at}.join", build)
        self.block = DecoderBlock(args, layer, build)
        self.norm = Norm(f"{at}.norm", args.norm, build)

    def forward(self, tokens: Tensor, states: Tensor, turns: Turns, ctx: StepContext, kv: KVView) -> Tensor:
        """Run the layer on embeddings and hidden states of the tokens before, both [T, hidden] -> [T, hidden]."""
        joined = self.join(torch.cat((self.token_norm(tokens), self.state_norm(states)), -1), ctx)
        hidden: Tensor = self.block(joined, turns, ctx, kv)
        return hidden


class Decoder(nn.Module):
    """Decoder model, the class of every family so far, and of EAGLE heads. It has no weights until every `LoadUnit` is
    loaded.

    layers          layers of this rank;  drafts  layers that draft, whose KV caches follow those of `layers`
    numbers         numbers of `layers` in the model
    held            arguments of both, in this order
    blocks          number of a layer in the model -> the layer, or the decoder layer in one that drafts
    draft           draft model, whose KV caches come last; None: there is none
    reads           states that an EAGLE-3 head reads, also one on a later stage; None: there is none
    layout          parameters of this rank
    dtype, device   of activations
    elsewhere       tensors of the checkpoint that other ranks read
    entry           operations between embedding and first layer in a decoder of transformers; None: there are none
    first           True: this rank has the embedding (first stage of a pipeline)
    last            True: this rank has norm and head (last stage of a pipeline)
    vocabulary      slice of the vocabulary that `embed` and `head` hold; None: the whole vocabulary
    adapters        slots of adapters; None: requests cannot name one
    streamed        layers whose weights lie in host memory; None: all weights are on the device
    """

    embed: VocabEmbedding
    norm: Norm
    head: LMHead

    def __init__(
        self,
        args: ModelArgs,
        layout: Sequence[Param],
        build: Build,
        *,
        elsewhere: frozenset[str] = frozenset(),
        modules: DecoderModules | None = None,
    ) -> None:
        """Make a decoder. modules: of a decoder of transformers, in place of those of `layers`; None: Quire's own."""
        super().__init__()
        self.args, self.layout, self.kernels, self.elsewhere = args, layout, build.kernels, elsewhere
        self.dtype, self.device, self.vocabulary = build.dtype, build.device, build.vocabulary
        self.first, self.last = "embed.weight" in build.params, "norm.weight" in build.params
        if modules is not None:  # its norm may have no weights
            self.last = build.layers is None or build.layers[1] == args.num_layers
        tied = self.first and self.last and args.tie_word_embeddings
        if self.last:
            self.head = LMHead("" if tied else "head", args.ends, build)
            self.norm = Norm("norm", args.norm, build) if modules is None else modules.norm()
        if self.first:
            self.embed = VocabEmbedding("embed", self.head if tied else None, build, args.ends.embedding_scale)
        self.inputs = LayerInputs(args, build) if args.inputs else None
        self.entry = modules.entry() if modules is not None and self.first else None
        self.numbers = own = range(*(build.layers or (0, args.num_layers)))
        self.layers = nn.ModuleList(_layer(args, layer, build, modules) for layer in own)
        self.ids: DraftIds | None = None
        if args.eagle is not None and "ids.offsets" in build.params:
            self.ids = DraftIds("ids", args.eagle.vocab_size, build)
        drafts = range(args.num_layers, args.num_layers + args.draft_layers * self.last)
        self.draft: Decoder | None = None
        self.reads: ReadStates | None = None
        self.adapters: AdapterBank | None = None
        self.streamed: StreamedLayers | None = None
        self.held = [args.layers[layer] for layer in (*own, *drafts)]
        self.drafts = nn.ModuleList(DraftLayer(args, layer, build) for layer in drafts)
        blocks = (*self.layers, *(layer.block for layer in self.drafts))
        self.blocks: Mapping[int, Any] = dict(zip((*own, *drafts), blocks, strict=True))
        self.rotary = Rotaries(args.rotations, build.device) if modules is None else modules.rotary()
        self._owners: dict[str, Loads] = {one.at: one for one in self.modules() if isinstance(one, Loads) and one.at}
        lost = self._owners.keys() ^ {param.module for param in layout}
        assert not lost, f"layers and parameters differ: {sorted(lost)}"

    def take(self, module: str, place: int, tensors: dict[str, Any]) -> None:
        """Give the layer named `module` the parameters of a `LoadUnit`; the layer packs them.

        Called once for each unit, before the first step. place: index of the expert on this rank; 0 for other layers
        """
        with torch.no_grad():
            self._owners[module].take(tensors, place)
        if self.streamed is not None:
            self.streamed.took(module, self._owners[module])

    def owner(self, module: str) -> Loads:
        """Return the layer named `module`, which has the parameters of that name; valid until the next call or step."""
        if self.streamed is not None:
            self.streamed.bring(module)
        return self._owners[module]

    def visited(self, layers: Iterable[int]) -> Iterator[int]:
        """Yield indices of `layers` in their order, each once its weights are on the device."""
        return iter(layers) if self.streamed is None else self.streamed.visited(layers)

    def destination(self, module: str) -> dict[str, Tensor] | None:
        """Return the parameter memory of the layer named `module` for the loader to write to; None: call `take`."""
        owner = self._owners[module]
        streamed = self.streamed is not None and self.streamed.has(module)  # it has memory while it is loaded
        return owner.destination() if isinstance(owner, LoadsInPlace) and not streamed else None
