"""The bundled model in every scheme of `quire quantize`: its loss on held-out text, beside the plain model."""

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.assemble.quantize_checkpoint import Recipe, quantize_checkpoint
from quire.config.bundled import bundled_model

NUM_TOKENS = 640
# Scheme -> share by which the loss may rise; all 5,316 tokens: docs/quantization.md.
SCHEMES = {
    "fp8-block": 0.01, "fp8-channel": 0.01, "w8a8-int8": 0.01, "w8a16": 0.01, "w4a16": 0.06, "awq-int4": 0.06,
    "mxfp4": 0.06, "nvfp4": 0.06,
}  # fmt: skip


def loss(folder: Path, text: str) -> float:
    options = {"num_threads": 1, "use_tqdm_on_load": False, "kv_cache_memory_bytes": 1 << 24}
    with LLM(str(folder), dtype="float32", **options) as llm:
        ids = llm.get_tokenizer().encode(text, add_special_tokens=False)[:NUM_TOKENS]
        (out,) = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    scored = [row[token].logprob for token, row in zip(ids, out.prompt_logprobs or (), strict=True) if row]
    assert len(scored) == NUM_TOKENS - 1
    return -sum(scored) / len(scored)


def test_losses(shared: Path, tmp_path: Path) -> None:
    path = shared / "models" / "eval.json"
    if not path.is_file():
        pytest.skip(f"no {path}")
    text = json.loads(path.read_text())["perplexity_text"]
    plain, rise = loss(bundled_model(), text), {}
    for scheme in SCHEMES:
        group = 32 if scheme in ("w8a16", "w4a16", "awq-int4") else 0
        quantize_checkpoint(bundled_model(), tmp_path / scheme, Recipe(scheme=scheme, group_size=group))
        rise[scheme] = loss(tmp_path / scheme, text) / plain - 1
    assert all(rise[scheme] < most for scheme, most in SCHEMES.items()), rise
    assert max(rise.values()) > 0.002, "the quantized weights were not used"
