"""Llama 4: layers of unusual settings, and the published form of FP8, against transformers."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire import LLM, EngineConfig, SamplingParams
from quire.contracts.errors import ModelError, UnsupportedModel
from quire.explain.verify.parity import verify

from ..support.quantized_checkpoints import FORMS, quantize_checkpoint
from ..support.tiny_models import CONTEXT, VOCAB

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 24, "intermediate_size_mlp": 80, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25, "bos_token_id": None, "pad_token_id": None, "eos_token_id": None, "floor_scale": 4,
    "attn_scale": 0.3, "num_local_experts": 4, "attention_chunk_size": 8, "rope_parameters": {"rope_theta": 500.0},
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "chunks that end inside blocks": {"attention_chunk_size": 13, "no_rope_layers": [0, 1, 1, 0]},
    "chunks longer than blocks and steps": {"attention_chunk_size": 45, "num_key_value_heads": 1},
    "chunks of one token": {"attention_chunk_size": 1, "moe_layers": [0, 3]},
    "no norm, dense layers between": {"use_qk_norm": False, "attention_chunk_size": 11, "interleave_moe_layer_step": 2},
    "no chunk without rotation": {"no_rope_layer_interval": 1, "attn_temperature_tuning": False, "use_qk_norm": False},
    "every layer in chunks": {"no_rope_layers": [1] * 4, "moe_layers": []},
    "kinds against rotations": {
        "layer_types": ["full_attention", "chunked_attention"] * 2,
        "no_rope_layers": [1, 0, 1, 1],
        "floor_scale": 1,
        "attention_bias": True,
    },
}
RUNS = ((8, 16), (16, 128))  # tokens of a block, and of a step


def made(kind: str, config: Any) -> Any:
    """A random model of transformers, with norms that are not 1 and routers whose choices are clear."""
    torch.manual_seed(3)
    model = getattr(transformers, kind).from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_(torch.randn_like(weight) * 0.2 + ("norm" in name))
    return model


def prompts(count: int) -> list[list[int]]:
    """The last two begin alike."""
    random = np.random.default_rng(count)
    found = [random.integers(1, VOCAB, length).tolist() for length in (1, 9, 61, 50)]
    return [*found, found[-1][:40] + found[0]]


@torch.inference_mode()
def logprobs(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """[tokens, V] of transformers, without a cache."""
    found: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].log_softmax(-1)
    return found.numpy()


def scored(llm: LLM, tokens: list[int]) -> np.ndarray:
    """Our log-probabilities [tokens - 1, V] after each token but the last."""
    out = llm.generate([tokens], SamplingParams(max_tokens=0, prompt_logprobs=-1), use_tqdm=False)[0]
    assert out.prompt_logprobs is not None
    return np.array([[row[i].logprob for i in range(VOCAB)] for row in out.prompt_logprobs[1:] if row])


@pytest.mark.parametrize("case", CASES)
def test_unusual_layers(case: str, engine: Callable[..., LLM], tmp_path: Path) -> None:
    """Log-probabilities of prompts, of tokens that were decoded, and of prompts that the prefix cache has."""
    model = made("AutoModelForCausalLM", transformers.AutoConfig.for_model("llama4_text", **(TEXT | CASES[case])))
    model.save_pretrained(tmp_path)
    truth = functools.cache(functools.partial(logprobs, model.double()))
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=-1)
    for block_size, chunk in RUNS:
        llm = engine(tmp_path, block_size=block_size, max_num_batched_tokens=chunk, max_logprobs=-1)
        for again in (False, True):
            for prompt, answer in zip(prompts(4), llm.generate(prompts(4), greedy, use_tqdm=False), strict=True):
                rows, tokens = answer.outputs[0].logprobs, answer.outputs[0].token_ids
                assert rows is not None and (not again or len(prompt) < 50 or answer.num_cached_tokens)
                actual = np.array([[row[i].logprob for i in range(VOCAB)] for row in rows])
                expected = truth((*prompt, *tokens))[len(prompt) - 1 : -1]
                np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=0)
        np.testing.assert_allclose(scored(llm, prompts(4)[2]), truth(tuple(prompts(4)[2]))[:-1], atol=1e-4, rtol=0)


# --- FP8, as published ------------------------------------------------------------------------------------------------

VERIFIED = EngineConfig.from_flat(num_threads=1, use_tqdm_on_load=False, kv_cache_memory_bytes=1 << 24)
FORM = FORMS["ct-fp8-channel"]  # of compressed-tensors: channels of weights, tokens of activations
AT = "language_model.model.layers"
# The modules that llm-compressor leaves as they are, one by one or by patterns.
LISTED = ["language_model.lm_head", *(f"{AT}.{i}.self_attn.{one}_proj" for i in range(4) for one in "qkvo")]
LISTED += [f"{AT}.{i}.feed_forward.router" for i in range(4)] + ["multi_modal_projector.linear_1"]
PATTERNS = ["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*vision_model", "re:.*multi_modal_projector"]


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with older names, each expert by itself."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", "language_model.model.").replace("model.vision", "vision")
        name = re.sub("^lm_head", "language_model.lm_head", name)
        layer = name.rpartition(".")[0]
        for expert, one in enumerate(tensor if ".experts." in name else ()):
            parts = dict(zip(("gate_proj", "up_proj"), one.mT.chunk(2), strict=True))
            parts = parts if "gate_up" in name else {"down_proj": one.mT}
            found |= {f"{layer}.{expert}.{part}.weight": rows.contiguous() for part, rows in parts.items()}
        if ".experts." not in name:
            found[name] = tensor
    return found


def rounded(x: Tensor) -> Tensor:
    """Activations in FP8 with a scale for each token."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


class Expert(nn.Module):
    """A gated MLP of the matrices under a name, which quantizes its activations."""

    def __init__(self, numbers: dict[str, Tensor], at: str) -> None:
        super().__init__()
        self.gate, self.up, self.down = (numbers[f"{at}.{one}_proj.weight"] for one in ("gate", "up", "down"))
        self.rounds = True

    def forward(self, x: Tensor) -> Tensor:
        keep = rounded if self.rounds else (lambda x: x)
        x = keep(x)
        return F.linear(keep(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)), self.down)


class Experts(nn.Module):
    """All experts of a layer, each with its own rows, as transformers calls them."""

    def __init__(self, numbers: dict[str, Tensor], at: str) -> None:
        super().__init__()
        self.each = nn.ModuleList(Expert(numbers, f"{at}.{expert}") for expert in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([one(rows) for one, rows in zip(self.each, x.chunk(4), strict=True)])


@pytest.mark.parametrize("ignored", [LISTED, PATTERNS], ids=["names", "patterns"])
def test_experts_in_fp8(ignored: list[str], engine: Callable[..., LLM], tmp_path: Path) -> None:
    """A dense layer, a shared expert and experts in FP8; what the list names is as it was, so is the head."""
    text = TEXT | {"model_type": "llama4_text", "interleave_moe_layer_step": 2, "hidden_size": 128, "head_dim": 32}
    config = transformers.AutoConfig.for_model("llama4", text_config=text, vision_config=VISION)
    model = made("AutoModelForImageTextToText", config)
    plain, folder = tmp_path / "plain", tmp_path / "fp8"
    model.save_pretrained(plain)
    (file,) = plain.glob("*.safetensors")
    save_file(published(load_file(file)), file, {"format": "pt"})
    form = replace(FORM, config=FORM.config | {"ignore": ignored})
    numbers = quantize_checkpoint(plain, folder, form, which=lambda name: ".feed_forward." in name)
    inside = model.language_model
    for i, layer in enumerate(inside.model.layers):
        at = f"{AT}.{i}.feed_forward"
        if i % 2:
            layer.feed_forward.experts = Experts(numbers, f"{at}.experts")
            layer.feed_forward.shared_expert = Expert(numbers, f"{at}.shared_expert")
        else:
            layer.feed_forward = Expert(numbers, at)
    tokens = prompts(4)[2]
    expected = logprobs(inside, tokens)[:-1]
    for part in inside.modules():
        if isinstance(part, Expert):
            part.rounds = False
    changed = np.abs(expected - logprobs(inside, tokens)[:-1]).mean()
    actual = scored(engine(folder, block_size=8, max_num_batched_tokens=16, max_logprobs=-1), tokens)
    # A number that lies between two quantized values may round either way: far less than all that rounding changes.
    assert changed > 1e-3 and np.abs(actual - expected).mean() < 0.2 * changed
    report = verify(str(folder), VERIFIED)
    assert report.ok, report.render()
    with pytest.raises(ModelError, match=r"it finds no .*experts\.down_proj there"):  # transformers reads stacks alone
        verify(str(plain), VERIFIED)


def test_experts_in_one_tensor_of_fp8_are_refused(engine: Callable[..., LLM], tmp_path: Path) -> None:
    """As ModelOpt writes them."""
    config = transformers.AutoConfig.for_model("llama4_text", **TEXT)
    made("AutoModelForCausalLM", config).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    form = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.self_attn.*", "*.router"]}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": form}))
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    for name in [one for one in tensors if ".experts." in one]:
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_weight_scale": torch.ones(1)}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"gate_up_proj is modelopt .* Use a checkpoint that stores each expert"):
        engine(tmp_path)
