"""A checkpoint's own eos ids and sampling defaults."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.contracts.errors import ConfigError, InvalidParameter, UnsupportedModel
from quire.contracts.sampling import SamplingParams
from quire.text.defaults import load_eos_ids, load_generation_defaults
from quire.text.tokenizer import Tokenizer

from ...support.byte_tokenizer import ByteTokenizer


def test_eos_is_the_union_of_all_files(save: Callable[..., Path]) -> None:
    folder = save(config={"eos_token_id": 5, "text_config": {"eos_token_id": [6, 5]}})
    assert load_eos_ids(folder) == (5, 6)
    save(generation_config={"eos_token_id": [9, 6]})
    assert load_eos_ids(folder, ByteTokenizer()) == (257, 9, 6, 5)
    assert load_eos_ids(save(config={"eos_token_id": None}, generation_config={})) == ()


def test_no_files_no_defaults(tmp_path: Path) -> None:
    assert load_eos_ids(tmp_path) == () and load_generation_defaults(tmp_path) == {}


def test_tiny_model(tiny: Tokenizer, tiny_folder: Path) -> None:
    assert load_eos_ids(tiny_folder, tiny) == (2, 0)
    assert load_generation_defaults(tiny_folder) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"temperature": 0.7, "repetition_penalty": 1.05}, {"temperature": 0.7, "repetition_penalty": 1.05}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"max_new_tokens": 2048, "min_p": None, "pad_token_id": 3}, {"max_tokens": 2048}),
    ],
)
def test_fields(save: Callable[..., Path], config: dict[str, object], fields: dict[str, object]) -> None:
    assert load_generation_defaults(save(generation_config=config)) == fields


def test_a_value_out_of_range_names_file_and_field(save: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModel, match="generation_config.json: top_p=7"):
        load_generation_defaults(save(generation_config={"top_p": 7}))


def test_every_collected_model_has_usable_defaults(shared: Path) -> None:
    folders = [path.parent for path in (shared / "hf").glob("*/config.json")]
    assert len(folders) > 20
    for folder in folders:
        SamplingParams(**load_generation_defaults(folder))
        assert all(i > 0 for i in load_eos_ids(folder))
    assert load_eos_ids(shared / "hf" / "Llama-3.1-8B-Instruct") == (128001, 128008, 128009)


def test_the_defaults_can_be_overridden_or_ignored(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 0.9}')
    assert load_generation_defaults(tmp_path, override={"top_p": 0.5}) == {"temperature": 0.7, "top_p": 0.5}
    assert load_generation_defaults(tmp_path, read=False) == {}
    assert load_generation_defaults(tmp_path, read=False, override={"max_new_tokens": 5}) == {"max_tokens": 5}
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    assert load_generation_defaults(tmp_path) == {"temperature": 0.0}
    assert load_generation_defaults(tmp_path, override={"temperature": 0.4}) == {"temperature": 0.4}
    with pytest.raises(InvalidParameter, match="top_p"):
        load_generation_defaults(tmp_path, override={"top_p": 7})
    with pytest.raises(InvalidParameter, match="'heat'"):
        load_generation_defaults(tmp_path, override={"heat": 1})


@pytest.mark.parametrize("value", ["abc", "5", -1, 2.5, True, [1, "x"], {"id": 1}, 2**32], ids=str)
@pytest.mark.parametrize("name", ["generation_config", "config"])
def test_an_eos_id_that_is_none_names_its_file(save: Callable[..., Path], name: str, value: object) -> None:
    folder = save(**{name: {"eos_token_id": value}})
    with pytest.raises(UnsupportedModel, match=f"{folder}/{name}.json: eos_token_id=.* must be a token id") as error:
        load_eos_ids(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("override", [{1: 0.9}, {1: 0.9, "top_p": 0.5}, {None: 1}], ids=str)
def test_an_override_whose_name_is_no_name_is_a_wrong_option(tmp_path: Path, override: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="override_generation_config: .* is not a name"):
        load_generation_defaults(tmp_path, override=override)
