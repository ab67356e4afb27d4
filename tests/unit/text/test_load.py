"""The text half of a model, loaded by itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError, ModelNotFound, UserError
from quire.text.load import load_text


def test_the_bundled_model_has_all_of_it() -> None:
    text = load_text(EngineConfig(), bundled_model())
    assert text.tokenizer is not None and text.chat_template is not None and text.eos_ids
    assert text.tokenizer.decode(text.tokenizer.encode("hello there", False)) == "hello there"
    assert text.tokenizer_folder == bundled_model()


def test_without_a_tokenizer_only_numbers_are_left() -> None:
    text = load_text(EngineConfig.from_flat(skip_tokenizer_init=True), bundled_model())
    assert text.tokenizer is None and text.chat_template is None and text.eos_ids


def test_sampling_defaults_come_from_the_model_unless_they_are_refused() -> None:
    override = {"temperature": 0.25}
    config = EngineConfig.from_flat(generation_config="none", override_generation_config=override)
    assert load_text(config, bundled_model()).default_params.temperature == 0.25
    with pytest.raises(ConfigError, match="must be auto or none"):
        load_text(EngineConfig.from_flat(generation_config="yes"), bundled_model())


def test_a_folder_that_is_no_models_is_told_by_its_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"/config\.json does not exist"):
        load_text(EngineConfig(), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_text(EngineConfig(), tmp_path)


def test_it_brings_no_torch() -> None:
    code = (
        "import sys; from quire.text.load import load_text; from quire.config.engine import EngineConfig; "
        "from quire.config.bundled import bundled_model; load_text(EngineConfig(), bundled_model()); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
