"""Tiny random checkpoints made by transformers, with its answers on any device; and an executor that records.

python -m tests.support.tiny_models FAMILY FOLDER     writes a checkpoint
"""

import itertools
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.args.families import FAMILIES as CONFIGURED
from quire.args.families import Family
from quire.contracts.protocols import Executor, ExecutorFacts
from quire.contracts.step import I32, StepPlan, StepResult
from quire.plan.layout import checkpoint_names

MARGIN = 1e-3  # between the two largest logits of every greedy step: far above float32 noise
VOCAB = 96
CONTEXT = 256

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1_000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}
_QWEN: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
# Few heads give scores of exactly 0, among which transformers chooses otherwise.
_INDEXER: dict[str, Any] = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 8}
_WINDOW: dict[str, Any] = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_GEMMA4: dict[str, Any] = {
    "sliding_window": 9, "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 8.0, "rope_parameters": None,
}  # fmt: skip
# The rounding of more layers reaches 1e-4 in transformers, too.
_GEMMA4_FEWER: dict[str, Any] = {
    "num_hidden_layers": 5,
    "final_logit_softcapping": 4.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
_GROWING: dict[str, Any] = {  # its rotation is always yarn's, of a trained length that prompts exceed
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
    }
}
_CHUNKS: dict[str, Any] = {
    "attention_chunk_size": 8, "floor_scale": 4, "attn_scale": 0.3, "no_rope_layer_interval": 2,
    "interleave_moe_layer_step": 2, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 24,
    "intermediate_size_mlp": 80,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "initializer_range": 0.1,  # with larger weights rounding shows in the tests' bounds
}  # fmt: skip
_OLMO: dict[str, Any] = _DELTA | {"head_dim": None, "rms_norm_eps": 1e-4}  # another epsilon than that of heads
_KIMI: dict[str, Any] = _LATENT | {
    "initializer_range": 0.1,  # as of _DELTA
    "q_lora_rank": None,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 24,
    "num_shared_experts": 2,
    "num_expert_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
        "num_heads": 8,
        "head_dim": 12,
        "short_conv_kernel_size": 3,
    },
}
_CONV: dict[str, Any] = {"head_dim": None, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}
_GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0,
    "head_dim": None, "shared_intermediate_size": 72,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_n_groups": 4, "mamba_d_state": 24, "mamba_chunk_size": 16, "mamba_d_conv": 3,
    "layer_types": ["mamba", "attention", "mamba"],
}  # fmt: skip
_NEMOTRON: dict[str, Any] = {
    "hybrid_override_pattern": "M-*M", "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 4, "ssm_state_size": 20,
    "conv_kernel": 3, "chunk_size": 16,
}  # fmt: skip
_FALCON: dict[str, Any] = {
    "head_dim": None, "mamba_d_ssm": 96, "mamba_n_heads": 8, "mamba_n_groups": 4, "mamba_d_state": 20,
    "mamba_d_conv": 3, "mamba_chunk_size": 16, "mlp_multipliers": [0.9, 0.6],
    "ssm_multipliers": [0.9, 0.8, 0.7, 1.2, 1.3], "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.7,
    "attention_in_multiplier": 0.8, "attention_out_multiplier": 0.9, "key_multiplier": 0.6,
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5,
}  # fmt: skip
_SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_mtp_layers": 0}


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """A row of `FAMILIES`: what the tests of all families need to know of one.

    options   keys of config.json that a tiny model needs, and those that make a path visible: groups, a dense layer, a
              scaling that is not 1, widths that no two things share
    biases    keys that switch biases on
    ropes     kinds of rotation that the family may have
    by_layer  theta of the layers with a window, whose rotation has no scaling; 0: theirs is that of the others
    yarn      settings of the rotation "yarn" beside those of `ROPES`
    peer      model_type that computes the same in transformers; "": the family's own. With another one transformers
              cannot read the family's files: `write_model` writes a copy for it
    keys      key of the peer's config.json -> the family's own key
    tensors   piece of a tensor's name in the peer's files -> the family's own piece
    of        the family, where several rows describe models of it; "": it has the row's name
    A row without `keys` and `tensors` tests the peer's names, not the family's.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    ropes: tuple[str, ...] = tuple(ROPES)
    by_layer: float = 0.0
    yarn: Mapping[str, Any] = field(default_factory=dict)
    peer: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    of: str = ""

    def __post_init__(self) -> None:
        assert self.peer or not (self.keys or self.tensors), "names of its own need a peer, whose names are replaced"


# Every family of `quire.args.checkpoint.FAMILIES`. All tests of families take them from here.
FAMILIES: Mapping[str, FamilyCase] = {
    "llama": FamilyCase(biases=("attention_bias", "mlp_bias")),
    "mistral": FamilyCase(options={"sliding_window": None}),
    "seed_oss": FamilyCase(biases=("attention_bias", "attention_out_bias", "mlp_bias")),
    "ministral": FamilyCase(
        options={
            "sliding_window": 9,
            "head_dim": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
    ),
    "ministral3": FamilyCase(options=_GROWING, ropes=("default",)),
    "smollm3": FamilyCase(
        options={"no_rope_layer_interval": 2, "pad_token_id": None}, biases=("attention_bias", "mlp_bias")
    ),
    "llama4_text": FamilyCase(  # its norm of rotated heads would undo yarn's factor
        options=_CHUNKS, biases=("attention_bias",), ropes=tuple(rope for rope in ROPES if rope != "yarn")
    ),
    "gemma2": FamilyCase(
        options=_WINDOW | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0},
        biases=("attention_bias",),
    ),
    "gemma3_text": FamilyCase(
        options=_WINDOW | {"query_pre_attn_scalar": 24}, biases=("attention_bias",), by_layer=500.0
    ),
    "gemma4_text": FamilyCase(options=_GEMMA4, biases=("attention_bias",), ropes=("default",)),
    "gemma4_moe": FamilyCase(
        options=_GEMMA4
        | _GEMMA4_FEWER
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24},
        biases=("attention_bias",),
        ropes=("default",),
        of="gemma4_text",
    ),
    "gemma4_inputs": FamilyCase(
        options=_GEMMA4
        | _GEMMA4_FEWER
        | {"hidden_size_per_layer_input": 20, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"attention_k_eq_v": False},
        biases=("attention_bias",),
        ropes=("default",),
        of="gemma4_text",
    ),
    "olmo2": FamilyCase(options={"head_dim": None}, biases=("attention_bias",)),
    "olmo3": FamilyCase(options=_WINDOW | {"head_dim": None}, biases=("attention_bias",), by_layer=10_000.0),
    "granite": FamilyCase(
        options={
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
            "head_dim": None,
        },
        biases=("attention_bias", "mlp_bias"),
    ),
    "qwen3_next": FamilyCase(
        options=_DELTA | _QWEN | {"shared_expert_intermediate_size": 40, "partial_rotary_factor": 0.5},
        biases=("attention_bias",),
        ropes=("default", "theta"),
    ),
    "qwen3_5_text": FamilyCase(
        options=_DELTA | {"partial_rotary_factor": 0.5}, biases=("attention_bias",), ropes=("default", "theta")
    ),
    "qwen3_5_moe_text": FamilyCase(
        options=_DELTA | _QWEN | {"shared_expert_intermediate_size": 40, "partial_rotary_factor": 0.5},
        biases=("attention_bias",),
        ropes=("default", "theta"),
    ),
    "olmo_hybrid": FamilyCase(options=_OLMO, biases=("attention_bias",)),
    "kimi_linear": FamilyCase(options=_KIMI, ropes=("default",)),
    "lfm2": FamilyCase(options=_CONV | {"block_multiple_of": 8}, biases=("conv_bias",)),
    "lfm2_moe": FamilyCase(
        options=_CONV | _QWEN | {"num_dense_layers": 1, "routed_scaling_factor": 1.7}, biases=("conv_bias",)
    ),
    "granitemoehybrid": FamilyCase(
        options=_GRANITE
        | {"layer_types": ["attention"] * 3, "mamba_n_heads": 1, "position_embedding_type": "rope"}
        | {"num_local_experts": 0, "num_experts_per_tok": 0},
        biases=("attention_bias",),
    ),
    "granite_mamba": FamilyCase(
        options=_GRANITE | _MAMBA | {"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_groups": 1},
        biases=("attention_bias", "mamba_proj_bias"),
        ropes=("default",),
        of="granitemoehybrid",
    ),
    "granite_moe": FamilyCase(
        options=_GRANITE
        | _MAMBA
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "position_embedding_type": "rope",
        },
        biases=("attention_bias",),
        of="granitemoehybrid",
    ),
    "nemotron_h": FamilyCase(options=_NEMOTRON, biases=("use_bias", "mlp_bias"), ropes=("default",)),
    "nemotron_moe": FamilyCase(
        options=_NEMOTRON
        | {key: one for key, one in _DEEPSEEK.items() if key != "first_k_dense_replace"}
        | {"hybrid_override_pattern": "ME*E", "moe_shared_expert_intermediate_size": 40, "n_shared_experts": 1},
        biases=("use_bias",),
        ropes=("default",),
        of="nemotron_h",
    ),
    "falcon_h1": FamilyCase(options=_FALCON | {"mamba_n_groups": 1}, biases=("mlp_bias", "projectors_bias")),
    "falcon_normed": FamilyCase(
        options=_FALCON
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "attention_in_multiplier": 1.0}
        | {"ssm_in_multiplier": 1.0, "key_multiplier": 0.4},
        biases=("attention_bias", "mamba_proj_bias"),
        of="falcon_h1",
    ),
    "glm4": FamilyCase(
        options={"partial_rotary_factor": 0.5},
        biases=("attention_bias",),
        ropes=tuple(rope for rope in ROPES if rope != "yarn"),
    ),
    "exaone4": FamilyCase(options=_WINDOW | {"head_dim": None}),
    "phi3": FamilyCase(options={"head_dim": None, "pad_token_id": None}, ropes=("default", "theta")),
    "cohere2": FamilyCase(options=_WINDOW | {"logit_scale": 0.25, "head_dim": None}, biases=("attention_bias",)),
    "qwen2": FamilyCase(),
    "qwen3": FamilyCase(biases=("attention_bias",)),
    "qwen3_vl_text": FamilyCase(biases=("attention_bias",), peer="qwen3"),
    "mixtral": FamilyCase(options={"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": FamilyCase(options=_QWEN | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "qwen3_moe": FamilyCase(
        options=_QWEN | {"norm_topk_prob": True, "mlp_only_layers": [0]}, biases=("attention_bias",)
    ),
    "gpt_oss": FamilyCase(
        options=_WINDOW | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24},
        biases=("attention_bias",),
        yarn={"truncate": False},
    ),
    "minimax_m2": FamilyCase(
        options={"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "rotary_dim": 8},
        ropes=tuple(rope for rope in ROPES if rope != "yarn"),
    ),
    "qwen3_vl_moe_text": FamilyCase(
        options=_QWEN | {"norm_topk_prob": True, "mlp_only_layers": [0]}, biases=("attention_bias",), peer="qwen3_moe"
    ),
    "deepseek_v2": FamilyCase(
        options=_DEEPSEEK | _LATENT | {"topk_method": "group_limited_greedy", "q_lora_rank": None}
    ),
    "deepseek_v3": FamilyCase(options=_DEEPSEEK | _LATENT | _SIGMOID),
    "kimi_k2": FamilyCase(options=_DEEPSEEK | _LATENT | _SIGMOID, peer="deepseek_v3"),
    "deepseek_v32": FamilyCase(options=_DEEPSEEK | _LATENT | _SIGMOID | _INDEXER),
    "glm_moe_dsa": FamilyCase(
        options=_DEEPSEEK | _LATENT | _SIGMOID | _INDEXER | {"indexer_types": ["full", "shared", "full"]}
    ),
    "glm4_moe_lite": FamilyCase(
        options={key: one for key, one in (_DEEPSEEK | _LATENT | _SIGMOID).items() if key != "first_k_dense_replace"}
    ),
    "glm4_moe": FamilyCase(
        options=_DEEPSEEK
        | _SIGMOID
        | {"n_group": 1, "topk_group": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5},
        biases=("attention_bias",),
        ropes=tuple(rope for rope in ROPES if rope != "yarn"),
    ),
}


def configured(family: str) -> Family:
    """Return the family of a row."""
    return CONFIGURED[FAMILIES[family].of or family]


def _has_experts(family: str) -> bool:
    own, options = configured(family), FAMILIES[family].options
    if own.experts == "granitemoehybrid" and not options["num_local_experts"]:
        return False
    if own.experts == "nemotron_h" and "E" not in options["hybrid_override_pattern"]:
        return False
    return bool(own.experts) and (not own.beside or bool(options.get(own.beside)))


EXPERTS = tuple(family for family in FAMILIES if _has_experts(family))  # rows of models with experts
DENSE = tuple(family for family in FAMILIES if family not in EXPERTS)
# Whole engines of the ordinary run: one half of the families alone in e2e/test_parity.py, the other half on ranks in
# unit/distributed/test_engine.py. With --full both have all.
ALONE, ON_RANKS = list(FAMILIES)[::2], list(FAMILIES)[1::2]


@dataclass(frozen=True)
class Tiny:
    """Options of a random checkpoint. `heads`: query and KV heads; `changes`: (key, value) of the peer's config."""

    family: str = "qwen3"
    tied: bool = False
    heads: tuple[int, int] = (4, 2)
    rope: str = "default"
    bias: bool = False
    eos: tuple[int, ...] = ()
    head_dim: int = 16
    changes: tuple[tuple[str, Any], ...] = ()


@dataclass
class Oracle:
    """A checkpoint on disk and transformers' answers for it."""

    folder: Path
    model: Any
    _greedy: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _logits: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """[len(ids), V] float32 of one sequence, no cache of keys and values; computed once for a sequence."""
        if (found := self._logits.get(key := tuple(ids))) is None:
            found = self._logits[key] = self._computed(ids)
        return found

    @torch.inference_mode()
    def _computed(self, ids: Sequence[int]) -> np.ndarray:
        """Layers with Mamba 2 run token by token: at the edges of chunks transformers is up to 2e-4 away from that."""
        if any(name.endswith("A_log") for name, _ in self.model.named_parameters()) and not hasattr(
            self.model.config, "linear_num_value_heads"
        ):
            return self._one_by_one(ids)
        logits: Tensor = self.model(torch.tensor([list(ids)], device=self.model.device)).logits[0]
        return logits.float().cpu().numpy()

    def _one_by_one(self, ids: Sequence[int]) -> np.ndarray:
        cache, rows = dict[str, Any](), []
        for one in ids:
            found = self.model(torch.tensor([[one]], device=self.model.device), **cache, use_cache=True)
            name = "cache" if "cache" in found else "past_key_values"  # in older versions
            cache = {name: found[name]}
            rows.append(found.logits[0, -1].float().cpu().numpy())
        return np.stack(rows)

    def logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """log_softmax of `logits`."""
        return torch.log_softmax(torch.from_numpy(self.logits(ids)), -1).numpy()

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """`count` greedy tokens of each prompt by `generate`, never stopping early. More that are known begin so."""
        missing = [list(p) for p in prompts if len(self._greedy.get(tuple(p), ())) < count]
        if missing:
            for prompt, (tokens, _) in zip(missing, generate(self.model, missing, count), strict=True):
                self._greedy[tuple(prompt)] = tokens
        return [self._greedy[tuple(p)][:count] for p in prompts]


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], count: int) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of left-padded prompts, and by how much the largest logit of each step leads.

    Llama 4 counts padding as positions there, biases of projections to convolutions make padding count, and masks of
    Falcon-H1 are too short in old versions: their prompts run one by one. With a window of 1 the cache of transformers
    keeps all tokens instead of none, so it is off.
    """
    if one_by_one(model) and len(prompts) > 1:
        return [generate(model, [prompt], count)[0] for prompt in prompts]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
        use_cache=getattr(model.config, "sliding_window", None) != 1,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top = torch.stack(out.logits).float().topk(2, dim=-1).values  # [count, prompts, 2]
    leads = (top[..., 0] - top[..., 1]).T.tolist()
    return list(zip(out.sequences[:, width:].tolist(), leads, strict=True))


def mixed_prompts() -> list[list[int]]:
    """Seven prompts of 1 to 61 tokens, no two alike; one is as long as two blocks of 16, one is a chunk of 7."""
    lengths = (1, 7, 16, 23, 32, 45, 61)
    return [[int(i) for i in np.random.default_rng(n).integers(1, VOCAB, n)] for n in lengths]


def hf_config(spec: Tiny) -> Any:
    """The transformers configuration of a tiny model; see `tiny_config` for what Quire reads."""
    import transformers

    (heads, kv_heads), family = spec.heads, FAMILIES[spec.family]
    options: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=16 * heads,
        num_hidden_layers=3,
        num_attention_heads=heads,
        head_dim=spec.head_dim,
        num_key_value_heads=kv_heads,
        intermediate_size=80,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=spec.tied,
        rope_parameters=dict(ROPES[spec.rope]),
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=list(spec.eos) or None,
        attn_implementation="eager",
        dtype="float32",
    )
    options |= {**dict.fromkeys(family.biases, spec.bias), **family.options, **dict(spec.changes)}
    if spec.family in EXPERTS:
        options["experts_implementation"] = "eager"
    if configured(spec.family).latent:
        options["num_key_value_heads"] = heads
        del options["head_dim"]  # is that of the rotated part there
        if spec.rope == "yarn":
            options["rope_parameters"] |= {"mscale": 0.7, "mscale_all_dim": 0.9}
    if spec.rope == "yarn":
        options["rope_parameters"] |= family.yarn
    if options.get("head_dim", 0) is None:  # hidden_size / heads there
        del options["head_dim"]
    if family.by_layer:
        plain = {"rope_type": "default", "rope_theta": family.by_layer}
        options["rope_parameters"] = {"full_attention": options["rope_parameters"], "sliding_attention": plain}
    if part := options.pop("partial_rotary_factor", None):
        options["rope_parameters"]["partial_rotary_factor"] = part
    return transformers.AutoConfig.for_model(family.peer or family.of or spec.family, **options)


def as_family(config: dict[str, Any], family: str) -> dict[str, Any]:
    """Return a config.json of the family's peer as one of the family, with the family's own keys."""
    own = {FAMILIES[family].keys.get(key, key): value for key, value in config.items()}
    return own | {"model_type": FAMILIES[family].of or family, "architectures": [configured(family).architecture]}


_CONFIGS: dict[str, str] = {}  # JSON by the text of a `Tiny`: transformers takes 20 ms for one


def tiny_config(spec: Tiny, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model, with changed keys, which are spelled as the peer does."""
    if (text := _CONFIGS.get(key := repr(spec))) is None:
        text = _CONFIGS[key] = json.dumps(hf_config(spec).to_dict())
    return as_family(json.loads(text) | changes, spec.family)


def write_model(model: Any, folder: Path, family: str, **options: Any) -> Path:
    """Save a model of transformers as a checkpoint of `family`; options: of `save_pretrained`.

    Returns the folder that transformers can read: the same one, or a copy inside when the family has a peer.
    """
    model.save_pretrained(folder, **options)
    if model.config.model_type == "olmo_hybrid":
        _cut_convolutions(folder, model.config)
    if not FAMILIES[family].peer:
        return folder
    readable = folder / "peer"
    shutil.copytree(folder, readable)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(as_family(raw, family)))
    if FAMILIES[family].tensors:
        _rename_tensors(folder, FAMILIES[family].tensors)
    return readable


def _cut_convolutions(folder: Path, config: Any) -> None:
    """Cut the convolutions of queries, keys and values as published files do. transformers saves three equal parts.

    It joins them when it reads them, so that both are the same to it.
    """
    files = {file: load_file(file) for file in folder.glob("*.safetensors")}
    places = {name: held for held in files.values() for name in held}
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    sizes = [keys, keys, config.linear_num_value_heads * config.linear_value_head_dim]
    for first in [name for name in places if name.endswith(".q_conv1d.weight")]:
        names = [first.replace(".q_conv1d.", f".{side}_conv1d.") for side in "qkv"]
        whole = torch.cat([places[name][name] for name in names])
        for name, part in zip(names, whole.split(sizes), strict=True):
            places[name][name] = part.contiguous()
    for file, held in files.items():
        save_file(held, file, {"format": "pt"})


def _rename_tensors(folder: Path, renamed: Mapping[str, str]) -> None:
    """Rename the tensors in the files and in the index of a checkpoint."""

    def own(name: str) -> str:
        for theirs, ours in renamed.items():
            name = name.replace(theirs, ours)
        return name

    for file in folder.glob("*.safetensors"):
        save_file({own(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    for file in folder.glob("*.index.json"):
        index = json.loads(file.read_text())
        placed = {own(name): shard for name, shard in index["weight_map"].items()}
        file.write_text(json.dumps(index | {"weight_map": placed}))


def experts_of(config: Any) -> Any:
    """The first block of experts of a random model, by transformers; its router is `gate` or `router`."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    parts = (
        next(
            getattr(layer, name)
            for name in ("mlp", "feed_forward", "block_sparse_moe", "mixer")
            if hasattr(layer, name)
        )
        for layer in model.model.layers
    )
    return next(part for part in parts if hasattr(part, "experts"))


def random_model(spec: Tiny, seed: int) -> Any:
    """A random model, its norms and biases too: left at one and zero they would go untested."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(spec), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # the oracle never stops early
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith(("_proj_bias", "A_log")):
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (("norm" in name) or name.endswith("scale")))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.4)
    return model


def one_by_one(model: Any) -> bool:
    """True where padding changes what transformers computes."""
    biased = any(getattr(model.config, key, False) for key in ("conv_bias", "mamba_proj_bias", "use_bias"))
    return biased or model.config.model_type in ("llama4_text", "falcon_h1")


@torch.no_grad()
def quieten(model: Any, largest: float, layers: float = 1.0) -> None:
    """Scale what the layers of a model add by `layers`, and its logits to about `largest`, by way of its last norm.

    In bfloat16 an error grows with the logits, and layers of random weights amplify it. Powers of two change no digit.
    """
    family = model.config.model_type
    names = checkpoint_names(family)
    after = {names[key].rpartition("}.")[2] for key in names if key[0].endswith("_after.weight")}

    def scale(norm: Tensor, factor: float) -> None:
        norm.copy_((norm + 1) * factor - 1 if CONFIGURED[family].form.plus_one else norm * factor)

    for name, parameter in model.model.layers.named_parameters():
        if parameter.ndim > 1:
            parameter.mul_(layers)
        elif name.partition(".")[2] in after:
            scale(parameter, layers)
    peak = float(model(torch.arange(1, 60, device=model.device)[None]).logits.abs().max())
    last = names["norm.weight", ""].split(".")[-2]
    scale(getattr(model.model, last).weight, 2.0 ** round(math.log2(largest / peak)))


def make_oracle(
    spec: Tiny, prompts: list[list[int]], new_folder: Callable[[str], Path], device: str = "cpu", steps: int = 64
) -> Oracle:
    """The checkpoint of a `Tiny`, saved; seeds are resampled until every greedy choice of so many steps is clear."""
    for seed in itertools.count():
        model, runs = random_model(spec, seed).to(device), list[tuple[list[int], list[float]]]()
        for part in [[prompt] for prompt in prompts] if one_by_one(model) else [prompts]:
            found = generate(model, part, steps)
            if min(min(leads) for _, leads in found) <= MARGIN:
                break
            runs += found
        else:
            break
    folder = new_folder(f"{spec.family}-{spec.rope}")
    model.generation_config.eos_token_id = list(spec.eos) or None
    write_model(model, folder, spec.family)
    model.generation_config.eos_token_id = None
    return Oracle(folder, model, {tuple(p): t for p, (t, _) in zip(prompts, runs, strict=True)})


class Recorder(Executor):
    """An executor that notes what passes through the one it wraps."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.plans: list[StepPlan] = []
        self.num_computed = 0  # tokens that the forward passes computed

    def facts(self) -> ExecutorFacts:
        return self._inner.facts()

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._inner.submit(plan)

    def release(self, step: int, masks: I32) -> None:
        self._inner.release(step, masks)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        self.num_computed += result.num_computed
        return result

    def control(self, name: str, args: dict[str, Any]) -> object:
        return self._inner.control(name, args)

    def shutdown(self, *, wait: bool = True) -> None:
        self._inner.shutdown()


if __name__ == "__main__":
    name, target = sys.argv[1:]
    if name not in FAMILIES:
        sys.exit(
            f"{name} has no row in FAMILIES of tests/support/tiny_models.py, which describes the model to write: "
            f"add one. Rows: {', '.join(FAMILIES)}."
        )
    write_model(random_model(Tiny(family=name), 0), Path(target), name)
