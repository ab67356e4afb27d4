"""The option `state_checkpoint`: its words, and what is refused."""

import pytest

from quire.config.checkpoints import CheckpointPlaces, read_places
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("prompt,branch,turn", CheckpointPlaces()),
        ("turn", CheckpointPlaces(prompt=False, branch=False)),
        ("every=64, prompt", CheckpointPlaces(branch=False, turn=False, every=64)),
        ("none", CheckpointPlaces(prompt=False, branch=False, turn=False)),
    ],
)
def test_places_are_read(text: str, places: CheckpointPlaces) -> None:
    assert read_places(text) == places and read_places(str(places)) == places


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is no place: name some of prompt, branch, turn and every=N"),
        ("prompt,turns", "'turns' is no place"),
        ("none,turn", "none excludes the others"),
        ("turn,turn", "names a place twice"),
        ("every=64,every=128", "names a place twice"),
        ("every=0", "above 0, such as every=1024"),
        ("every=-1", "above 0"),
        ("every=x", "above 0"),
        ("every=", "above 0"),
        ("every=1073741825", "every=N is at most 1073741824, not 1073741825: lower N"),
        (f"every={2**31}", "at most 1073741824"),
        ("every=" + "9" * 5000, "at most 1073741824, not a number of 5,000 digits"),
        ("every=" + "0" * 5000, "above 0"),
    ],
)
def test_other_words_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_flat(state_checkpoint=text)


@pytest.mark.parametrize(("asked", "prompts", "answers"), [(0, 0, 256), (48, 64, 64), (64, 64, 64), (1, 32, 32)])
def test_places_in_prompts_and_answers_are_rounded_up_to_whole_blocks(asked: int, prompts: int, answers: int) -> None:
    places = CheckpointPlaces(every=asked)
    assert (places.on_blocks(32).every, places.in_answers(32)) == (prompts, answers)
    assert places.in_answers(96) == (288 if not asked else 96)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.0, 2.0, float("nan"), float("inf")])
def test_a_share_lies_between_0_and_1(share: float) -> None:
    with pytest.raises(ConfigError, match="state_memory_fraction"):
        EngineConfig.from_flat(state_memory_fraction=share)


@pytest.mark.parametrize("text", ["float16", "BF16", "fp8", ""])
def test_matrices_have_one_of_two_types(text: str) -> None:
    with pytest.raises(ConfigError, match="mamba_ssm_cache_dtype=.*: must be one of auto, float32, bfloat16"):
        EngineConfig.from_flat(mamba_ssm_cache_dtype=text)
