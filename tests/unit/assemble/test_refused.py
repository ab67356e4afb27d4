"""Formats of weights that no kernel runs are refused before anything is loaded."""

import json
from pathlib import Path

import pytest

from quire.assemble.engine import assemble
from quire.config.engine import EngineConfig
from quire.contracts.errors import UnsupportedModel

from ...support.tiny_models import Tiny, random_model


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_formats_that_are_not_implemented(tmp_path: Path, load_format: str) -> None:
    random_model(Tiny(family="qwen3"), 0).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "nvfp4"}}))
    config = EngineConfig.from_flat(
        model=str(tmp_path), device="cpu", skip_tokenizer_init=True, max_num_seqs=2, load_format=load_format
    )
    with pytest.raises(UnsupportedModel, match="asks for 'nvfp4', which is not implemented: use the unquantized"):
        assemble(config)
