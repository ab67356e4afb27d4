"""Reader of multi-head latent attention (DeepSeek-V2, 2024) in config.json, and of its indexer. No torch."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import structs

from quire.args.keys import Keys
from quire.args.rope import RopeArgs, Rotation

LATENT_KEYS = frozenset(
    "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim "
    "rope_interleave attention_bias mlp_bias".split()
)
# model_type of families with an indexer -> (index_n_heads when the key is missing, rotated pairs are neighbours)
INDEXERS: Mapping[str, tuple[int, bool]] = {"deepseek_v32": (64, False), "glm_moe_dsa": (32, True)}
SCHEDULE = {"F": "full", "S": "shared"}  # signs of index_topk_pattern


class IndexArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of an indexer (DeepSeek-V3.2, 2025): attention reads the `top_k` tokens that it scores best.

    num_heads     heads of its queries; keys have one head
    head_dim      dimensions of a head; the first of them are rotated, as many as of the rotated part of attention
    interleaved   True: rotated pairs are (0, 1), (2, 3), ...; False: (0, R / 2), (1, R / 2 + 1), ...
    shared        True: the layer has no indexer and reads the tokens that the last layer with one has chosen
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    shared: bool = False

    @property
    def factor(self) -> float:
        """The factor on the weights of heads in a score."""
        return float((self.num_heads * self.head_dim) ** -0.5)


class LatentArgs(msgspec.Struct, frozen=True, kw_only=True, tag="latent"):
    """Sizes of multi-head latent attention; P = nope_dim, R = rope_dim, V = v_dim, L = kv_rank.

    q_rank     width of the compressed query; 0: queries come from one projection
    kv_rank    width of the compressed keys and values, which the cache keeps beside a rotated key of rope_dim
    norm_eps   epsilon of the norms after compression; always 1e-6, as in Hugging Face, for any value in config.json
    scale      of attention scores: (P + R)^-0.5, times YaRN's temperature squared where the config has mscale_all_dim
    interleaved   True: rotated pairs are (0, 1), (2, 3), ...; False: (0, R / 2), (1, R / 2 + 1), ...
    index      the indexer that chooses the tokens that it reads; None: it reads all tokens
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
    index: IndexArgs | None = None

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


def latent_layers(keys: Keys, kind: str, rope: RopeArgs, num_layers: int, extra: int) -> list[LatentArgs]:
    """Return the latent attention of each layer, then of `extra` layers that predict several tokens.

    kind   see `Family.latent`
    Raises ModelError or UnsupportedModel.
    """
    own = read_latent(keys, kind, rope)
    if kind not in INDEXERS:
        return [own] * (num_layers + extra)
    index = _read_index(keys, kind, own)
    shared = _shared(keys, num_layers)
    return [
        structs.replace(own, index=structs.replace(index, shared=layer in shared))
        for layer in range(num_layers + extra)
    ]


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
    fixed = kind == "deepseek_v2" or kind in INDEXERS
    if fixed and not keys.flag("rope_interleave", True):
        raise keys.unsupported(f"rope_interleave=false is not implemented for {kind}: use another model.")
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
        interleaved=rope.kind != "none" and (fixed or keys.flag("rope_interleave", True)),
    )


def _read_index(keys: Keys, kind: str, own: LatentArgs) -> IndexArgs:
    """Return the indexer of a layer that has one. own: the attention that reads the chosen tokens."""
    heads, interleaved = INDEXERS[kind]
    if keys.flag("indexer_rope_interleave", interleaved) != interleaved:
        raise keys.unsupported(
            f"indexer_rope_interleave={str(not interleaved).lower()} is not implemented for {kind}, whose indexer "
            f"rotates {'neighbours' if interleaved else 'halves'}: use another model."
        )
    if keys.get("moe_router_dtype") not in (None, "float32"):
        raise keys.unsupported(f"moe_router_dtype={keys['moe_router_dtype']!r} is not implemented: only float32 is.")
    if not own.q_rank:
        raise keys.unsupported("an indexer without q_lora_rank is not implemented: use another model.")
    index = IndexArgs(
        num_heads=keys.size("index_n_heads", heads),
        head_dim=keys.size("index_head_dim", 128),
        top_k=keys.size("index_topk", 2048),
        interleaved=interleaved,
    )
    if index.head_dim < own.rope_dim:
        raise keys.wrong(
            f"index_head_dim={index.head_dim} is below qk_rope_head_dim={own.rope_dim}, the dimensions that are "
            "rotated: correct the file."
        )
    return index


def _shared(keys: Keys, num_layers: int) -> frozenset[int]:
    """Return the layers that read the tokens that an earlier layer has chosen.

    indexer_types names them, else index_topk_pattern. Else layer i has an indexer if index_topk_freq divides
    max(i - index_skip_topk_offset + 1, 0).
    """
    named = keys.names("indexer_types")
    pattern = keys.checked("index_topk_pattern", _is_pattern, "a text of the signs F and S, a list of names, or null")
    if not named and pattern:
        named = [SCHEDULE[sign] for sign in pattern] if isinstance(pattern, str) else list(pattern)
    if not named:
        every, offset = keys.size("index_topk_freq", 1), keys.count("index_skip_topk_offset", 2) or 0
        named = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(num_layers)]
    if len(named) < num_layers or set(named) - set(SCHEDULE.values()):
        raise keys.wrong(f"indexer_types must name {num_layers} layers, each full or shared: correct the file.")
    if named[0] == "shared":
        raise keys.wrong("indexer_types[0]='shared': there is no layer before it whose tokens it can read.")
    return frozenset(layer for layer in range(num_layers) if named[layer] == "shared")


def _is_pattern(value: Any) -> bool:
    if isinstance(value, str):
        return set(value) <= SCHEDULE.keys()
    return value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value))
