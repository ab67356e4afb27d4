"""Rows of the name maps that the decoders of Hugging Face share: (checkpoint name, parameter, part)."""

from typing import NamedTuple

NameMap = tuple[tuple[str, str, str], ...]  # (checkpoint name, parameter, part); {i}: a layer's index, {e}: an expert's


class StackedForm(NamedTuple):
    """Form of a stored tensor that stacks a matrix of all experts along its first axis.

    transposed   True: matrices are stored as [inputs, outputs]; False: as [outputs, inputs]
    paired       True: outputs of gate and up alternate (g0, u0, g1, u1); False: all of gate come before those of up
    quantized    True: in MXFP4, whose tensors have "_blocks" and "_scales" behind the name
    """

    transposed: bool = False
    paired: bool = False
    quantized: bool = False

    @property
    def unit(self) -> int:
        """Numbers between gate and down that ranks do not divide: those of a block of MXFP4."""
        return 32 if self.quantized else 1


# Forms in which checkpoints store the experts. The rows of a name map have the form's name as their part. "each": a
# tensor for each expert and matrix; its rows have the parts "{e}.gate", "{e}.up" and "{e}.". Where forms of a family
# have the same names, shapes decide.
EACH = "each"
STACKED_FORMS = {
    "columns": StackedForm(transposed=True),
    "paired columns": StackedForm(transposed=True, paired=True),
    "rows": StackedForm(),
    "paired blocks": StackedForm(paired=True, quantized=True),
}


def renamed(at: str, *maps: NameMap) -> NameMap:
    """Return rows of a layer whose tensors begin with `at` in the checkpoint."""
    return tuple((row[0].replace("model.layers.{i}.", at), *row[1:]) for rows in maps for row in rows)


EMBEDDING_AND_HEAD: NameMap = (
    ("model.embed_tokens.weight", "embed.weight", ""),
    ("model.norm.weight", "norm.weight", ""),
    ("lm_head.weight", "head.weight", ""),
)
BLOCK_NORMS: NameMap = (
    ("model.layers.{i}.input_layernorm.weight", "layers.{i}.attention_norm.weight", ""),
    ("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight", ""),
)
SANDWICH_NORMS: NameMap = (  # of Gemma: before each half and of its result
    ("model.layers.{i}.input_layernorm.weight", "layers.{i}.attention_norm.weight", ""),
    ("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.attention_after.weight", ""),
    ("model.layers.{i}.pre_feedforward_layernorm.weight", "layers.{i}.mlp_norm.weight", ""),
    ("model.layers.{i}.post_feedforward_layernorm.weight", "layers.{i}.mlp_after.weight", ""),
)
AFTER_NORMS: NameMap = (  # of results alone
    ("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.attention_after.weight", ""),
    ("model.layers.{i}.post_feedforward_layernorm.weight", "layers.{i}.mlp_after.weight", ""),
)
ATTENTION: NameMap = (
    ("model.layers.{i}.self_attn.q_proj.weight", "layers.{i}.attention.qkv.weight", "q"),
    ("model.layers.{i}.self_attn.k_proj.weight", "layers.{i}.attention.qkv.weight", "k"),
    ("model.layers.{i}.self_attn.v_proj.weight", "layers.{i}.attention.qkv.weight", "v"),
    ("model.layers.{i}.self_attn.o_proj.weight", "layers.{i}.attention.output.weight", ""),
)
GATED_DELTA: NameMap = (
    ("model.layers.{i}.linear_attn.conv1d.weight", "layers.{i}.delta.rule.conv", "q"),
    ("model.layers.{i}.linear_attn.conv1d.weight", "layers.{i}.delta.rule.conv", "k"),
    ("model.layers.{i}.linear_attn.conv1d.weight", "layers.{i}.delta.rule.conv", "v"),
    ("model.layers.{i}.linear_attn.A_log", "layers.{i}.delta.rule.rate", ""),
    ("model.layers.{i}.linear_attn.dt_bias", "layers.{i}.delta.rule.shift", ""),
    ("model.layers.{i}.linear_attn.norm.weight", "layers.{i}.delta.rule.norm", ""),
    ("model.layers.{i}.linear_attn.out_proj.weight", "layers.{i}.delta.output.weight", ""),
)
DELTA_APART: NameMap = (  # projections of a gated delta net: queries, keys and values together
    ("model.layers.{i}.linear_attn.in_proj_qkv.weight", "layers.{i}.delta.input.weight", "q"),
    ("model.layers.{i}.linear_attn.in_proj_qkv.weight", "layers.{i}.delta.input.weight", "k"),
    ("model.layers.{i}.linear_attn.in_proj_qkv.weight", "layers.{i}.delta.input.weight", "v"),
    ("model.layers.{i}.linear_attn.in_proj_z.weight", "layers.{i}.delta.input.weight", "z"),
    ("model.layers.{i}.linear_attn.in_proj_b.weight", "layers.{i}.delta.rates.weight", "b"),
    ("model.layers.{i}.linear_attn.in_proj_a.weight", "layers.{i}.delta.rates.weight", "a"),
)
DELTA_TOGETHER: NameMap = (  # gates and the two rates likewise together
    *(("model.layers.{i}.linear_attn.in_proj_qkvz.weight", "layers.{i}.delta.input.weight", side) for side in "qkvz"),
    *(("model.layers.{i}.linear_attn.in_proj_ba.weight", "layers.{i}.delta.rates.weight", side) for side in "ba"),
)
DELTA_RULE: NameMap = (  # of layers that store projections and convolutions apart, as Flash Linear Attention has them
    *((f"model.layers.{{i}}.{side}_proj.weight", "layers.{i}.delta.input.weight", side) for side in "qkv"),
    *((f"model.layers.{{i}}.{side}_conv1d.weight", "layers.{i}.delta.rule.conv", side) for side in "qkv"),
    ("model.layers.{i}.b_proj.weight", "layers.{i}.delta.rates.weight", "b"),
    ("model.layers.{i}.A_log", "layers.{i}.delta.rule.rate", ""),
    ("model.layers.{i}.dt_bias", "layers.{i}.delta.rule.shift", ""),
    ("model.layers.{i}.o_norm.weight", "layers.{i}.delta.rule.norm", ""),
    ("model.layers.{i}.o_proj.weight", "layers.{i}.delta.output.weight", ""),
)
MAMBA: NameMap = (  # Mamba 2; the rest of a name is below "model.layers.{i}." and the name of the mixer
    *(
        (f"model.layers.{{i}}.in_proj.{part}", f"layers.{{i}}.mamba.input.{part}", side)
        for part in ("weight", "bias")
        for side in ("z", "x", "b", "c", "t")
    ),
    *(
        (f"model.layers.{{i}}.conv1d.{part}", f"layers.{{i}}.mamba.rule.{name}", side)
        for part, name in (("weight", "conv"), ("bias", "bias"))
        for side in ("x", "b", "c")
    ),
    ("model.layers.{i}.A_log", "layers.{i}.mamba.rule.rate", ""),
    ("model.layers.{i}.dt_bias", "layers.{i}.mamba.rule.shift", ""),
    ("model.layers.{i}.D", "layers.{i}.mamba.rule.skip", ""),
    ("model.layers.{i}.norm.weight", "layers.{i}.mamba.rule.norm", ""),
    ("model.layers.{i}.out_proj.weight", "layers.{i}.mamba.output.weight", ""),
    ("model.layers.{i}.out_proj.bias", "layers.{i}.mamba.output.bias", ""),
)
QKV_BIAS: NameMap = (
    ("model.layers.{i}.self_attn.q_proj.bias", "layers.{i}.attention.qkv.bias", "q"),
    ("model.layers.{i}.self_attn.k_proj.bias", "layers.{i}.attention.qkv.bias", "k"),
    ("model.layers.{i}.self_attn.v_proj.bias", "layers.{i}.attention.qkv.bias", "v"),
)
OUTPUT_BIAS: NameMap = (("model.layers.{i}.self_attn.o_proj.bias", "layers.{i}.attention.output.bias", ""),)
QK_NORM: NameMap = (
    ("model.layers.{i}.self_attn.q_norm.weight", "layers.{i}.attention.head_norm.q", ""),
    ("model.layers.{i}.self_attn.k_norm.weight", "layers.{i}.attention.head_norm.k", ""),
)
WIDE_NORM: NameMap = (
    ("model.layers.{i}.self_attn.q_norm.weight", "layers.{i}.attention.wide_norm.q", ""),
    ("model.layers.{i}.self_attn.k_norm.weight", "layers.{i}.attention.wide_norm.k", ""),
)
LATENT_ATTENTION: NameMap = (
    ("model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight", "layers.{i}.attention.down.weight", "kv"),
    ("model.layers.{i}.self_attn.kv_a_layernorm.weight", "layers.{i}.attention.kv_norm.weight", ""),
    ("model.layers.{i}.self_attn.kv_b_proj.weight", "layers.{i}.attention.kv_up.weight", ""),
    ("model.layers.{i}.self_attn.o_proj.weight", "layers.{i}.attention.output.weight", ""),
)
DIRECT_QUERY: NameMap = (("model.layers.{i}.self_attn.q_proj.weight", "layers.{i}.attention.down.weight", "q"),)
COMPRESSED_QUERY: NameMap = (
    ("model.layers.{i}.self_attn.q_a_proj.weight", "layers.{i}.attention.down.weight", "q_down"),
    ("model.layers.{i}.self_attn.q_a_layernorm.weight", "layers.{i}.attention.q_norm.weight", ""),
    ("model.layers.{i}.self_attn.q_b_proj.weight", "layers.{i}.attention.q.weight", ""),
)
INDEXER: NameMap = (
    ("model.layers.{i}.self_attn.indexer.wq_b.weight", "layers.{i}.attention.index.q.weight", ""),
    ("model.layers.{i}.self_attn.indexer.wk.weight", "layers.{i}.attention.index.k.weight", ""),
    ("model.layers.{i}.self_attn.indexer.k_norm.weight", "layers.{i}.attention.index.k_norm.weight", ""),
    ("model.layers.{i}.self_attn.indexer.k_norm.bias", "layers.{i}.attention.index.k_norm.bias", ""),
    ("model.layers.{i}.self_attn.indexer.weights_proj.weight", "layers.{i}.attention.index.heads.weight", ""),
)
GATED_MLP: NameMap = (
    ("model.layers.{i}.mlp.gate_proj.weight", "layers.{i}.mlp.gate_up.weight", "gate"),
    ("model.layers.{i}.mlp.up_proj.weight", "layers.{i}.mlp.gate_up.weight", "up"),
    ("model.layers.{i}.mlp.down_proj.weight", "layers.{i}.mlp.down.weight", ""),
)
FUSED_GATED_MLP: NameMap = (
    ("model.layers.{i}.mlp.gate_up_proj.weight", "layers.{i}.mlp.gate_up.weight", "gate"),
    ("model.layers.{i}.mlp.gate_up_proj.weight", "layers.{i}.mlp.gate_up.weight", "up"),
    ("model.layers.{i}.mlp.down_proj.weight", "layers.{i}.mlp.down.weight", ""),
)
DENSE: NameMap = (*EMBEDDING_AND_HEAD, *BLOCK_NORMS, *ATTENTION, *GATED_MLP)  # of every decoder with ordinary attention
LATENT: NameMap = (*EMBEDDING_AND_HEAD, *BLOCK_NORMS, *LATENT_ATTENTION, *DIRECT_QUERY, *COMPRESSED_QUERY, *GATED_MLP)
MLP_BIAS: NameMap = (
    ("model.layers.{i}.mlp.gate_proj.bias", "layers.{i}.mlp.gate_up.bias", "gate"),
    ("model.layers.{i}.mlp.up_proj.bias", "layers.{i}.mlp.gate_up.bias", "up"),
    ("model.layers.{i}.mlp.down_proj.bias", "layers.{i}.mlp.down.bias", ""),
)
EXPERTS: NameMap = (
    ("model.layers.{i}.mlp.gate.weight", "layers.{i}.mlp.router.weight", ""),
    ("model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "layers.{i}.mlp.experts.gate_up", "{e}.gate"),
    ("model.layers.{i}.mlp.experts.{e}.up_proj.weight", "layers.{i}.mlp.experts.gate_up", "{e}.up"),
    ("model.layers.{i}.mlp.experts.{e}.down_proj.weight", "layers.{i}.mlp.experts.down", "{e}."),
)
SHARED_EXPERT: NameMap = (  # with a gate of its own
    ("model.layers.{i}.mlp.shared_expert.gate_proj.weight", "layers.{i}.mlp.shared.gate_up.weight", "gate"),
    ("model.layers.{i}.mlp.shared_expert.up_proj.weight", "layers.{i}.mlp.shared.gate_up.weight", "up"),
    ("model.layers.{i}.mlp.shared_expert.down_proj.weight", "layers.{i}.mlp.shared.down.weight", ""),
    ("model.layers.{i}.mlp.shared_expert_gate.weight", "layers.{i}.mlp.shared_gate.weight", ""),
)
MIXTRAL_EXPERTS: NameMap = (
    ("model.layers.{i}.block_sparse_moe.gate.weight", "layers.{i}.mlp.router.weight", ""),
    ("model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight", "layers.{i}.mlp.experts.gate_up", "{e}.gate"),
    ("model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight", "layers.{i}.mlp.experts.gate_up", "{e}.up"),
    ("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight", "layers.{i}.mlp.experts.down", "{e}."),
)
STACKED_EXPERTS: NameMap = (  # as checkpoints store them beside EXPERTS, whose router has the same name
    ("model.layers.{i}.mlp.experts.gate_up_proj", "layers.{i}.mlp.experts.gate_up", "rows"),
    ("model.layers.{i}.mlp.experts.down_proj", "layers.{i}.mlp.experts.down", "rows"),
)
ROUTER_CORRECTION: NameMap = (
    ("model.layers.{i}.mlp.gate.e_score_correction_bias", "layers.{i}.mlp.router.correction", ""),
)
SHARED_EXPERTS: NameMap = (
    ("model.layers.{i}.mlp.shared_experts.gate_proj.weight", "layers.{i}.mlp.shared.gate_up.weight", "gate"),
    ("model.layers.{i}.mlp.shared_experts.up_proj.weight", "layers.{i}.mlp.shared.gate_up.weight", "up"),
    ("model.layers.{i}.mlp.shared_experts.down_proj.weight", "layers.{i}.mlp.shared.down.weight", ""),
)
PREDICTION: NameMap = (  # of the token after the next; the layer's copies of embedding and head are not read
    ("model.layers.{i}.enorm.weight", "layers.{i}.token_norm.weight", ""),
    ("model.layers.{i}.hnorm.weight", "layers.{i}.state_norm.weight", ""),
    ("model.layers.{i}.eh_proj.weight", "layers.{i}.join.weight", ""),
    ("model.layers.{i}.shared_head.norm.weight", "layers.{i}.norm.weight", ""),
)
MTP: NameMap = (  # likewise, of Qwen; the rest of the layer has the names of the model's behind "mtp.layers.0."
    ("mtp.pre_fc_norm_embedding.weight", "layers.{i}.token_norm.weight", ""),
    ("mtp.pre_fc_norm_hidden.weight", "layers.{i}.state_norm.weight", ""),
    ("mtp.fc.weight", "layers.{i}.join.weight", ""),
    ("mtp.norm.weight", "layers.{i}.norm.weight", ""),
)
