"""Rotary frequencies against transformers' own functions, for every scaling we accept."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.args.checkpoint import parse_checkpoint_config
from quire.args.keys import Keys
from quire.args.length import with_length
from quire.args.rope import RopeArgs, read_rope
from quire.contracts.errors import ModelError
from quire.kernels.rope.rotary import Rotary, rope_frequencies

from ...support.tiny_models import Tiny, tiny_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SHORT_FACTOR, LONG_FACTOR = [1 + i / 8 for i in range(32)], [2 + i / 3 for i in range(32)]
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 512,
    "short_factor": SHORT_FACTOR,
    "long_factor": LONG_FACTOR,
}
SETTINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.5},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    YARN,
    YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    YARN | {"attention_factor": 1.7},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.4},
    YARN | {"factor": 1.0},
    LONG,
    LONG | {"factor": 3.0},
    LONG | {"attention_factor": 1.19},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_as_transformers(settings: dict[str, Any], theta: float) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 2048}
    config = LlamaConfig(**sizes, rope_parameters=settings | {"rope_theta": theta})
    expected, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, torch.device("cpu"), 2048)
    args, _ = read_rope(Keys({"rope_theta": theta, "rope_scaling": settings}, "config.json"), 2048)
    frequencies, scale = rope_frequencies(args, 64)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(factor)


@pytest.mark.parametrize("length", [None, 512, 513])
def test_the_length_of_the_context_chooses_divisors(length: int | None) -> None:
    """As vLLM: by the engine's longest context, so that all keys of a cache are rotated alike."""
    raw = tiny_config(Tiny(family="phi3"), rope_parameters=LONG, max_position_embeddings=2048, hidden_size=256)
    args = with_length(parse_checkpoint_config(raw), length)
    (rotation,) = args.rotations
    divisors = SHORT_FACTOR if length == 512 else LONG_FACTOR
    expected = 1 / (torch.tensor(divisors) * 10_000.0 ** (torch.arange(0, 64, 2) / 64))
    torch.testing.assert_close(rope_frequencies(rotation.rope, 64)[0], expected)
    with pytest.raises(ModelError, match="short_factor and long_factor need a number for each of 32 pairs"):
        parse_checkpoint_config(raw | {"rope_parameters": LONG | {"long_factor": [1.0]}})
    with pytest.raises(ModelError, match="long_factor='x' must be a list of positive numbers"):
        parse_checkpoint_config(raw | {"rope_parameters": LONG | {"long_factor": "x"}})


def test_rows_are_signed_and_float32_at_far_positions() -> None:
    rotary = Rotary(RopeArgs(theta=10_000.0), 8, torch.device("cpu"), width=8)
    cos, sin = rotary.rows(torch.tensor([0, 100_000]), torch.float32)
    exact = 100_000 * 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert torch.equal(cos[0], torch.ones(8)) and torch.equal(sin[0].abs(), torch.zeros(8))
    torch.testing.assert_close(cos[1, :4].double(), exact.cos(), rtol=0, atol=1e-2)
    assert torch.equal(sin[1, :4], -sin[1, 4:])


def test_what_is_not_rotated_stays() -> None:
    half, whole = (Rotary(RopeArgs(), 8, torch.device("cpu"), width=width) for width in (16, 8))
    positions = torch.tensor([0, 5, 999])
    (cos, sin), (cos_whole, sin_whole) = (rotary.rows(positions, torch.float32) for rotary in (half, whole))
    for first in (0, 8):  # of each half of the head, 4 pairs turn and 4 do not
        assert torch.equal(cos[:, first : first + 4], cos_whole[:, first // 2 : first // 2 + 4])
        assert torch.equal(sin[:, first : first + 4], sin_whole[:, first // 2 : first // 2 + 4])
        assert (cos[:, first + 4 : first + 8] == 1).all() and not sin[:, first + 4 : first + 8].any()
