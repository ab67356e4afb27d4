"""The layers of a decoder by config.json: of each the kinds of its mixer and feed-forward part, and their sizes.

A kind is a type of arguments. `plan/kinds` has what the plan knows of each kind, `layers/` the modules. No torch.
"""

from typing import ClassVar

import msgspec
from msgspec import structs

from quire.args.delta import DeltaArgs
from quire.args.experts import MoEArgs
from quire.args.foreign import ForeignGate, ForeignLeaf, ForeignNorm
from quire.args.latent import LatentArgs
from quire.args.mamba import MambaArgs
from quire.args.rope import RopeArgs, Rotation
from quire.args.shortconv import ShortConvArgs

MOST_GROWTH_STEPS = 4096  # queries grow up to so many times `ScoreArgs.trained` positions


class ScoreArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of attention.

    scale      factor; 0: head_dim^-0.5
    soft_cap   scores become soft_cap * tanh(score / soft_cap); None: they stay
    sinks      each query head has a score more, whose weight belongs to no token
    growth, trained, ahead   queries at position p are multiplied by 1 + growth * log(1 + floor((p + ahead) / trained));
                             growth 0: they are not
    """

    scale: float = 0.0
    soft_cap: float | None = None
    sinks: bool = False
    growth: float = 0.0
    trained: int = 0
    ahead: int = 0


class GroupedArgs(msgspec.Struct, frozen=True, kw_only=True, tag="grouped"):
    """Sizes of grouped-query attention.

    head_dim, rotary_dim      dimensions of a query or key head, and the number of these that RoPE rotates
    rope                      settings of this rotation
    input_bias, output_bias   biases of the q, k and v projections, and of the o projection
    qk_norm                   RMS norm of q and k before rotation: of each "head", the same without weights ("plain"),
                              or of all heads together ("whole"). Rotation and a norm without weights commute
    window                    w > 0: a token attends to w tokens, its own included. w < 0: to its own chunk of -w
                              tokens, up to itself. None: to all before it
    interleaved               True: rotated pairs are (0, 1), (2, 3), ...; False: (0, R / 2), (1, R / 2 + 1), ...
    values                    "": the v projection; "normed": its RMS norm, which has no weights; "keys": that of the k
                              projection, before its own norm and rotation. Then there is no v projection
    kv_from                   number of the layer whose keys and values it reads; -1: it has its own
    gated                     True: the input has a further projection of the width of queries, stored behind each
                              query head; the result of attention is multiplied by its sigmoid before the o projection
    """

    one_scale: ClassVar[bool] = False  # keys and values of an 8-bit cache have a scale each

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope: RopeArgs
    input_bias: bool = False
    output_bias: bool = False
    qk_norm: str = ""
    window: int | None = None
    scores: ScoreArgs = ScoreArgs()
    interleaved: bool = False
    values: str = ""
    kv_from: int = -1
    gated: bool = False

    @property
    def projected(self) -> tuple[str, ...]:
        """The projections of its input: of queries, keys and values, as far as it has these."""
        if self.kv_from >= 0:
            return ("q",)
        return ("q", "k") if self.values == "keys" else ("q", "k", "v")

    @property
    def factor(self) -> float:
        """The factor on scores."""
        return self.scores.scale or self.head_dim**-0.5

    @property
    def rotation(self) -> Rotation:
        """The rotation of its heads: kernels take whole heads, whose other dimensions get angle 0."""
        return Rotation(self.rope, self.rotary_dim, self.head_dim)


class ForeignArgs(msgspec.Struct, frozen=True, kw_only=True, tag="foreign"):
    """A whole layer of transformers' code, whose attention is ours.

    attention    its heads and its window; whether the layer rotates heads is its own affair
    prepared     True: norm, rotation and the write of keys and values are one kernel; False: operations of the module
    apart        the reason why the layer is not prepared; "": it is
    turn         number of its rotation among those of the model; -1: it is not prepared
    order        order of the dimensions of its heads that kernels need; (): the checkpoint's
    head_norm    norms of the heads of queries and keys of a prepared layer; (): there are none
    leaves       its other parameters
    gates        activations that kernels compute
    operations   the operations of PyTorch that are left, in their order
    kind         number of the kind of layer
    """

    one_scale: ClassVar[bool] = False  # of keys and values of an 8-bit cache

    attention: GroupedArgs
    leaves: tuple[ForeignLeaf, ...]
    prepared: bool = False
    apart: str = ""
    turn: int = -1
    order: tuple[int, ...] = ()
    head_norm: tuple[ForeignNorm, ...] = ()
    gates: tuple[ForeignGate, ...] = ()
    operations: tuple[str, ...] = ()
    kind: int = 0

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads that the cache keeps."""
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.attention.head_dim

    @property
    def window(self) -> int | None:
        """Its window, as of `GroupedArgs`."""
        return self.attention.window

    @property
    def scores(self) -> ScoreArgs:
        """Its scores."""
        return self.attention.scores

    @property
    def rope(self) -> RopeArgs:
        """No settings: the module rotates heads."""
        return self.attention.rope

    @property
    def rotation(self) -> Rotation:
        """No rotation, likewise."""
        return self.attention.rotation


class NoneArgs(msgspec.Struct, frozen=True, kw_only=True, tag="none"):
    """The half that a layer does not have, with its norm: it has the other one alone."""

    one_scale: ClassVar[bool] = False
    act: ClassVar[str] = ""


NONE = NoneArgs()


class DenseArgs(msgspec.Struct, frozen=True, kw_only=True, tag="dense"):
    """Sizes of an MLP: numbers between its projections, biases of all of them, and the activation.

    act          activation of the gate, of `quire.kernels.activation`; "relu2": there is no gate, see `pointwise` there
    gate_scale   factor on the gate before its activation
    """

    width: int
    bias: bool = False
    act: str = "silu"
    gate_scale: float = 1.0


class ForeignExpertsArgs(MoEArgs, frozen=True, kw_only=True, tag="foreign experts"):
    """Experts of a layer of transformers' code, which chooses them by itself: `routing` tells their numbers alone."""


class BesideArgs(msgspec.Struct, frozen=True, kw_only=True, tag="beside"):
    """A gated MLP and experts that read the same states. Their results are normalized and added."""

    dense: DenseArgs
    experts: MoEArgs


AttentionArgs = GroupedArgs | LatentArgs | ForeignArgs
RecurrentArgs = DeltaArgs | ShortConvArgs | MambaArgs
MixerArgs = AttentionArgs | RecurrentArgs | NoneArgs
FeedForwardArgs = DenseArgs | MoEArgs | ForeignExpertsArgs | BesideArgs | NoneArgs


class NormArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The norm of hidden states and heads.

    eps        added to the mean of squares
    plus_one   True: it multiplies by 1 + weight; False: by weight
    centered   True: layer normalization, which subtracts the mean; False: RMS normalization
    """

    eps: float
    plus_one: bool = False
    centered: bool = False


class EndArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Operations at the ends of a model.

    embedding_scale   factor on embeddings, rounded to the model's dtype
    logit_scale       factor on logits
    logit_cap         logits become logit_cap * tanh(logit / logit_cap), after the factor; None: they stay
    """

    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None


class LayerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A layer: it reads the tokens before a token with its mixer, then the token alone with its feed-forward part.

    norms      norms of each half: "before" it, "after" it, "both", or "shared": one before both halves, which run in
               parallel; "": those of a layer of transformers, which is one mixer with all of its parts
    residual   factor on the result of each half before it is added to the residual stream
    scaled     True: the layer's result is multiplied by a number of the checkpoint
    inputs     numbers of the further embedding that the layer has of each token; 0: it has none
    beside     a recurrent mixer that reads the same states as the mixer; None: there is none
    factors    of a layer with two mixers: factors on the results of the mixer, of the one beside it, and of the
               feed-forward part
    """

    mixer: MixerArgs
    feed_forward: FeedForwardArgs
    norms: str = "before"
    residual: float = 1.0
    scaled: bool = False
    inputs: int = 0
    beside: RecurrentArgs | None = None
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)

    @property
    def mixers(self) -> tuple[MixerArgs, ...]:
        """Its mixers: one, none, or two beside each other."""
        return tuple(one for one in (self.mixer, self.beside) if one is not None and one != NONE)

    def part(self, place: int) -> "LayerArgs":
        """Return the layer as one of its parts sees it, by its place in `factors`, behind the norm of both mixers."""
        scaled = structs.replace(self, residual=self.residual * self.factors[place])
        return scaled if place == 2 or self.beside is None else structs.replace(scaled, norms="shared")

    @property
    def act(self) -> str:
        """The activation of its MLP, or of its experts."""
        part = self.feed_forward
        return part.dense.act if isinstance(part, BesideArgs) else part.act

    @property
    def gate_scale(self) -> float:
        """The factor on the gate of its MLP."""
        return self.feed_forward.gate_scale if isinstance(self.feed_forward, DenseArgs) else 1.0

    @property
    def experts(self) -> MoEArgs | None:
        """Its experts; None: it has none."""
        part = self.feed_forward
        if isinstance(part, BesideArgs):
            return part.experts
        return part if isinstance(part, MoEArgs) else None

    def with_experts(self, experts: MoEArgs) -> "LayerArgs":
        """Return the layer with other experts in place of its own."""
        assert self.experts is not None, "the layer has experts"
        part = (
            structs.replace(self.feed_forward, experts=experts)
            if isinstance(self.feed_forward, BesideArgs)
            else experts
        )
        return structs.replace(self, feed_forward=part)

    @property
    def before(self) -> bool:
        """True if each half has a norm before it."""
        return self.norms in ("before", "both")

    @property
    def after(self) -> bool:
        """True if the result of each half is normalized."""
        return self.norms in ("after", "both")
