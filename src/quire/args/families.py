"""The model families: defaults of keys that config.json lacks, and the keys that a family alone reads. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.args.experts import MOE_KEYS
from quire.args.latent import LATENT_KEYS


@dataclass(frozen=True, kw_only=True)
class Window:
    """A family's rule for its sliding window.

    default   value of sliding_window when config.json lacks the key
    by_flag   True: sliding_window has an effect only with use_sliding_window=true
    layers    layers with the window: "all", whatever layer_types says; or, without layer_types, those "from"
              max_window_layers on, or the "even below" it; "": the family has no windows
    """

    default: int | None = None
    by_flag: bool = False
    layers: str = ""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Defaults of a model family for keys that config.json lacks, and the further keys that the family reads.

    qkv_bias, output_bias   biases of these projections; None: config.json decides, by its key attention_bias
    biased       value of attention_bias when config.json lacks the key
    output_key   key that decides of output_bias
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
    biased: bool = False
    output_key: str = "attention_bias"
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
    "mistral": Family(architecture="MistralForCausalLM", window=Window(default=4096, layers="all")),
    "seed_oss": Family(architecture="SeedOssForCausalLM", qkv_bias=None, output_bias=None, biased=True,
                       output_key="attention_out_bias", one_kv_head_each=True, default_head_dim=128,
                       keys=frozenset({"attention_bias", "attention_out_bias", "mlp_bias"})),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True,
                    window=Window(default=4096, by_flag=True, layers="from")),
    "qwen3": Family(architecture="Qwen3ForCausalLM", qkv_bias=None, output_bias=None, qk_norm=True,
                    default_head_dim=128, window=Window(default=4096, by_flag=True, layers="from"),
                    keys=frozenset({"attention_bias"})),
    "mixtral": Family(architecture="MixtralForCausalLM", norm_eps=1e-5, theta=1e6, experts="mixtral",
                      window=Window(layers="all")),
    "qwen2_moe": Family(architecture="Qwen2MoeForCausalLM", qkv_bias=True,
                        window=Window(default=4096, by_flag=True, layers="even below"), experts="qwen2_moe"),
    "qwen3_moe": Family(architecture="Qwen3MoeForCausalLM", qkv_bias=None, output_bias=None, qk_norm=True,
                        window=Window(default=4096, by_flag=True, layers="all"), experts="qwen3_moe",
                        keys=frozenset({"attention_bias"})),
    "deepseek_v2": Family(architecture="DeepseekV2ForCausalLM", one_kv_head_each=True, experts="deepseek_v2",
                          latent="deepseek_v2"),
    "kimi_k2": Family(architecture="DeepseekV3ForCausalLM", one_kv_head_each=True, experts="deepseek_v3",
                      latent="deepseek_v3", keys=frozenset({"num_nextn_predict_layers"})),
    "deepseek_v3": Family(architecture="DeepseekV3ForCausalLM", one_kv_head_each=True, experts="deepseek_v3",
                          latent="deepseek_v3", keys=frozenset({"num_nextn_predict_layers"})),
    "glm4_moe": Family(architecture="Glm4MoeForCausalLM", qkv_bias=None, qk_norm=None, norm_eps=1e-5, rotated=0.5,
                       experts="glm4_moe", keys=frozenset({"attention_bias", "partial_rotary_factor", "use_qk_norm",
                                                           "num_nextn_predict_layers"})),
    "glm4_moe_lite": Family(architecture="Glm4MoeLiteForCausalLM", one_kv_head_each=True, norm_eps=1e-5,
                            experts="glm4_moe", latent="deepseek_v3", keys=frozenset({"num_nextn_predict_layers"})),
}  # fmt: skip
