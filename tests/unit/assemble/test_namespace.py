"""The namespace of KV blocks outside of an engine: the same for the same weights, and only for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.assemble import offload
from quire.contracts.parallel import ALONE, Parallel
from quire.contracts.scheme import Scheme
from quire.plan.drafts import joined
from quire.plan.engine import Drafting, EnginePlan
from quire.weights.digest import fact

from ...support.filled_models import planned
from ...support.tiny_models import Tiny, tiny_config

CONFIG = tiny_config(Tiny(family="qwen3"))
ARGS = parse_checkpoint_config(CONFIG)
SUMS = [fact("weights", 1)]


def space_of(plan: EnginePlan, sums: list[bytes]) -> bytes:
    return offload.namespace([plan], sums)


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., EnginePlan]:
    """Plans of an engine with a disk tier; `keys`: of config.json, beside those that are read."""

    def make(keys: dict[str, object] | None = None, parallel: Parallel = ALONE, **options: Any) -> EnginePlan:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | (keys or {})))
        made = planned(ARGS, parallel=parallel, kv_offload_gb=1.0, kv_offload_dir="kv", **options)
        return msgspec.structs.replace(made, folder=str(folder))

    return make


def test_an_engine_whose_blocks_stay_has_none() -> None:
    assert space_of(planned(ARGS, kv_offload_gb=1.0), []) == b""
    assert not planned(ARGS, kv_offload_gb=1.0).offload.outside
    for outside in ({"kv_offload_dir": "kv"}, {"kv_share": ":5700"}, {"kv_peers": ("127.0.0.1:5700",)}):
        assert planned(ARGS, kv_offload_gb=1.0, **outside).offload.outside


def test_it_follows_the_weights_and_the_whole_of_config_json(plan: Callable[..., EnginePlan]) -> None:
    """A key that nothing reads today counts, too, and the spelling of the file does not."""
    spaces = [space_of(plan(), SUMS) for _ in range(2)]
    assert spaces[0] == spaces[1]
    assert space_of(plan({"rms_norm_eps": 1e-3}), SUMS) not in spaces
    assert space_of(plan({"unheard_of": 1}), SUMS) not in spaces
    assert space_of(plan(), [fact("weights", 2)]) not in spaces
    again = plan()
    path = Path(again.folder, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    assert space_of(again, SUMS) == spaces[0]


def test_it_is_of_one_version(plan: Callable[..., EnginePlan], monkeypatch: pytest.MonkeyPatch) -> None:
    """A new version may round otherwise, and could not tell the numbers of an old one from its own."""
    before = space_of(plan(), SUMS)
    monkeypatch.setattr(offload, "__version__", "another")
    assert space_of(plan(), SUMS) != before


def test_a_head_that_is_trained_again_has_other_blocks(plan: Callable[..., EnginePlan]) -> None:
    """Its weights are in the reports of the ranks; its config.json counts here."""

    def drafting(keys: dict[str, object]) -> EnginePlan:
        own, other = plan(), plan(keys)
        geometry = joined(own.geometry, other.geometry)
        return msgspec.structs.replace(own, drafting=Drafting(model=other), geometry=geometry)

    spaces = {space_of(one, SUMS) for one in (plan(), drafting({}), drafting({"rms_norm_eps": 1e-3}))}
    assert len(spaces) == 3


EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": EIGHT_BITS | {"strategy": "channel"},
            "input_activations": EIGHT_BITS | {"strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


@pytest.mark.parametrize("quantization", [None, INT8], ids=["unquantized", "a scale per token"])
def test_the_cut_counts_where_activations_have_a_scale_per_token(
    plan: Callable[..., EnginePlan], quantization: dict[str, Any] | None
) -> None:
    """A rank takes such a scale from its slice of the inputs of o_proj and down_proj."""
    cuts = [ALONE, Parallel(pp=2), Parallel(tp=2), Parallel(tp=4)]
    spaces = [space_of(plan(parallel=cut, quantization=quantization), SUMS) for cut in cuts]
    assert spaces[0] == spaces[1]
    assert len(set(spaces)) == (3 if quantization else 1)


def test_a_stage_with_a_scale_per_token_counts(
    plan: Callable[..., EnginePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage may have none: the layers of an ignore list."""
    one, *stages = (plan(parallel=each) for each in (ALONE, Parallel(tp=2), Parallel(tp=2)))
    assert offload.namespace(stages, SUMS) == space_of(one, SUMS)
    scaled = [
        msgspec.structs.replace(param, scheme=Scheme(values="int8", block=(1, 0), inputs="token"))
        for param in stages[1].params
    ]
    stages[1] = msgspec.structs.replace(stages[1], params=tuple(scaled))
    assert offload.namespace(stages, SUMS) != space_of(one, SUMS)


def test_the_name_of_a_folder_does_not_count(plan: Callable[..., EnginePlan]) -> None:
    """Nor do the keys of blocks depend on it, where they leave the engine."""
    named = [plan(model=name) for name in ("models/a", "./models/a/", "b")]
    assert len({space_of(one, SUMS) for one in named}) == len({offload.root_key(one) for one in named}) == 1
    alone = [planned(ARGS, model=name) for name in ("models/a", "b")]
    assert len({offload.root_key(one) for one in alone}) == 2
