"""`quire verify` of quantized checkpoints: against the dequantized model, with activations quantized by the rule."""

from pathlib import Path
from typing import Any

import pytest

from quire.assemble.quantize_checkpoint import Recipe, quantize_checkpoint
from quire.config.engine import EngineConfig
from quire.explain.verify.parity import verify
from quire.quantization.written_schemes import SCHEMES, has_groups

from ...support.tiny_models import Tiny, random_model, write_model
from .test_formats import written

OPTIONS: dict[str, Any] = dict(skip_tokenizer_init=True, max_num_seqs=2, num_threads=1, use_tqdm_on_load=False)
CONFIG = EngineConfig.from_flat(**OPTIONS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_equal(tmp_path: Path, scheme: str) -> None:
    group = 32 if has_groups(scheme) else 0
    quantize_checkpoint(written(tmp_path, "qwen3"), tmp_path / "out", Recipe(scheme=scheme, group_size=group))
    report = verify(str(tmp_path / "out"), CONFIG)
    assert report.ok, report.render()
    text = report.render()
    assert ("quantizes activations by the same rules" in text) == bool(SCHEMES[scheme].scheme.inputs)
    assert "every product that of the dequantized weights" in text


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss", "kimi_linear"])
def test_models_that_transformers_reads_in_another_form(tmp_path: Path, family: str) -> None:
    """All experts of a layer in one product, transposed ones, and other names; quantized while they are loaded."""
    write_model(random_model(Tiny(family=family), 0), tmp_path, family)
    config = EngineConfig.from_flat(**OPTIONS, quantization="fp8")
    report = verify(str(tmp_path), config)
    assert report.ok, report.render()


@pytest.mark.parametrize("scheme", ["fp8-channel", "w8a8-int8"])
def test_activations_that_are_not_quantized_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    quantize_checkpoint(written(tmp_path, "qwen3"), tmp_path / "out", Recipe(scheme=scheme))
    monkeypatch.setattr("quire.explain.verify.dequantized.rounded", lambda x, matrix: x)
    report = verify(str(tmp_path / "out"), CONFIG)
    assert report.first_divergent == ("layer 0 attention", "q_proj")
