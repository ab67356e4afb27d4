"""Experts that a checkpoint stacks in one tensor give every rank the numbers that a tensor for each expert gives it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file
from torch import Tensor

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.contracts.errors import UnsupportedModel, WeightsError
from quire.contracts.parallel import ALONE, Parallel
from quire.contracts.params import Part
from quire.kernels.pack.matrix import QuantizedMatrix
from quire.models import qwen3_moe
from quire.models.names import STACKED_FORMS
from quire.plan.as_stored import as_stored
from quire.plan.layout import layout, stored_names
from quire.plan.placement import ranks
from quire.quantization.assigned import with_formats
from quire.quantization.formats import raw_tensors
from quire.weights.digest import join_sums
from quire.weights.load import load_weights
from quire.weights.slices import sliced, write_slice

from ...support.changed_args import with_experts
from ...support.filled_models import Taken, built, stored_tensors
from ...support.tiny_models import Tiny, tiny_config

EACH = parse_checkpoint_config(tiny_config(Tiny(family="qwen3_moe")))
CUTS = [ALONE, Parallel(tp=2), Parallel(tp=4), Parallel(tp=2, experts=True), Parallel(tp=2, dp=2, experts=True)]
AT = "model.layers.{i}.mlp.experts."


@pytest.fixture(params=STACKED_FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A form in which the family of the tests may have its experts."""
    rows = tuple(row for row in qwen3_moe.NAME_MAP if row[2] not in STACKED_FORMS)
    more = (
        (f"{AT}gate_up_proj", "layers.{i}.mlp.experts.gate_up", request.param),
        (f"{AT}down_proj", "layers.{i}.mlp.experts.down", request.param),
    )
    monkeypatch.setattr(qwen3_moe, "NAME_MAP", (*rows, *more))
    return str(request.param)


def stacked(each: dict[str, Tensor], form: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint with the experts in a form, by its definition."""
    moe = EACH.moe
    assert moe is not None
    found = {name: one for name, one in each.items() if ".experts." not in name}
    for layer in EACH.expert_layers:
        at, numbers = AT.format(i=layer), range(moe.routing.num_experts)
        gate, up, down = (
            torch.stack([each[f"{at}{e}.{name}_proj.weight"] for e in numbers]) for name in ("gate", "up", "down")
        )
        if "paired" in form:
            rows = [row for pair in zip(gate.unbind(1), up.unbind(1), strict=True) for row in pair]
            fused = torch.stack(rows, 1)
        else:
            fused = torch.cat([gate, up], 1)
        for name, tensor in (("gate_up_proj", fused), ("down_proj", down)):
            found[at + name] = (tensor.mT if "columns" in form else tensor).contiguous()
    return found


def in_form(args: ModelArgs, form: str) -> ModelArgs:
    return with_experts(args, stored=form)


@pytest.mark.parametrize("in_place", [False, True], ids=["packed", "in place"])
def test_ranks_get_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, in_place: bool) -> None:
    asked: list[int] = []
    real = os.preadv

    def preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(count := real(handle, buffers, offset))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    each, other = stored_tensors(layout(EACH)), in_form(EACH, form)
    for name, tensors in (("each", each), ("stacked", stacked(each, form))):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    digests = set()
    for parallel in CUTS:
        reports = []
        for rank in ranks(EACH, parallel):
            loaded = []
            for name, args in (("each", EACH), ("stacked", other)):
                everything = frozenset(stored_names(layout(args)))
                taken: Any = Taken(args, layout(args, rank), elsewhere=everything, in_place=in_place)
                asked.clear()
                report = load_weights(taken, tmp_path / name, summed_as="model", num_threads=1)
                loaded.append(taken.tensors)
                assert sum(asked) == 4 * sum(tensor.numel() for tensor in taken.tensors.values())
            reports.append(report.sums)
            wanted, got = loaded
            assert wanted.keys() == got.keys()
            for name in wanted:
                assert torch.equal(wanted[name], got[name]), (parallel, rank.number, name)
        digests.add(join_sums(reports))
    assert len(digests) == 1, "the digest depends on the cut"


def test_a_rank_reads_its_whole_experts_alone(form: str) -> None:
    args = in_form(EACH, form)
    rank = list(ranks(args, Parallel(tp=2, experts=True)))[1]
    experts = [param for param in layout(args, rank) if param.shard == "experts"]
    assert {part.expert for param in experts for part in param.parts} == set(rank.expert_ids)


def test_quantized_stacks_are_slices_too(tmp_path: Path, form: str) -> None:
    """Bytes of MXFP4, [E, 2I, H / 32, 16] and scales [E, 2I, H / 32]: those of the same experts one by one."""
    if not STACKED_FORMS[form].quantized:
        pytest.skip("only blocks are quantized")
    each = parse_checkpoint_config(tiny_config(Tiny(family="qwen3_moe"), moe_intermediate_size=64))
    other = in_form(each, form)
    config, random = {"quant_method": "mxfp4"}, torch.Generator().manual_seed(1)
    plain = stored_tensors([param for param in layout(each) if param.shard != "experts"])
    codes = {
        part.stored: torch.randint(0, 129, part.shape, generator=random, dtype=torch.uint8)
        for param in with_formats(layout(each), config)
        if param.stored
        for raw in raw_tensors(param)
        for part in raw.parts
    }
    stacks = {}
    for end in ("blocks", "scales"):
        own = {name.removesuffix(f"_{end}"): one for name, one in codes.items() if name.endswith(f"_{end}")}
        stacks |= {f"{name}_{end}": one for name, one in stacked(own, form).items()}
    for name, tensors in (("each", plain | codes), ("stacked", plain | stacks)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    for parallel in CUTS[:2]:
        for rank in ranks(each, parallel):
            loaded = []
            for name, args in (("each", each), ("stacked", other)):
                params = with_formats(layout(args, rank), config)
                everything = frozenset(stored_names(with_formats(layout(args), config)))
                taken: Any = Kept(args, params, elsewhere=everything)
                load_weights(taken, tmp_path / name, num_threads=1)
                loaded.append(taken.taken)
            wanted, got = loaded
            assert wanted.keys() == got.keys() and any(isinstance(one, QuantizedMatrix) for one in got.values())
            for name in wanted:
                ours, theirs = got[name], wanted[name]
                if isinstance(ours, QuantizedMatrix):
                    assert torch.equal(ours.values, theirs.values) and torch.equal(ours.scale, theirs.scale), name
                else:
                    assert torch.equal(ours, theirs), name


class Kept(Taken):
    """Keeps the weights of each expert by themselves: quantized ones cannot be joined."""

    def take(self, module: str, place: int, tensors: dict[str, Any]) -> None:
        self.taken: dict[str, Any] = getattr(self, "taken", {})
        self.taken |= {f"{module}.{name}.{place}": one for name, one in tensors.items()}


def test_experts_of_other_formats_are_refused_in_a_stack(form: str) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(UnsupportedModel, match="holds all experts"):
        with_formats(layout(in_form(EACH, form)), config)


def test_reading_back_reverses_a_slice(form: str) -> None:
    args = in_form(EACH, form)
    stored = stored_tensors(layout(args))
    again = {name: torch.full_like(one, torch.nan) for name, one in stored.items()}
    for param in layout(args):
        for part in param.parts:
            write_slice(again[part.stored], part, sliced(stored[part.stored], part))
    assert all(torch.equal(one, again[name]) for name, one in stored.items())


def test_a_transposed_slice_is_one_of_the_matrix() -> None:
    part = Part("x", (3, 4, 10), 2, 4, expert=1, transposed=True, paired=True)
    assert (part.matrix, part.rows, part.local_shape, part.whole) == ((10, 4), 4, (4, 4), False)
    stored = torch.arange(120.0).view(3, 4, 10)
    assert torch.equal(sliced(stored, part), stored[1].T[[2, 4, 3, 5]])


def test_an_engine_computes_with_them(tmp_path: Path, form: str) -> None:
    """The layers get the memory of the experts; a wrong order of rows changes the hidden states."""
    each, found = stored_tensors(layout(EACH)), []
    for tensors, args in ((each, EACH), (stacked(each, form), in_form(EACH, form))):
        save_file(tensors, tmp_path / "model.safetensors")
        model = built(args)
        load_weights(model, tmp_path)
        experts = model.layers[EACH.expert_layers[0]].mlp.experts
        weights, ids = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0, 3, 7]], dtype=torch.int32)
        found.append(experts(torch.linspace(-1, 1, args.hidden_size)[None], weights, ids, None).clone())
    assert torch.equal(*found)


def test_a_tensor_of_another_size_is_named(tmp_path: Path, form: str) -> None:
    args = in_form(EACH, form)
    tensors = stored_tensors(layout(args))
    name = f"{AT.format(i=args.expert_layers[0])}gate_up_proj"
    save_file(tensors | {name: tensors[name][1:].contiguous()}, tmp_path / "model.safetensors")
    taken: Any = Taken(args, layout(args))
    with pytest.raises(WeightsError, match=f"{name} has shape"):
        load_weights(taken, tmp_path)


def test_names_decide_the_form(form: str) -> None:
    assert EACH.moe is not None and as_stored(EACH, ()) == EACH
    ends = "_blocks" if STACKED_FORMS[form].quantized else ""
    stored = [f"{AT.format(i=EACH.expert_layers[0])}{name}_proj{ends}" for name in ("gate_up", "down")]
    found = as_stored(EACH, stored)
    assert found.moe == structs.replace(EACH.moe, stored=form) and as_stored(EACH, stored[:1]) == EACH
    quantized = [name.replace(".weight", ".qweight") for name in stored_tensors(layout(EACH))]
    assert as_stored(found, quantized).moe == EACH.moe
    assert as_stored(found, stored_tensors(layout(EACH))).moe == EACH.moe


def test_shapes_decide_between_forms_of_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published files have it transposed; those that transformers writes do not."""
    rows = (
        (f"{AT}{name}_proj", f"layers.{{i}}.mlp.experts.{name}", form)
        for name in ("gate_up", "down")
        for form in ("columns", "rows")
    )
    monkeypatch.setattr(qwen3_moe, "NAME_MAP", (*qwen3_moe.NAME_MAP[:-2], *rows))
    assert EACH.moe is not None
    at, hidden, width = AT.format(i=EACH.expert_layers[0]), EACH.hidden_size, EACH.moe.expert_size
    for gate_up, down, form in (
        ((8, hidden, 2 * width), (8, width, hidden), "columns"),
        ((8, 2 * width, hidden), (8, hidden, width), "rows"),
        ((8, 5), (8, 5), "columns"),  # the loader refuses it
    ):
        shapes = {f"{at}gate_up_proj": gate_up, f"{at}down_proj": down}
        found = as_stored(EACH, shapes, shapes.__getitem__)
        assert found.moe is not None and found.moe.stored == form
    assert as_stored(EACH, shapes).moe == structs.replace(EACH.moe, stored="columns")
