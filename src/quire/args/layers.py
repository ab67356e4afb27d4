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
    qk_norm                   RMS norm over head_dim of q and k before rotation
    window                    tokens that a token attends to, its own included; None: all before it
    """

    one_scale: ClassVar[bool] = False  # keys and values of an 8-bit cache have a scale each

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope: RopeArgs
    input_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    window: int | None = None

    @property
    def rotation(self) -> Rotation:
        """The rotation of its heads: kernels take whole heads, whose other dimensions get angle 0."""
        return Rotation(self.rope, self.rotary_dim, self.head_dim)


class DenseArgs(msgspec.Struct, frozen=True, kw_only=True, tag="dense"):
    """Sizes of a gated MLP: numbers between gate and down, and biases of all its projections."""

    width: int
    bias: bool = False


MixerArgs = GroupedArgs | LatentArgs
FeedForwardArgs = DenseArgs | MoEArgs


class LayerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A layer: it reads the tokens before a token with its mixer, then the token alone with its feed-forward part."""

    mixer: MixerArgs
    feed_forward: FeedForwardArgs
