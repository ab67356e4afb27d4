"""Language models inside models that read images too: the text half runs, with transformers' logits and tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM, EngineConfig, SamplingParams
from quire.explain.verify.parity import verify

from ..support.tiny_models import CONTEXT, VOCAB, generate

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28], list(range(1, 40))]
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": CONTEXT, "initializer_range": 0.2,
    "bos_token_id": None, "pad_token_id": None, "eos_token_id": None,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
# model_type -> (keys of text_config, keys of vision_config, keys around them)
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"model_type": "gemma3_text", "query_pre_attn_scalar": 24, "sliding_window": 9},
        {"model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92},
    ),
    "gemma4": (
        {
            "model_type": "gemma4_text",
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_hidden_layers": 6,
            "global_head_dim": 24,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "use_bidirectional_attention": "vision",
            "pad_token_id": 0,
        },
        {"model_type": "gemma4_vision"},
        dict.fromkeys(
            ("image_token_id", "audio_token_id", "video_token_id"), 1000
        )  # else transformers embeds them as 0
        | {"boi_token_id": 91, "eoi_token_id": 92, "boa_token_id": 95, "eoa_token_index": 89, "audio_config": None},
    ),
    "llama4": (
        {
            "attention_chunk_size": 8,
            "floor_scale": 4,
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "intermediate_size": 24,
            "intermediate_size_mlp": 80,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
        {"projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16},
        {},
    ),
    "mistral3": ({"model_type": "mistral", "sliding_window": None}, {"model_type": "pixtral", "head_dim": 8}, {}),
    "qwen3_vl": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [4, 2, 2]}},
        {"depth": 1, "num_heads": 2, "out_hidden_size": 48, "deepstack_visual_indexes": []},
        {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93},
    ),
    "qwen3_vl_moe": (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [4, 2, 2]},
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
        {"depth": 1, "num_heads": 2, "out_hidden_size": 48, "deepstack_visual_indexes": []},
        {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93},
    ),
}


@pytest.fixture(params=MODELS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A checkpoint of a random model, and the model."""
    text, vision, around = MODELS[request.param]
    config = transformers.AutoConfig.for_model(
        request.param, text_config=TEXT | text, vision_config=VISION | vision, tie_word_embeddings=False, **around
    )
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_(torch.randn_like(weight) * 0.2 + ("norm" in name))
    model.save_pretrained(tmp_path)
    # The forward pass of transformers' Llama4ForConditionalGeneration fails; that of its language model runs.
    return tmp_path, model.language_model if request.param == "llama4" else model


def check(engine: Callable[..., LLM], folder: Path, model: Any) -> None:
    """Tokens and log-probabilities of the engine are those of the model."""
    runs = [tokens for tokens, _ in generate(model, PROMPTS, 24)]
    llm = engine(folder, block_size=8, max_num_batched_tokens=16, max_num_seqs=4, max_logprobs=-1)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    answers = llm.generate(PROMPTS, greedy, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in answers] == runs
    scored = llm.generate([runs[2]], SamplingParams(max_tokens=0, prompt_logprobs=-1), use_tqdm=False)[0]
    assert scored.prompt_logprobs is not None
    table = np.array([[row[i].logprob for i in range(VOCAB)] for row in scored.prompt_logprobs[1:] if row])
    with torch.inference_mode():
        logits = model(torch.tensor([runs[2]])).logits[0, :-1].float()
    np.testing.assert_allclose(table, logits.log_softmax(-1).numpy(), atol=1e-4, rtol=0)


def test_the_text_half_runs(stored: tuple[Path, Any], engine: Callable[..., LLM]) -> None:
    check(engine, *stored)
    report = verify(str(stored[0]), EngineConfig.from_flat(num_threads=1, use_tqdm_on_load=False))
    assert report.ok, report.render()


def test_older_names_of_tensors(stored: tuple[Path, Any], engine: Callable[..., LLM]) -> None:
    """Published files call it language_model.model, with the head beside it, and say dtype around text_config."""
    folder, model = stored
    file = folder / "model.safetensors"
    older = {
        "language_model.lm_head.weight"
        if name == "lm_head.weight"
        else name.replace("model.language_model.", "language_model.model."): tensor
        for name, tensor in load_file(file).items()
    }
    assert any(name.startswith("language_model.model.layers.") for name in older)
    save_file(older, file, {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"].pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(raw | {"torch_dtype": "float32"}))
    check(engine, folder, model)
