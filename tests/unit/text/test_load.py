"""The text half of a model, loaded by itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError, ModelNotFound, UserError
from quire.text.load import load_text

from ...support.harmony_tokenizer import HarmonyTokenizer


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


def test_the_tokens_that_end_a_turn_of_messages_are_ends(tmp_path: Path, shared: Path) -> None:
    """Some checkpoints of gpt-oss list <|return|> alone."""
    tokenizer = HarmonyTokenizer()
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_id("<|endoftext|>")}))
    names = ("<|endoftext|>", "<|return|>", "<|call|>")
    assert set(load_text(EngineConfig(), tmp_path).eos_ids) == {tokenizer.token_id(names[0])}
    source = (shared / "hf" / "templates" / "gpt_oss.jinja").read_text("utf-8")
    (tmp_path / "chat_template.jinja").write_text(source, "utf-8")
    text = load_text(EngineConfig(), tmp_path)
    assert set(text.eos_ids) == set(map(tokenizer.token_id, names)) and text.styles.messages is not None
    prompt = tokenizer.encode("<|start|>user<|message|>a<|end|><|start|>assistant", False)
    assert text.begun_message(prompt) == tuple(tokenizer.encode("<|start|>assistant", False))
    assert text.begun_message([]) == text.begun_message([1]) == ()


def test_a_parser_by_name_brings_its_ends_and_checks_the_default_variables(tmp_path: Path) -> None:
    tokenizer = HarmonyTokenizer()
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}", "utf-8")
    plain = load_text(EngineConfig(), tmp_path)
    text = plain.with_parsers("openai", None, {"reasoning_effort": "low"})
    assert not plain.eos_ids and set(text.eos_ids) == {tokenizer.token_id("<|return|>"), tokenizer.token_id("<|call|>")}
    assert plain.with_parsers(None, None, {"reasoning_effort": "minimal"}).eos_ids == ()
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs: reasoning_effort is 'minimal'"):
        plain.with_parsers("openai", None, {"reasoning_effort": "minimal"})
