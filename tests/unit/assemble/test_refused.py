"""The plan refuses what cannot run yet, and nothing else does."""

import json
from pathlib import Path

import pytest

import quire.models.plan
from quire.assemble import assemble
from quire.config.engine import EngineConfig
from quire.contracts.errors import UnsupportedModel

from ...support.tiny_models import Tiny, random_model


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_quantized_weights_are_refused_by_the_plan_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_format: str
) -> None:
    """Also where there are none: a format that leaves the plan's `missing` is built."""
    random_model(Tiny(family="qwen3"), 0).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "awq"}}))
    config = EngineConfig.from_flat(model=str(tmp_path), device="cpu", skip_tokenizer_init=True, max_num_seqs=2,
                                    load_format=load_format)  # fmt: skip
    with pytest.raises(UnsupportedModel, match="config.json: quantization_config asks for 'awq'.*: use the unquant"):
        assemble(config)
    monkeypatch.setattr(quire.models.plan, "missing_features", lambda parallel, quantization: ())
    assemble(config).close()
