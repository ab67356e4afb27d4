"""The digest of what is loaded: the same for every cut of the same weights, another one for any other byte."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.contracts.errors import WeightsError
from quire.contracts.parallel import ALONE, Parallel
from quire.plan.layout import layout, stored_names
from quire.plan.placement import ranks
from quire.weights.digest import fact, join_sums
from quire.weights.load import load_weights

from ...support.filled_models import Taken, stored_tensors
from ...support.tiny_models import Tiny, tiny_config

ARGS = parse_checkpoint_config(tiny_config(Tiny(family="qwen3_moe")))
CUTS = [Parallel(tp=2), Parallel(tp=4), Parallel(pp=2), Parallel(tp=2, dp=2, experts=True)]


def reports(folder: Path, parallel: Parallel = ALONE, args: ModelArgs = ARGS, **options: Any) -> list[bytes]:
    """Reports of the ranks, in their order."""
    everything, found = frozenset(stored_names(layout(args))), []
    for rank in ranks(args, parallel):
        taken: Any = Taken(args, layout(args, rank), elsewhere=everything, in_place=rank.place == 1)
        found.append(load_weights(taken, folder, summed_as="model", num_threads=1, **options).sums)
    return found


def save(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    """Matrices in float32, norms in bfloat16: some bytes are converted, and some go straight into their tensors."""
    made = stored_tensors(layout(ARGS))
    return {name: one.bfloat16() if "norm" in name else one for name, one in made.items()}


def test_every_cut_has_the_same_digest(tmp_path: Path, stored: dict[str, Tensor]) -> None:
    """Also in other chunks, and of files that are divided otherwise."""
    save(tmp_path, stored)
    whole = join_sums(reports(tmp_path))
    assert [join_sums(reports(tmp_path, parallel)) for parallel in CUTS] == [whole] * len(CUTS)
    assert join_sums(reports(tmp_path, chunk_bytes=104)) == whole
    (tmp_path / "model.safetensors").unlink()
    for number in range(2):
        part = dict(list(stored.items())[number::2])
        save_file(part, tmp_path / f"model-0000{number + 1}-of-00002.safetensors")
    assert join_sums(reports(tmp_path)) == whole


def test_without_a_role_nothing_is_summed(tmp_path: Path, stored: dict[str, Tensor]) -> None:
    taken: Any = Taken(ARGS, layout(ARGS))
    assert load_weights(taken, save(tmp_path, stored)).sums == b""


def one_value(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.q_proj.weight"].view(torch.int32)[5, 3] ^= 1


def six_norms(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"][:6] += 0.5


def swapped_rows(tensors: dict[str, Tensor]) -> None:
    matrix = tensors["model.layers.0.self_attn.o_proj.weight"]
    matrix[[2, 9]] = matrix[[9, 2]]


def swapped_tensors(tensors: dict[str, Tensor]) -> None:
    one, other = (f"model.layers.{layer}.self_attn.k_proj.weight" for layer in (0, 1))
    tensors[one], tensors[other] = tensors[other], tensors[one]


def signs(tensors: dict[str, Tensor]) -> None:
    tensors["model.embed_tokens.weight"][7:9] *= -1


def another_type(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].view(torch.float16)


@pytest.mark.parametrize("change", [one_value, six_norms, swapped_rows, swapped_tensors, signs, another_type])
def test_any_other_byte_makes_another_digest(
    tmp_path: Path, stored: dict[str, Tensor], change: Callable[[dict[str, Tensor]], None]
) -> None:
    """The files have the same names and sizes."""
    changed = {name: one.clone() for name, one in stored.items()}
    change(changed)
    first, second = (save(tmp_path / name, one) for name, one in (("a", stored), ("b", changed)))
    assert join_sums(reports(first)) != join_sums(reports(second))
    assert join_sums(reports(first)) != join_sums(reports(second, Parallel(tp=2)))


def test_ranks_that_read_different_weights_are_refused(tmp_path: Path, stored: dict[str, Tensor]) -> None:
    """Hosts have folders of their own: a norm is read by both ranks."""
    changed = {name: one.clone() for name, one in stored.items()}
    six_norms(changed)
    folders = [save(tmp_path / name, one) for name, one in (("a", stored), ("b", changed))]
    mixed = [reports(folder, Parallel(tp=2))[rank] for rank, folder in enumerate(folders)]
    with pytest.raises(WeightsError, match="different weights of one model"):
        join_sums(mixed)


def test_roles_and_facts_count(tmp_path: Path, stored: dict[str, Tensor]) -> None:
    """A model is not its own draft model."""
    taken: Any = Taken(ARGS, layout(ARGS))
    draft = load_weights(taken, save(tmp_path, stored), summed_as="draft").sums
    (model,) = reports(tmp_path)
    assert len({join_sums(one) for one in ([model], [draft], [model, draft], [model, fact("seed", 1)])}) == 4
    assert join_sums([model, fact("seed", 1), fact("seed", 1)]) != join_sums([model, fact("seed", 2)])


def test_slices_that_overlap_have_a_digest_of_their_cut() -> None:
    """Ranks that share a block of scales read it twice: their sums do not add up to those of the tensor."""

    def entry(axis: int, start: int, count: int) -> bytes:
        return np.array([1, 2, axis, start, count, 10 * count, 3], np.uint64).tobytes()

    cuts = [entry(0, 0, 4)], [entry(0, 0, 3), entry(0, 2, 2)], [entry(0, 0, 2), entry(0, 1, 3)], [entry(1, 0, 4)]
    assert len({join_sums(one) for one in cuts[:3]}) == 3
    assert join_sums([*cuts[0], *cuts[3]]) != join_sums(cuts[0])
