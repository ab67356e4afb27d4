"""Kimi-Linear (Moonshot AI): Kimi delta attention in three of four layers, latent attention, DeepSeek-V3's experts."""

from quire.models.names import DELTA_RULE, LATENT, MIXTRAL_EXPERTS, SHARED_EXPERTS, NameMap, renamed

_AT = "model.layers.{i}.self_attn."
_EXPERTS = "model.layers.{i}.block_sparse_moe."

NAME_MAP: NameMap = (
    *LATENT,
    *renamed(_AT, DELTA_RULE),
    (f"{_AT}f_a_proj.weight", "layers.{i}.delta.rates.weight", "f"),
    (f"{_AT}g_a_proj.weight", "layers.{i}.delta.rates.weight", "g"),
    (f"{_AT}f_b_proj.weight", "layers.{i}.delta.decays.weight", ""),
    (f"{_AT}g_b_proj.weight", "layers.{i}.delta.gates.weight", ""),
    *MIXTRAL_EXPERTS,
    (f"{_EXPERTS}gate.e_score_correction_bias", "layers.{i}.mlp.router.correction", ""),
    *((row[0].replace(".mlp.", ".block_sparse_moe."), *row[1:]) for row in SHARED_EXPERTS),
)
