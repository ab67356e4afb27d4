"""Checkpoints that leave the experts of some layers unquantized, on a GPU: as on a CPU in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams

from ..support.partly_quantized import MIXES, write_partly
from ..support.quantized_checkpoints import FORMS
from ..support.tiny_models import Tiny, mixed_prompts, quieten, random_model, write_model

# Each token goes to all experts: near choices of a router would differ by the rounding. Groups of 32 divide all sizes.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 128,
    "intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
}
# Sizes of the families whose plain files have a tensor for each expert: those are what `write_partly` quantizes.
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 64,
                  "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 4},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 4, "kv_lora_rank": 64, "v_head_dim": 16},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 4, "kv_lora_rank": 64, "v_head_dim": 16,
                    "q_lora_rank": 64},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 4},
}  # fmt: skip
BLOCKS = {"mixtral": "block_sparse_moe"}
NEAR = 0.12  # of log-probabilities; a CPU in bfloat16 is within 0.06, a layer without its experts beyond 0.2
CASES = [
    *(("glm4_moe", form, list(MIXES)[number % 2]) for number, form in enumerate(FORMS)),
    *((family, form, mix) for family in OWN for form, mix in zip(("fp8-block", "awq"), MIXES, strict=True)),
]


def written(folder: Path, family: str, form: str, mix: str) -> Path:
    """A checkpoint of a random model."""
    spec = Tiny(family=family, heads=(8, 4), changes=tuple((SIZES | OWN[family]).items()))
    model = random_model(spec, 0)
    quieten(model, 3.0, 0.5)
    write_model(model, folder / "plain", family)
    write_partly(folder / "plain", folder / "quantized", form, MIXES[mix], BLOCKS.get(family, "mlp"))
    return folder / "quantized"


def logprobs(folder: Path, device: str, dtype: str) -> np.ndarray:
    """Log-probabilities of the tokens of all prompts."""
    options: dict[str, Any] = {"enforce_eager": True} if device == "cuda" else {}
    with LLM(
        str(folder),
        device=device,
        dtype=dtype,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        max_num_seqs=8,
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
        **options,
    ) as llm:
        asked = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
        found = llm.generate(mixed_prompts(), asked, use_tqdm=False)
    values = []
    for output in found:
        entries = (output.prompt_logprobs or [])[1:]
        for token, entry in zip(output.prompt_token_ids[1:], entries, strict=True):
            assert entry is not None
            values.append(entry[token].logprob)
    return np.array(values)


@pytest.mark.parametrize(("family", "form", "mix"), CASES)
def test_log_probabilities_are_the_cpu_s(
    family: str, form: str, mix: str, tmp_path: Path, device: torch.device
) -> None:
    folder = written(tmp_path, family, form, mix)
    found, expected = (logprobs(folder, *one) for one in ((device.type, "bfloat16"), ("cpu", "float32")))
    assert np.isfinite(found).all() and np.abs(found - expected).mean() < NEAR
