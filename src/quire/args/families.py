"""The model families: defaults of keys that config.json lacks, and the keys that a family alone reads. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from quire.args.experts import MOE_KEYS
from quire.args.latent import LATENT_KEYS


@dataclass(frozen=True, kw_only=True)
class Window:
    """A family's rule for its sliding window, or for its attention in chunks.

    default   value of sliding_window when config.json lacks the key
    by_flag   True: sliding_window has an effect only with use_sliding_window=true
    layers    layers with the window: "all", whatever layer_types says; or, without layer_types, "each" layer, those
              "from" max_window_layers on, the "even below" it, the "unrotated" ones, those "between" each `period`-th
              layer; "": the family has no windows
    period    of full layers, when config.json lacks the key sliding_window_pattern
    last_full True: the last layer has no window, whatever layer_types says
    plain     True: layers with the window rotate heads without the scaling of the others
    theta     rope_theta of these, when config.json lacks the key rope_local_base_freq; 0: that of the others
    chunk     attention_chunk_size when config.json lacks the key: layers that rotate heads attend in chunks; None: the
              family does not
    """

    default: int | None = None
    by_flag: bool = False
    layers: str = ""
    period: int = 0
    last_full: bool = False
    plain: bool = False
    theta: float = 0.0
    chunk: int | None = None


@dataclass(frozen=True, kw_only=True)
class Heads:
    """A family's heads.

    qk_norm      norm of queries and keys, as in `GroupedArgs`; None: of each head if config.json has use_qk_norm.
                 "plain": unless use_qk_norm is false, in layers that rotate heads
    one_kv_each  True: num_key_value_heads may be missing; every head then has its own keys and values
    dim          head_dim when config.json lacks the key; None: hidden_size / heads
    unrotated    layers that do not rotate heads: those "listed" in no_rope_layers, those "without window", the "full"
                 ones if the model has a window, "all", all "unless named" by position_embedding_type="rope", or ""
    soft_cap     attn_logit_softcapping when config.json lacks the key
    grow         queries grow with their position: in "all" layers by llama_4_scaling_beta of the rotary settings, in
                 "unrotated" ones by attn_scale and floor_scale unless attn_temperature_tuning is false; "": they do not
    settings     True: config.json must have rotary settings, since the family's own default is no plain rotation
    gated        attn_output_gate when config.json lacks the key
    rotated      part of each head that is rotated when partial_rotary_factor is missing
    interleaved, values, sinks, scale   as in `GroupedArgs` and `ScoreArgs`
    by_kind      True: layers with full attention have sizes of their own: global_head_dim, num_global_key_value_heads,
                 attention_k_eq_v. Without rope_parameters they rotate in proportion, the part `rotated`
    """

    qk_norm: str | None = ""
    one_kv_each: bool = False
    dim: int | None = None
    unrotated: str = ""
    soft_cap: float | None = None
    grow: str = ""
    settings: bool = False
    interleaved: bool = False
    sinks: bool = False
    values: str = ""
    scale: float = 0.0
    by_kind: bool = False
    gated: bool = False
    rotated: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LayerForm:
    """The form of a family's layers.

    norms, plus_one, centered   as in `LayerArgs` and `NormArgs`; norms "by kind": "after" in layers that attend,
                      "before" in recurrent ones
    eps, eps_key      epsilon of norms when config.json lacks the key, and the key
    act               hidden_act when config.json lacks the key; hidden_activation is another name of the key
    root_embeddings   True: embeddings are multiplied by the root of hidden_size
    tied              tie_word_embeddings when config.json lacks the key
    logit_cap         final_logit_softcapping when config.json lacks the key
    width_key, width  key of the width of a gated MLP; width when config.json lacks the key, None: it must have it
    scaled            as in `LayerArgs`
    both              True: layers have attention and a recurrent mixer beside each other
    single            True: a layer is a mixer or a feed-forward part alone, as layer_types says
    """

    norms: str = "before"
    plus_one: bool = False
    centered: bool = False
    eps: float = 1e-6
    eps_key: str = "rms_norm_eps"
    act: str = "silu"
    root_embeddings: bool = False
    tied: bool = False
    logit_cap: float | None = None
    width_key: str = "intermediate_size"
    width: int | None = None
    scaled: bool = False
    single: bool = False
    both: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """Defaults of a model family for keys that config.json lacks, and the further keys that the family reads.

    qkv_bias, output_bias   biases of these projections; None: config.json decides, by its key attention_bias
    biased       value of attention_bias when config.json lacks the key
    output_key   key that decides of output_bias
    experts      model family in `MOE_KEYS` with the same keys, defaults and routing of experts; "": no experts
    beside       key that switches experts on, which stand beside the gated MLP of a layer; "": all models of the family
                 have experts, in place of the MLP
    recurrent    key in `recurrent.READERS` of a family with recurrent layers beside attention; "": it has none
    latent       deepseek_v2 or deepseek_v3: latent attention (MLA) as in this family; deepseek_v32 or glm_moe_dsa: it
                 also has an indexer; "": grouped-query attention
    words        further keys of config.json that the family reads. Some switch a feature on by being listed here:
                 attention_bias, mlp_bias, partial_rotary_factor, use_qk_norm, num_nextn_predict_layers (MTP layers,
                 which are skipped; config.json may spell this key num_mtp_layers), query_pre_attn_scalar and
                 attention_multiplier (scale of scores), attn_logit_softcapping, final_logit_softcapping, logit_scale,
                 logits_scaling, embedding_multiplier, residual_multiplier
    """

    architecture: str
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    biased: bool = False
    output_key: str = "attention_bias"
    experts: str = ""
    beside: str = ""
    latent: str = ""
    recurrent: str = ""
    window: Window = Window()
    heads: Heads = Heads()
    form: LayerForm = LayerForm()
    theta: float = 10_000.0  # when rope_theta is missing
    dtype: str = "float32"  # of the stored weights when config.json names none
    words: str = ""

    @cached_property
    def keys(self) -> frozenset[str]:
        """The further keys of config.json that the family reads."""
        return frozenset(self.words.split())

    @property
    def reads(self) -> frozenset[str]:
        """All keys of config.json that this family reads and some other families do not."""
        return self.keys | MOE_KEYS.get(self.experts, frozenset()) | (LATENT_KEYS if self.latent else frozenset())


OWN_KV = Heads(one_kv_each=True)
QWEN3 = Heads(qk_norm="head", dim=128)
QWEN35 = Heads(qk_norm="head", dim=256, gated=True, rotated=0.25)
QWEN35_KEYS = (
    "attention_bias attn_output_gate partial_rotary_factor full_attention_interval linear_conv_kernel_dim "
    "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads mamba_ssm_dtype "
    "mtp_num_hidden_layers mtp_use_dedicated_embeddings output_gate_type"
)
OLMO_HYBRID_KEYS = (
    "attention_bias position_embedding_type linear_num_key_heads linear_num_value_heads linear_key_head_dim "
    "linear_value_head_dim linear_conv_kernel_dim linear_allow_neg_eigval linear_a_log_min linear_a_log_max "
    "linear_dt_min linear_dt_max linear_dt_init_floor"
)
KIMI_KEYS = (
    "linear_attn_config linear_head_dim linear_num_heads linear_conv_kernel_dim linear_lower_bound mla_use_nope "
    "model_max_length"
)
GEMMA = LayerForm(norms="both", plus_one=True, act="gelu_pytorch_tanh", root_embeddings=True, tied=True)
GEMMA2 = replace(GEMMA, logit_cap=30.0)
GEMMA_KEYS = "attention_bias query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping"
GEMMA4_KEYS = (
    "attention_bias final_logit_softcapping global_head_dim num_global_key_value_heads "
    "attention_k_eq_v per_layer_config use_bidirectional_attention num_kv_shared_layers use_double_wide_mlp "
    "hidden_size_per_layer_input vocab_size_per_layer_input"
)
LLAMA4_KEYS = (
    "attention_bias attention_chunk_size attn_scale attn_temperature_tuning floor_scale intermediate_size_mlp "
    "no_rope_layers no_rope_layer_interval use_qk_norm"
)
LFM2_KEYS = (
    "norm_eps conv_L_cache conv_bias conv_dim conv_dim_out conv_use_xavier_init full_attn_idxs tie_embedding "
    "block_ff_dim block_auto_adjust_ff_dim block_multiple_of block_ffn_dim_multiplier block_dim block_norm_eps "
    "block_mlp_init_scale block_out_init_scale block_use_swiglu block_use_xavier_init use_pos_enc num_heads"
)
MAMBA = (  # sizes of recurrent layers
    "mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups "
    "mamba_n_heads mamba_proj_bias time_step_limit"
)
FALCON_KEYS = (
    "attention_bias mlp_bias projectors_bias embedding_multiplier lm_head_multiplier mlp_multipliers key_multiplier "
    "attention_in_multiplier attention_out_multiplier ssm_multipliers ssm_in_multiplier ssm_out_multiplier "
    "mamba_d_ssm mamba_norm_before_gate mamba_rms_norm mamba_use_mlp layers_block_type num_logits_to_keep "
)
NEMOTRON_KEYS = (
    "mlp_bias mlp_hidden_act hybrid_override_pattern layers_block_type mtp_hybrid_override_pattern "
    "mtp_layers_block_type ssm_state_size mamba_num_heads mamba_head_dim mamba_hidden_act mamba_ssm_cache_dtype "
    "n_groups conv_kernel expand chunk_size use_conv_bias use_bias mamba_proj_bias time_step_limit time_step_min "
    "time_step_max time_step_floor time_step_rank layer_norm_epsilon residual_in_fp32 rescale_prenorm_residual "
    "hidden_dropout num_logits_to_keep use_mamba_kernels moe_shared_expert_overlap norm_eps attention_bias"
)
INDEX_KEYS = (
    "num_nextn_predict_layers index_n_heads index_head_dim index_topk indexer_rope_interleave indexer_types "
    "index_topk_pattern index_topk_freq index_skip_topk_offset index_share_for_mtp_iteration moe_router_dtype"
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", qkv_bias=None, output_bias=None, heads=OWN_KV,
                    words="attention_bias mlp_bias"),
    "mistral": Family(architecture="MistralForCausalLM", window=Window(default=4096, layers="all")),
    "ministral": Family(architecture="MinistralForCausalLM", window=Window(default=4096, layers="each")),
    "ministral3": Family(architecture="Ministral3ForCausalLM", heads=Heads(grow="all", dim=128),
                         form=LayerForm(eps=1e-5), theta=1e6),
    "seed_oss": Family(architecture="SeedOssForCausalLM", qkv_bias=None, output_bias=None, biased=True,
                       output_key="attention_out_bias", heads=Heads(dim=128),
                       words="attention_bias attention_out_bias mlp_bias"),
    "smollm3": Family(architecture="SmolLM3ForCausalLM", qkv_bias=None, output_bias=None,
                      heads=Heads(unrotated="listed"), form=LayerForm(tied=True), theta=2e6,
                      window=Window(by_flag=True, layers="unrotated"),
                      words="attention_bias mlp_bias no_rope_layers no_rope_layer_interval"),
    "llama4_text": Family(architecture="Llama4ForCausalLM", qkv_bias=None, output_bias=None, theta=500_000.0,
                          heads=Heads(qk_norm="plain", dim=128, unrotated="listed", grow="unrotated",
                                      interleaved=True),
                          form=LayerForm(eps=1e-5, width_key="intermediate_size_mlp", width=16_384),
                          window=Window(chunk=8192), experts="llama4", words=LLAMA4_KEYS),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True,
                    window=Window(default=4096, by_flag=True, layers="from")),
    "qwen3": Family(architecture="Qwen3ForCausalLM", qkv_bias=None, output_bias=None, heads=QWEN3,
                    window=Window(default=4096, by_flag=True, layers="from"), words="attention_bias"),
    "qwen3_vl_text": Family(architecture="Qwen3VLTextForCausalLM", qkv_bias=None, output_bias=None, heads=QWEN3,
                            words="attention_bias mrope_section"),
    "qwen3_vl_moe_text": Family(architecture="Qwen3VLMoeTextForCausalLM", qkv_bias=None, output_bias=None,
                                heads=Heads(qk_norm="head"), experts="qwen3_vl_moe",
                                words="attention_bias mrope_section"),
    "gemma2": Family(architecture="Gemma2ForCausalLM", qkv_bias=None, output_bias=None,
                     heads=Heads(dim=256, soft_cap=50.0), form=GEMMA2,
                     window=Window(default=4096, layers="between", period=2), words=GEMMA_KEYS),
    "gemma3_text": Family(architecture="Gemma3ForCausalLM", qkv_bias=None, output_bias=None,
                          heads=Heads(qk_norm="head", dim=256), form=GEMMA, theta=1e6,
                          window=Window(default=4096, layers="between", period=6, plain=True, theta=10_000.0),
                          words=GEMMA_KEYS + " sliding_window_pattern rope_local_base_freq"),
    "gemma4_text": Family(architecture="Gemma4ForCausalLM", qkv_bias=None, output_bias=None, experts="gemma4",
                          beside="enable_moe_block",
                          heads=Heads(qk_norm="head", dim=256, scale=1.0, values="normed", by_kind=True, rotated=0.25),
                          form=replace(GEMMA, plus_one=False, scaled=True), theta=1e6,
                          window=Window(default=512, layers="between", period=6, last_full=True, plain=True,
                                        theta=10_000.0),
                          words=GEMMA4_KEYS),
    "olmo2": Family(architecture="Olmo2ForCausalLM", qkv_bias=None, output_bias=None,
                    heads=Heads(qk_norm="whole", one_kv_each=True), form=LayerForm(norms="after", eps=1e-5),
                    words="attention_bias"),
    "olmo3": Family(architecture="Olmo3ForCausalLM", qkv_bias=None, output_bias=None,
                    heads=Heads(qk_norm="whole", one_kv_each=True), form=LayerForm(norms="after", eps=1e-5),
                    theta=500_000.0, window=Window(default=4096, layers="between", period=4, plain=True),
                    words="attention_bias"),
    "granite": Family(architecture="GraniteForCausalLM", qkv_bias=None, output_bias=None, heads=OWN_KV,
                      words="attention_bias mlp_bias attention_multiplier embedding_multiplier "
                                 "residual_multiplier logits_scaling"),
    "granitemoehybrid": Family(architecture="GraniteMoeHybridForCausalLM", qkv_bias=None, output_bias=None,
                               heads=Heads(one_kv_each=True, unrotated="unless named"), experts="granitemoehybrid",
                               recurrent="granitemoehybrid", form=LayerForm(width_key="shared_intermediate_size"),
                               words="position_embedding_type attention_bias attention_multiplier embedding_multiplier "
                                     "residual_multiplier logits_scaling shared_intermediate_size " + MAMBA),
    "nemotron_h": Family(architecture="NemotronHForCausalLM", heads=Heads(dim=128, unrotated="all"),
                         recurrent="nemotron_h", experts="nemotron_h", words=NEMOTRON_KEYS,
                         form=LayerForm(eps=1e-5, eps_key="layer_norm_epsilon", act="relu2", single=True)),
    "falcon_h1": Family(architecture="FalconH1ForCausalLM", qkv_bias=None, output_bias=None, recurrent="falcon_h1",
                        heads=Heads(), form=LayerForm(eps=1e-5, both=True), words=FALCON_KEYS + MAMBA),
    "glm4": Family(architecture="Glm4ForCausalLM", qkv_bias=None, biased=True,
                   heads=Heads(dim=128, interleaved=True, rotated=0.5), form=LayerForm(norms="both", eps=1.5625e-7),
                   words="attention_bias partial_rotary_factor"),
    "exaone4": Family(architecture="Exaone4ForCausalLM", heads=Heads(qk_norm="head", unrotated="full"),
                      form=LayerForm(norms="after", eps=1e-5),
                      window=Window(default=4096, layers="between", period=4), words="sliding_window_pattern"),
    "phi3": Family(architecture="Phi3ForCausalLM", heads=OWN_KV, form=LayerForm(eps=1e-5), window=Window(layers="all"),
                   words="partial_rotary_factor"),
    "cohere2": Family(architecture="Cohere2ForCausalLM", qkv_bias=None, output_bias=None,
                      heads=Heads(one_kv_each=True, interleaved=True, unrotated="without window"),
                      form=LayerForm(norms="shared", centered=True, eps=1e-5, eps_key="layer_norm_eps", tied=True),
                      window=Window(default=4096, layers="between", period=4),
                      words="attention_bias logit_scale sliding_window_pattern layer_norm_eps rope_interleave"),
    "mixtral": Family(architecture="MixtralForCausalLM", form=LayerForm(eps=1e-5), theta=1e6, experts="mixtral",
                      window=Window(layers="all")),
    "qwen2_moe": Family(architecture="Qwen2MoeForCausalLM", qkv_bias=True,
                        window=Window(default=4096, by_flag=True, layers="even below"), experts="qwen2_moe"),
    "qwen3_moe": Family(architecture="Qwen3MoeForCausalLM", qkv_bias=None, output_bias=None,
                        heads=Heads(qk_norm="head"), window=Window(default=4096, by_flag=True, layers="all"),
                        experts="qwen3_moe", words="attention_bias"),
    "qwen3_next": Family(architecture="Qwen3NextForCausalLM", qkv_bias=None, output_bias=None,
                         heads=QWEN35, form=LayerForm(plus_one=True), experts="qwen3_next",
                         recurrent="qwen3_next", words=QWEN35_KEYS),
    "qwen3_5_text": Family(architecture="Qwen3_5ForCausalLM", qkv_bias=None, output_bias=None,
                           heads=QWEN35, form=LayerForm(plus_one=True), recurrent="qwen3_5",
                           words=QWEN35_KEYS + " mrope_section"),
    "qwen3_5_moe_text": Family(architecture="Qwen3_5MoeForCausalLM", qkv_bias=None, output_bias=None,
                               heads=QWEN35, form=LayerForm(plus_one=True, width_key="shared_expert_intermediate_size"),
                               experts="qwen3_5_moe", recurrent="qwen3_5", words=QWEN35_KEYS + " mrope_section"),
    "olmo_hybrid": Family(architecture="OlmoHybridForCausalLM", qkv_bias=None, output_bias=None,
                          heads=Heads(qk_norm="whole", one_kv_each=True, unrotated="unless named"),
                          form=LayerForm(norms="by kind"), recurrent="olmo_hybrid", words=OLMO_HYBRID_KEYS),
    "kimi_linear": Family(architecture="KimiLinearForCausalLM", heads=Heads(one_kv_each=True, unrotated="all"),
                          form=LayerForm(eps=1e-5), experts="kimi_linear", latent="deepseek_v3",
                          recurrent="kimi_linear", words=KIMI_KEYS),
    "lfm2": Family(architecture="Lfm2ForCausalLM", heads=Heads(qk_norm="head"), theta=1e6, recurrent="lfm2",
                   form=LayerForm(eps=1e-5, eps_key="norm_eps", tied=True), words=LFM2_KEYS),
    "lfm2_moe": Family(architecture="Lfm2MoeForCausalLM", heads=Heads(qk_norm="head"), theta=1e6, recurrent="lfm2",
                       form=LayerForm(eps=1e-5, eps_key="norm_eps", tied=True), experts="lfm2_moe", words=LFM2_KEYS),
    "gpt_oss": Family(architecture="GptOssForCausalLM", qkv_bias=None, output_bias=None, biased=True, theta=150_000.0,
                      dtype="bfloat16",
                      heads=Heads(dim=64, sinks=True, settings=True), form=LayerForm(eps=1e-5), experts="gpt_oss",
                      window=Window(default=128, layers="between", period=2),
                      words="attention_bias initial_context_length"),
    "minimax_m2": Family(architecture="MiniMaxM2ForCausalLM", heads=Heads(qk_norm="whole", dim=128), theta=5e6,
                         experts="minimax_m2", words="partial_rotary_factor rotary_dim"),
    "deepseek_v2": Family(architecture="DeepseekV2ForCausalLM", heads=OWN_KV, experts="deepseek_v2",
                          latent="deepseek_v2"),
    "kimi_k2": Family(architecture="DeepseekV3ForCausalLM", heads=OWN_KV, experts="deepseek_v3",
                      latent="deepseek_v3", words="num_nextn_predict_layers"),
    "deepseek_v3": Family(architecture="DeepseekV3ForCausalLM", heads=OWN_KV, experts="deepseek_v3",
                          latent="deepseek_v3", words="num_nextn_predict_layers"),
    "deepseek_v32": Family(architecture="DeepseekV32ForCausalLM", heads=OWN_KV, experts="deepseek_v3",
                           latent="deepseek_v32", words=INDEX_KEYS),
    "glm_moe_dsa": Family(architecture="GlmMoeDsaForCausalLM", heads=OWN_KV, form=LayerForm(eps=1e-5),
                          experts="glm_moe_dsa", latent="glm_moe_dsa", words=INDEX_KEYS),
    "glm4_moe": Family(architecture="Glm4MoeForCausalLM", qkv_bias=None, heads=Heads(qk_norm=None, rotated=0.5),
                       form=LayerForm(eps=1e-5), experts="glm4_moe",
                       words="attention_bias partial_rotary_factor use_qk_norm num_nextn_predict_layers"),
    "glm4_moe_lite": Family(architecture="Glm4MoeLiteForCausalLM", heads=OWN_KV, form=LayerForm(eps=1e-5),
                            experts="glm4_moe_lite", latent="deepseek_v3", words="num_nextn_predict_layers"),
}  # fmt: skip


def has_family(raw: Mapping[str, Any]) -> bool:
    """Return True for a config.json of a family that Quire has, whatever else it says."""
    named = {family.architecture for family in FAMILIES.values()}
    listed = raw.get("architectures")
    by_name = raw.get("model_type") is None and isinstance(listed, list) and not named.isdisjoint(map(str, listed))
    return raw.get("model_type") in FAMILIES or by_name
