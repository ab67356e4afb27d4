"""The layers of a decoder by config.json: of each the kinds of its mixer and feed-forward part, and their sizes.

A kind is a type of arguments. `plan/kinds` has what the plan knows of each kind, `layers/` the modules. No torch.
"""

from typing import ClassVar

import msgspec

from quire.args.experts import MoEArgs
from quire.args.latent import LatentArgs
from quire.args.rope import RopeArgs, Rotation


class GroupedArgs(msgspec.Struct, frozen=True, kw_only=True, tag="grouped"):
    """Sizes of grouped-query attention.

    head_dim, rotary_dim      dimensions of a query or key head, and the number of these that RoPE rotates
    rope                      settings of this rotation
    input_bias, output_bias   biases of the q, k and v projections, and of the o projection
    qk_norm                   RMS norm of q and k before rotation: of each "head", or of all heads together ("whole")
    window                    tokens that a token attends to, its own included; None: all before it
    scale                     factor on scores; 0: head_dim^-0.5
    soft_cap                  scores become soft_cap * tanh(score / soft_cap); None: they stay
    sinks                     each query head has a score more, whose weight belongs to no token
    interleaved               True: rotated pairs are (0, 1), (2, 3), ...; False: (0, R / 2), (1, R / 2 + 1), ...
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
    scale: float = 0.0
    soft_cap: float | None = None
    sinks: bool = False
    interleaved: bool = False

    @property
    def factor(self) -> float:
        """The factor on scores."""
        return self.scale or self.head_dim**-0.5

    @property
    def rotation(self) -> Rotation:
        """The rotation of its heads: kernels take whole heads, whose other dimensions get angle 0."""
        return Rotation(self.rope, self.rotary_dim, self.head_dim)


class DenseArgs(msgspec.Struct, frozen=True, kw_only=True, tag="dense"):
    """Sizes of a gated MLP: numbers between gate and down, biases of all its projections, and the activation.

    act   activation of the gate, of `quire.kernels.activation`
    """

    width: int
    bias: bool = False
    act: str = "silu"


MixerArgs = GroupedArgs | LatentArgs
FeedForwardArgs = DenseArgs | MoEArgs


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
               parallel
    residual   factor on the result of each half before it is added to the residual stream
    """

    mixer: MixerArgs
    feed_forward: FeedForwardArgs
    norms: str = "before"
    residual: float = 1.0

    @property
    def before(self) -> bool:
        """True if each half has a norm before it."""
        return self.norms in ("before", "both")

    @property
    def after(self) -> bool:
        """True if the result of each half is normalized."""
        return self.norms in ("after", "both")
