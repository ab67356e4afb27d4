"""The JSON files beside a tokenizer: what is read, and one clear line for each kind of damage."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.contracts.errors import UnsupportedModel
from quire.text.special import SpecialTokens

PLAIN = {"content": "<x>", "special": True}


def test_what_is_read(save: Callable[..., Path]) -> None:
    config = {"added_tokens_decoder": {"7": PLAIN}, "bos_token": {"content": "<s>"}, "extra_special_tokens": ["<y>"]}
    special = SpecialTokens.read(save(tokenizer_config=config))
    assert (special.named, special.extra, special.added[7].content) == ({"bos_token": "<s>"}, ("<y>",), "<x>")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ({"added_tokens_decoder": {"x": PLAIN}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"-1": PLAIN}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": [PLAIN]}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"7": "<x>"}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"7": {}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"7": {"content": 5}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"7": PLAIN | {"lstrip": "yes"}}}, "added_tokens_decoder"),
        ({"bos_token": {"lstrip": True}}, "bos_token"),
        ({"eos_token": 5}, "eos_token"),
        ({"pad_token": ["<pad>"]}, "pad_token"),
        ({"extra_special_tokens": 5}, "extra_special_tokens"),
        ({"additional_special_tokens": [{"x": 1}]}, "additional_special_tokens"),
    ],
    ids=str,
)
def test_damage_is_named(save: Callable[..., Path], damage: dict[str, object], named: str) -> None:
    folder = save(tokenizer_config=damage)
    with pytest.raises(UnsupportedModel, match=rf"tokenizer_config\.json: {named}.*: (fetch|correct)") as error:
        SpecialTokens.read(folder)
    assert "\n" not in str(error.value)


def test_the_older_file_is_named_when_it_is_the_damaged_one(save: Callable[..., Path]) -> None:
    folder = save(tokenizer_config={"eos_token": "</s>"}, special_tokens_map={"eos_token": 5})
    with pytest.raises(UnsupportedModel, match=r"special_tokens_map\.json: eos_token"):
        SpecialTokens.read(folder)


def test_a_file_that_is_no_text_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(json.dumps({"a": "b"}).encode("utf-16"))
    with pytest.raises(UnsupportedModel, match="tokenizer_config.json"):
        SpecialTokens.read(tmp_path)
