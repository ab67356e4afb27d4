"""Random tiny checkpoints written by transformers: our logits through paged attention equal theirs in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate

from quire.args.checkpoint import read_checkpoint_config
from quire.args.families import FAMILIES as CONFIGURED
from quire.assemble.kv_views import model_views
from quire.kernels.attention import AttentionMeta
from quire.kvstore.arena import KVArena
from quire.layers.context import StepContext
from quire.layers.stack import Model, run_layers
from quire.plan.as_stored import as_stored
from quire.plan.kv_geometry import kv_components, resolve_geometry
from quire.weights.files import stored_in
from quire.weights.load import load_weights

from ...support.filled_models import built
from ...support.states import state_arena, state_meta
from ...support.tiny_models import FAMILIES, write_model

BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
DEEPSEEK = LATENT | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
}
V2 = DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
V3 = DEEPSEEK | {
    "q_lora_rank": 20,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "num_mtp_layers": 0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_shared_experts": 1,
}
GLM = {
    "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True,
    "partial_rotary_factor": 0.5, "num_mtp_layers": 0,
}  # fmt: skip
# Options of further cases; every family has one with its own options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    "llama-dynamic-rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-odd-heads": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "llama-one-kv-head": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16}),
    "mistral-head-dim": ("mistral", {"head_dim": 20}),
    "mistral-yarn": ("mistral", {"rope_parameters": YARN}),
    "qwen2-heads": ("qwen2", {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen2-yarn-tied": ("qwen2", {"rope_parameters": YARN | {"truncate": False}, "tie_word_embeddings": True}),
    "qwen3-head-dim": ("qwen3", {"head_dim": 32}),
    "qwen3-tied-biases": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-odd-one-kv": ("qwen3", {"head_dim": 16, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "qwen3-yarn-mscale": ("qwen3", {"head_dim": 16, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "qwen2-moe-layers": ("qwen2_moe", {"num_hidden_layers": 4}),
    "qwen3-moe-plain": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "mlp_only_layers": [],
        },
    ),
    "deepseek-v2": ("deepseek_v2", V2),
    "deepseek-v2-groups": (
        "deepseek_v2",
        V2
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 20,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek-v3": ("deepseek_v3", V3),
    "deepseek-v3-direct": (
        "deepseek_v3",
        V3 | {"q_lora_rank": None, "norm_topk_prob": False, "rope_parameters": None, "rope_interleave": False},
    ),
    "olmo-hybrid-plain": (
        "olmo_hybrid",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "linear_allow_neg_eigval": False,
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")),
            "linear_value_head_dim": None,
        },
    ),
    "kimi-linear-compressed": (
        "kimi_linear",
        {"q_lora_rank": 20, "moe_renormalize": False, "num_expert_group": 1, "topk_group": 1},
    ),
    "glm4-moe": ("glm4_moe", GLM),
    "glm4-moe-plain": (
        "glm4_moe",
        GLM
        | {"use_qk_norm": False, "attention_bias": False, "partial_rotary_factor": 0.25, "tie_word_embeddings": True},
    ),
}
# Families with windows or chunks have several KV groups: tests/e2e/test_parity.py compares them.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    family: (family, {})
    for family, case in FAMILIES.items()
    if not (case.options.get("sliding_window") or case.options.get("attention_chunk_size"))
} | VARIANTS


def write_checkpoint(folder: Path, family: str, changes: dict[str, Any], seed: int = 0) -> torch.nn.Module:
    """A random model of transformers in float32, saved in small shards. Norms and biases are random too."""
    torch.manual_seed(seed)
    case = FAMILIES[family]
    options = (
        BASE
        | ({"num_key_value_heads": 4} if CONFIGURED[case.of or family].latent else {})
        | dict(case.options)
        | changes
    )
    options = {"pad_token_id": None} | {
        key: value for key, value in options.items() if (key, value) != ("head_dim", None)
    }
    if part := options.pop("partial_rotary_factor", None) if "glm4" == family else None:
        options["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
    config = transformers.AutoConfig.for_model(case.peer or case.of or family, **options)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.2)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    write_model(model, folder, family, max_shard_size="40KB")
    return model


def load(folder: Path, dtype: str = "float32", kernels: dict[str, str] | None = None) -> Model:
    model = built(as_stored(read_checkpoint_config(folder), stored_in(folder)), dtype, forced=kernels)
    load_weights(model, folder)
    return model


@torch.inference_mode()
def run_paged(
    model: Model, prompts: list[list[int]], chunks: list[list[int]], block: int = 8, cache: str = "float32"
) -> list[torch.Tensor]:
    """Logits of every position, computed in steps: step j advances prompt i by chunks[i][j] tokens (0: sits out).

    Block ids are dealt round robin, so they are interleaved, and the cache starts full of NaN.
    """
    args = model.args
    longest = max(len(prompt) for prompt in prompts)
    width = -(-longest // block)
    geometry = resolve_geometry(kv_components(args.attending[0], cache), args.num_layers, block)
    arena = KVArena(geometry, 1 + width * len(prompts), torch.device("cpu"))
    arena.data.fill_(255)  # NaN in every type
    states = state_arena(args, len(prompts))
    kv = model_views(model, arena.views, states=states.view)
    tables = 1 + torch.arange(width * len(prompts)).view(width, len(prompts)).t().contiguous().int()
    done = [0] * len(prompts)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in range(len(chunks[0])):
        active = [i for i in range(len(prompts)) if chunks[i][step]]
        counts = [chunks[i][step] for i in active]
        positions = [torch.arange(done[i], done[i] + n) for i, n in zip(active, counts, strict=True)]
        slots = [tables[i, p // block].long() * block + p % block for i, p in zip(active, positions, strict=True)]
        tokens = [torch.tensor(prompts[i][done[i] : done[i] + n]) for i, n in zip(active, counts, strict=True)]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        meta = AttentionMeta(
            query_start=starts,
            seq_lens=[done[i] + n for i, n in zip(active, counts, strict=True)],
            block_tables=tables[active],
            kv_slots=torch.cat(slots),
        )
        own = state_meta(starts, meta.seq_lens, active)
        ctx = StepContext(torch.cat(positions), (meta,), kv, states=own)
        hidden = run_layers(model, model.embed(torch.cat(tokens)), ctx)
        rows = model.head(model.norm(hidden)).split(counts)
        for i, n, part in zip(active, counts, rows, strict=True):
            logits[i].append(part)
            done[i] += n
    return [torch.cat(parts) for parts in logits]


def ragged(length: int, pieces: list[int], steps: int) -> list[int]:
    """`pieces`, then single tokens to `length`, padded with idle steps in front."""
    plan = pieces + [1] * (length - sum(pieces))
    return [0] * (steps - len(plan)) + plan


@pytest.mark.parametrize("case", CASES)
def test_logits_equal(case: str, tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, *CASES[case])
    ours = load(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (37, 24, 9)]
    with torch.inference_mode():
        expected = [theirs(torch.tensor([prompt])).logits[0] for prompt in prompts]
    whole = run_paged(ours, prompts, [[len(prompt)] for prompt in prompts])
    chunked = run_paged(ours, prompts, [ragged(37, [7, 16], 16), ragged(24, [11, 5], 16), ragged(9, [], 16)])
    for want, a, b in zip(expected, whole, chunked, strict=True):
        assert want.std() > 0.3, "logits too flat to tell anything"
        torch.testing.assert_close(a, want, rtol=0, atol=1e-4)
        torch.testing.assert_close(b, want, rtol=0, atol=1e-4)


def test_bounds_of_decays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula is that of GLM-5.3-Flash in transformers, whose Kimi-Linear has none."""
    theirs = write_checkpoint(tmp_path, *CASES["kimi_linear"])
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["linear_attn_config"]["gate_lower_bound"] = -5.0
    (tmp_path / "config.json").write_text(json.dumps(raw))
    monkeypatch.setattr(KimiLinearForgetGate, "forward", Glm5NextTextForgetGate.forward)
    monkeypatch.setattr(KimiLinearForgetGate, "safe_gate_lower_bound", -5.0, raising=False)
    prompt = list(range(40))
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    (actual,) = run_paged(load(tmp_path), [prompt], [[13, 20, 1, 6]])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (
            "olmo_hybrid",
            {
                "layers.1.feedforward_layer_norm": "layers.1.post_attention_layernorm",
                "layers.2.attention_layer_norm": "layers.2.input_layernorm",
            },
        ),
        ("kimi_linear", {"layers.0.block_sparse_moe": "layers.0.mlp"}),
    ],
)
def test_names_that_transformers_does_not_save(family: str, names: dict[str, str], tmp_path: Path) -> None:
    """Published files have other names of some modules, and the same tensors."""
    theirs = write_checkpoint(tmp_path, *CASES[family])
    renamed = set[str]()
    for file in tmp_path.glob("*.safetensors"):
        held = {}
        for name, tensor in load_file(file).items():
            found = next((one for one in names if one in name), "")
            held[name.replace(found, names[found]) if found else name] = tensor
            renamed.add(found)
        save_file(held, file)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert renamed == {"", *names}
    (actual,) = run_paged(load(tmp_path), [[1, 2, 3]], [[3]])
    with torch.inference_mode():
        expected = theirs(torch.tensor([[1, 2, 3]])).logits[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_reference_kernels_give_the_same(tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, *CASES["qwen3"])
    ops = ("norm", "heads", "activation", "linear", "attention")
    ours = load(tmp_path, kernels=dict.fromkeys(ops, "ref"))
    assert {choice.name for choice in ours.kernels.choices} == {"ref"}
    prompt = list(range(40))
    (actual,) = run_paged(ours, [prompt], [[13, 20, 1, 6]])
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_bundled_model(shared: Path) -> None:
    folder = shared / "models" / "quire-tiny"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.randint(0, 8192, (70,), generator=torch.Generator().manual_seed(3))
    (actual,) = run_paged(load(folder), [prompt.tolist()], [[33, 1, 30, 1, 5]], block=32)
    with torch.inference_mode():
        expected = theirs(prompt[None]).logits[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_no_rows_give_no_logits(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *CASES["llama"])
    model = load(tmp_path)
    with torch.inference_mode():
        assert model.head(model.norm(torch.empty(0, 48))).shape == (0, 97)
