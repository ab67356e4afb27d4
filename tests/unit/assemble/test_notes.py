"""Notes of an engine at start."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quire.assemble.engine import assemble
from quire.config.engine import EngineConfig

from ...support.tiny_models import Tiny, random_model


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_head_that_is_not_read_is_a_note(tmp_path: Path, load_format: str) -> None:
    random_model(Tiny(family="qwen3", tied=True), 0).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1.0}, tmp_path / "model.safetensors")
    engine = assemble(
        EngineConfig.from_flat(
            model=str(tmp_path), device="cpu", skip_tokenizer_init=True, max_num_seqs=2, load_format=load_format
        )
    )
    try:
        said = [note for note in engine.notes if "lm_head.weight" in note]
        assert len(said) == (load_format == "auto")
    finally:
        engine.close()
