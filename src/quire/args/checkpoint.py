"""Reader of a checkpoint's config.json: its keys become the arguments of a model family.

Knows Hugging Face's spellings of each key, old and new, and the keys that change the math. A key that changes the math
and is not implemented is refused by name. An unknown key is listed in `ModelArgs.notes`. Knows nothing of tensors,
devices or flags. No torch.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.args.eagle import UNBOUNDED, EagleArgs, read_head
from quire.args.experts import MOE_KEYS, MoEArgs, read_moe
from quire.args.keys import Keys
from quire.args.latent import LATENT_KEYS, LatentArgs, read_latent
from quire.args.rope import RopeArgs, read_rope, rope_settings
from quire.contracts.errors import ModelError, ModelNotFound
from quire.contracts.text_table import read_rows

DTYPES = ("float32", "bfloat16", "float16")
SKIPPED = "Multi-token-prediction (MTP) layers are skipped"  # begin of a note
MOST_LAYERS = 4000  # thirty times those of the deepest models; a plan of more takes seconds


@dataclass(frozen=True, kw_only=True)
class Window:
    """A family's rule for its sliding window.

    default   value of sliding_window when config.json lacks the key
    by_flag   True: sliding_window has an effect only with use_sliding_window=true
    layers    layers with the window: "all"; or, without layer_types, "from" max_window_layers on, or "below" it
    """

    default: int | None = None
    by_flag: bool = False
    layers: str = "all"


@dataclass(frozen=True, kw_only=True)
class Family:
    """Defaults of a model family for keys that config.json lacks, and the further keys that the family reads.

    qkv_bias, output_bias   biases of these projections; None: config.json decides, by its key attention_bias
    qk_norm      RMS norm of queries and keys; None: config.json decides, by its key use_qk_norm
    one_kv_head_each   True: num_key_value_heads may be missing; every head then has its own keys and values
    experts      model family in `MOE_KEYS` with the same keys, defaults and routing of experts; "": no experts
    latent       deepseek_v2 or deepseek_v3: latent attention (MLA) as in this family; "": grouped-query attention
    keys         further keys of config.json that the family reads. Some switch a feature on by being listed here:
                 attention_bias, mlp_bias, partial_rotary_factor, use_qk_norm, num_nextn_predict_layers (MTP layers,
                 which are skipped; config.json may spell this key num_mtp_layers)
    """

    architecture: str
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    qk_norm: bool | None = False
    one_kv_head_each: bool = False
    experts: str = ""
    latent: str = ""
    window: Window = Window()
    default_head_dim: int | None = None  # None: hidden_size / heads
    norm_eps: float = 1e-6  # when rms_norm_eps is missing
    theta: float = 10_000.0  # when rope_theta is
    rotated: float = 1.0  # part of each head that is rotated when partial_rotary_factor is missing
    keys: frozenset[str] = frozenset()

    @property
    def reads(self) -> frozenset[str]:
        """All keys of config.json that this family reads and some other families do not."""
        return self.keys | MOE_KEYS.get(self.experts, frozenset()) | (LATENT_KEYS if self.latent else frozenset())


FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", qkv_bias=None, output_bias=None, one_kv_head_each=True,
                    keys=frozenset({"attention_bias", "mlp_bias"})),
    "mistral": Family(architecture="MistralForCausalLM", window=Window(default=4096)),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True,
                    window=Window(default=4096, by_flag=True, layers="from")),
    "qwen3": Family(architecture="Qwen3ForCausalLM", qkv_bias=None, output_bias=None, qk_norm=True,
                    default_head_dim=128, window=Window(default=4096, by_flag=True, layers="from"),
                    keys=frozenset({"attention_bias"})),
    "mixtral": Family(architecture="MixtralForCausalLM", norm_eps=1e-5, theta=1e6, experts="mixtral"),
    "qwen2_moe": Family(architecture="Qwen2MoeForCausalLM", qkv_bias=True,
                        window=Window(default=4096, by_flag=True, layers="below"), experts="qwen2_moe"),
    "qwen3_moe": Family(architecture="Qwen3MoeForCausalLM", qkv_bias=None, output_bias=None, qk_norm=True,
                        window=Window(default=4096, by_flag=True), experts="qwen3_moe",
                        keys=frozenset({"attention_bias"})),
    "deepseek_v2": Family(architecture="DeepseekV2ForCausalLM", one_kv_head_each=True, experts="deepseek_v2",
                          latent="deepseek_v2"),
    "deepseek_v3": Family(architecture="DeepseekV3ForCausalLM", one_kv_head_each=True, experts="deepseek_v3",
                          latent="deepseek_v3", keys=frozenset({"num_nextn_predict_layers"})),
    "glm4_moe": Family(architecture="Glm4MoeForCausalLM", qkv_bias=None, qk_norm=None, norm_eps=1e-5, rotated=0.5,
                       experts="glm4_moe", keys=frozenset({"attention_bias", "partial_rotary_factor", "use_qk_norm",
                                                           "num_nextn_predict_layers"})),
}  # fmt: skip

# Keys of config.json that no family reads in its own way -> the values that have no effect; None: all values.
NEUTRAL: Mapping[str, list[Any] | None] = {
    key: json.loads(neutral[0]) if neutral else None
    for keys, *neutral in read_rows(Path(__file__).with_name("checkpoint_keys.txt"))
    for key in keys.split()
}


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Arguments of a decoder model, complete: layers and kernels add no defaults of their own.

    head_dim, rotary_dim          dimensions of a query or key head, and the number of these that RoPE rotates
    attention_bias, output_bias   biases of the q, k and v projections, and of the o projection
    qk_norm          RMS norm over head_dim of q and k before rotation
    moe              mixture of experts; None: feed-forward layers only
    latent           multi-head latent attention; None: grouped-query attention
    extra_layers     multi-token-prediction (MTP) layers of the checkpoint after the last layer
    draft_layers     number of these that an engine runs to draft tokens; the others are skipped
    eagle            an EAGLE head, not a model
    dtype            dtype of the stored weights by config.json ("bfloat16", ...)
    notes            notes for the user about ignored and unknown keys, one sentence each
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeArgs
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    moe: MoEArgs | None = None
    latent: LatentArgs | None = None
    extra_layers: int = 0
    draft_layers: int = 0
    eagle: EagleArgs | None = None
    notes: tuple[str, ...] = field(default=())

    def has_experts(self, layer: int) -> bool:
        """True for a layer with experts. A draft layer is as the last layers are."""
        return self.moe is not None and (layer in self.moe.layers or layer >= self.num_layers)


def read_checkpoint_config(folder: Path, head: str = "") -> ModelArgs:
    """Read `folder/config.json`. Raises ModelNotFound, ModelError (damaged) or UnsupportedModel, one line each."""
    return parse_checkpoint_config(read_raw_config(folder), str(Path(folder) / "config.json"), head)


def read_raw_config(folder: Path) -> dict[str, Any]:
    """Return the decoded `folder/config.json`. Raises ModelNotFound or ModelError."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(f"{path} does not exist: a model folder needs a config.json.") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also for numbers with thousands of digits
        raise ModelError(f"{path} cannot be read ({error}): download it again.") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds {type(raw).__name__}, not an object: download it again.")
    return raw


def parse_checkpoint_config(raw: Mapping[str, Any], source: str = "config.json", head: str = "") -> ModelArgs:
    """Turn the decoded config.json into `ModelArgs`; `source` names the file in errors, `head` is as in `read_head`."""
    keys, eagle = read_head(raw, source, head)
    model_type, family, headless = _find_family(keys)
    _refuse_math(keys, family)
    hidden = keys.size("hidden_size")
    heads = keys.size("num_attention_heads")
    kv_heads = _kv_heads(keys, family, heads)
    max_positions = keys.size("max_position_embeddings")
    layers = keys.size("num_hidden_layers", most=MOST_LAYERS)
    rope, rope_notes = read_rope(keys, max_positions, family.theta)
    context = max(max_positions, rope.extended_positions)
    _refuse_window(keys, family, UNBOUNDED if eagle else context, layers)
    latent = read_latent(keys, family.latent, rope)
    head_dim = latent.nope_dim + latent.rope_dim if latent else _head_dim(keys, family, hidden, heads)
    rotary_dim = latent.rope_dim if latent else _rotary_dim(keys, family, head_dim, rope)
    spelled = "num_mtp_layers" if "num_mtp_layers" in keys else "num_nextn_predict_layers"
    extra = keys.count(spelled, 1, most=MOST_LAYERS) or 0 if "num_nextn_predict_layers" in family.keys else 0
    bias = keys.flag("attention_bias") if "attention_bias" in family.keys else False
    dtype, dtype_notes = _dtype(keys)
    args = ModelArgs(
        model_type=model_type,
        architecture=family.architecture,
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        intermediate_size=keys.size("intermediate_size"),
        norm_eps=keys.positive("rms_norm_eps", family.norm_eps),
        rope=rope,
        attention_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=keys.flag("mlp_bias") if "mlp_bias" in family.keys else False,
        qk_norm=keys.flag("use_qk_norm") if family.qk_norm is None else family.qk_norm,
        tie_word_embeddings=keys.flag("tie_word_embeddings") or headless,
        max_position_embeddings=context,
        dtype=dtype,
        moe=read_moe(keys, family.experts, layers),
        latent=latent,
        extra_layers=extra,
        notes=(
            *_notes(keys, family, layers, extra),
            *rope_notes,
            *dtype_notes,
            *(["this model has no head: use it for embeddings, its generated text is noise."] if headless else ()),
        ),
    )
    if eagle is None:
        return args
    vocab = Keys(raw, source).size("draft_vocab_size", eagle.vocab_size, most=eagle.vocab_size)
    return replace(
        args,
        model_type=head,
        vocab_size=vocab,
        max_position_embeddings=UNBOUNDED,
        tie_word_embeddings=False,
        eagle=eagle,
    )


def _find_family(keys: Keys) -> tuple[str, Family, bool]:
    """Return model_type, its family, and True when the model has no head; the embedding then takes its place."""
    ours = ", ".join(f"{name} ({family.architecture})" for name, family in FAMILIES.items())
    architectures = keys.names("architectures")
    named = {family.architecture: name for name, family in FAMILIES.items()}
    model_type = keys.get("model_type") or (named.get(architectures[0]) if architectures else None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        code = " Its auto_map points to code inside the repository, which is never run." if keys.get("auto_map") else ""
        shown = model_type or (architectures[0] if architectures else "nothing")
        raise keys.unsupported(f"model_type {shown!r} is not implemented.{code} Implemented: {ours}.")
    family = FAMILIES[model_type]
    headless = family.architecture.replace("ForCausalLM", "Model") in architectures
    if architectures and family.architecture not in architectures and not headless:
        raise keys.unsupported(
            f"architecture {architectures[0]!r} of model_type {model_type!r} is not implemented. Implemented: {ours}."
        )
    return model_type, family, headless


def _refuse_math(keys: Keys, family: Family) -> None:
    activation = keys.get("hidden_act", "silu")
    if activation != "silu":
        raise keys.unsupported(f"hidden_act={activation!r} is not implemented: use a model with 'silu'.")
    for key, neutral in NEUTRAL.items():
        if key in keys and key not in family.reads and neutral is not None and keys[key] not in neutral:
            shown = repr(keys[key]) if not isinstance(keys[key], (dict, list)) else "{...}"
            raise keys.unsupported(f"{key}={shown} changes the math and is not implemented: use another model.")


def _refuse_window(keys: Keys, family: Family, context: int, layers: int) -> None:
    """Refuse an active sliding window shorter than the context: only full attention is implemented."""
    kinds = sorted(set(keys.names("layer_types")) - {"full_attention"})
    window = keys.count("sliding_window", family.window.default)
    active = window is not None and window < context
    if family.window.by_flag:
        limit = keys.count("max_window_layers")
        reaches = {"all": True, "from": limit is None or limit < layers, "below": limit is None or limit > 0}
        listed = family.window.layers != "all" and keys.get("layer_types")
        reached = bool(kinds) if listed else reaches[family.window.layers]
        active = active and bool(keys.get("use_sliding_window")) and reached
    if active:
        default = "" if "sliding_window" in keys else f" (missing, which means {window})"
        raise keys.unsupported(
            f"sliding_window={window}{default} is shorter than the context of {context} tokens; "
            "sliding window attention is not implemented: use another model."
        )
    if kinds and not (family.window.by_flag and kinds == ["sliding_attention"]):
        raise keys.unsupported(f"layer_types holds {kinds[0]!r}, which is not implemented: use another model.")


def _rotary_dim(keys: Keys, family: Family, head_dim: int, rope: RopeArgs) -> int:
    """Return the number of rotated dimensions of a head. Their two halves come first in the checkpoint."""
    nested = rope_settings(keys)
    if "partial_rotary_factor" not in family.keys:
        if nested.get("partial_rotary_factor", 1) not in (None, 1, 1.0):
            raise keys.unsupported(
                f"partial_rotary_factor={nested['partial_rotary_factor']} is not implemented for "
                "this family: use another model."
            )
        return head_dim
    part = Keys({**keys, **nested}, keys.source).positive("partial_rotary_factor", family.rotated)
    rotated = int(head_dim * part)
    if rotated % 2 or not 0 < rotated <= head_dim or (rotated < head_dim and rope.kind == "yarn"):
        raise keys.unsupported(
            f"partial_rotary_factor={part} of {head_dim} dimensions is not implemented "
            f"with rope type {rope.kind!r}: use another model."
        )
    return rotated


def _kv_heads(keys: Keys, family: Family, heads: int) -> int:
    if keys.get("num_key_value_heads") is None and (family.one_kv_head_each or "num_key_value_heads" in keys):
        return heads
    kv_heads = keys.size("num_key_value_heads")
    if heads % kv_heads:
        raise keys.wrong(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}: correct the file."
        )
    return kv_heads


def _head_dim(keys: Keys, family: Family, hidden: int, heads: int) -> int:
    if keys.get("head_dim") is not None:
        head_dim = keys.size("head_dim")
    elif family.default_head_dim is not None and "head_dim" not in keys:
        head_dim = family.default_head_dim
    elif hidden % heads:
        raise keys.wrong(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and "
            "head_dim is missing: correct the file."
        )
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise keys.wrong(f"head_dim={head_dim} is odd, and rotary positions need pairs: correct the file.")
    return head_dim


def _dtype(keys: Keys) -> tuple[str, tuple[str, ...]]:
    value = keys.get("dtype", keys.get("torch_dtype"))
    if value is None:
        return "float32", ("config.json names no dtype: float32 is assumed",)
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise keys.unsupported(f"dtype={value!r} is not implemented: use a model in {', '.join(DTYPES)}.")
    return name, ()


def _notes(keys: Keys, family: Family, layers: int, extra: int) -> Iterator[str]:
    if keys.get("auto_map"):
        yield f"auto_map is ignored: {keys.get('model_type')} is built in, the repository's own code is never run"
    if extra:
        last = f" to {layers + extra - 1}" if extra > 1 else ""
        yield (
            f'{SKIPPED} (layer {layers}{last} of the checkpoint) without --speculative-config \'{{"method": "mtp"}}\''
        )
    if unknown := sorted(set(keys) - family.reads - NEUTRAL.keys()):
        yield f"config.json has keys that are not known and were ignored: {', '.join(unknown)}"
