"""Reader of multi-head latent attention (DeepSeek-V2, 2024) in config.json. No torch."""

import math
from typing import ClassVar

import msgspec

from quire.args.keys import Keys
from quire.args.rope import RopeArgs, Rotation

LATENT_KEYS = frozenset(
    "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim "
    "rope_interleave attention_bias mlp_bias".split()
)


class LatentArgs(msgspec.Struct, frozen=True, kw_only=True, tag="latent"):
    """Sizes of multi-head latent attention; P = nope_dim, R = rope_dim, V = v_dim, L = kv_rank.

    q_rank     width of the compressed query; 0: queries come from one projection
    kv_rank    width of the compressed keys and values, which the cache keeps beside a rotated key of rope_dim
    norm_eps   epsilon of the norms after compression; always 1e-6, as in Hugging Face, for any value in config.json
    scale      of attention scores: (P + R)^-0.5, times YaRN's temperature squared where the config has mscale_all_dim
    interleaved   True: rotated pairs are (0, 1), (2, 3), ...; False: (0, R / 2), (1, R / 2 + 1), ...
    A rope of kind "none" leaves all numbers as they are; R of each key are then shared by all heads all the same.
    """

    one_scale: ClassVar[bool] = True  # of the latent in an 8-bit cache: keys and values come from it

    num_heads: int
    rope: RopeArgs
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    norm_eps: float = 1e-6
    interleaved: bool = True

    @property
    def head_dim(self) -> int:
        """Dimensions of a query head: those that are rotated come last."""
        return self.nope_dim + self.rope_dim

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a query head that RoPE rotates."""
        return self.rope_dim

    @property
    def rotation(self) -> Rotation:
        """The rotation of its heads: kernels take the rotated part alone."""
        return Rotation(self.rope, self.rope_dim, self.rope_dim)

    @property
    def break_even(self) -> float:
        """Query tokens per sequence above which expanding the latent costs less arithmetic than attending to it.

        L (P + V) / ((2 L + R) - (P + R + V)); infinite when expanding to keys and values never costs less.
        """
        saved = (2 * self.kv_rank + self.rope_dim) - (self.nope_dim + self.rope_dim + self.v_dim)
        return self.kv_rank * (self.nope_dim + self.v_dim) / saved if saved > 0 else float("inf")


def read_latent(keys: Keys, kind: str, rope: RopeArgs) -> LatentArgs:
    """Return the latent attention (MLA) that config.json describes. `kind`: see `Family.latent`.

    Raises ModelError or UnsupportedModel.
    """
    for key in ("attention_bias", "mlp_bias"):
        if keys.flag(key):
            raise keys.unsupported(f"{key}=true is not implemented with latent attention: use another model.")
    nope, rotated = keys.size("qk_nope_head_dim"), keys.size("qk_rope_head_dim")
    if rope.divisors:
        raise keys.unsupported("rope type 'longrope' is not implemented with latent attention: use another model.")
    if rotated % 2:
        raise keys.wrong(f"qk_rope_head_dim={rotated} is odd, and rotation needs pairs: correct the file.")
    heads, kv_heads = keys.size("num_attention_heads"), keys.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise keys.wrong(
            f"num_key_value_heads={kv_heads} must equal num_attention_heads={heads}: every head "
            "has its own keys and values. Correct the file."
        )
    if kind == "deepseek_v2" and not keys.flag("rope_interleave", True):
        raise keys.unsupported("rope_interleave=false is not implemented for deepseek_v2: use another model.")
    temperature = 0.1 * (rope.mscale_all_dim or 0.0) * math.log(rope.factor) + 1.0
    return LatentArgs(
        num_heads=heads,
        rope=rope,
        q_rank=keys.count("q_lora_rank", 1536) or 0,
        kv_rank=keys.size("kv_lora_rank", 512),
        nope_dim=nope,
        rope_dim=rotated,
        v_dim=keys.size("v_head_dim", 128),
        scale=(nope + rotated) ** -0.5 * temperature**2,
        interleaved=rope.kind != "none" and (kind == "deepseek_v2" or keys.flag("rope_interleave", True)),
    )
