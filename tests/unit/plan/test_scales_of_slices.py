"""The note that greedy tokens under -tp are not those of one device stands exactly where ranks quantize otherwise."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import ALONE, Parallel
from quire.contracts.scheme import Scheme
from quire.kernels.quantize.ref import quantize_rows
from quire.plan.engine import EnginePlan
from quire.plan.layout import layout
from quire.plan.parallel_notes import parallel_notes
from quire.plan.sizing import resolve_sizing
from quire.quantization.assigned import settled
from quire.quantization.read import find_quantization
from quire.reports.engine import PlanReport
from quire.reports.holdings import Holdings

from ...support.filled_models import planned
from ...support.quantized_checkpoints import FORMS
from ...support.tiny_models import Tiny, tiny_config

SIZES = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 64}
TP2, EXPERTS = Parallel(tp=2), Parallel(tp=2, experts=True)


def plan(folder: Path, form: str, family: str, parallel: Parallel) -> EnginePlan:
    args = parse_checkpoint_config(tiny_config(Tiny(family=family), **SIZES))
    asked = "fp8" if form == "online" else None
    raw = {} if asked else {"quantization_config": FORMS[form].config}
    config = settled(find_quantization(folder, raw, asked).config, layout(args), {})
    options = {"tensor_parallel_size": parallel.tp, "enable_expert_parallel": parallel.experts}
    return planned(args, parallel=parallel, number=parallel.size - 1, quantization=config, **options)


def notes(made: EnginePlan) -> list[str]:
    told = parallel_notes(made.args, made.config.parallel, made.params)
    return [note for note in told if "not those of one device" in note]


def rounded(x: Tensor, scheme: Scheme) -> Tensor:
    if not scheme.wire.values:  # not quantized, or by a scale of the checkpoint
        return x
    rows = quantize_rows(x, scheme.wire)
    scales = rows.scales.repeat_interleave(scheme.wire.group or x.shape[1], 1)[:, : x.shape[1]]
    return rows.values.float() * scales


def by_slice(made: EnginePlan) -> set[str]:
    """The matrices whose inputs a rank quantizes otherwise than one device does."""
    found, random = set[str](), torch.Generator().manual_seed(0)
    for param in made.params:
        for part in param.parts:
            if param.scheme is None or part.axis == 0:
                continue
            x = torch.randn(3, part.shape[1], generator=random)
            own = slice(part.start, part.start + part.count)
            if not torch.equal(rounded(x, param.scheme)[:, own], rounded(x[:, own], param.scheme)):
                found.add(part.stored.split(".")[-2])
    return found


@pytest.mark.parametrize("parallel", [TP2, EXPERTS], ids=["slices", "whole experts"])
@pytest.mark.parametrize("form", [*FORMS, "online"])
def test_the_note_stands_where_numbers_differ(tmp_path: Path, form: str, parallel: Parallel) -> None:
    try:
        made = plan(tmp_path, form, "qwen3_moe", parallel)
    except ConfigError as error:
        pytest.skip(str(error))  # a rank's slice would cut a group
    names, told = by_slice(made), notes(made)
    assert bool(names) == bool(told)
    assert all(name in told[0] for name in names)
    assert ("o_proj" in names) == (form != "online" and FORMS[form].inputs == "token")
    assert not notes(plan(tmp_path, form, "qwen3_moe", ALONE))


def test_explain_has_the_note(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(Tiny(family="qwen3"), **SIZES)))
    made = msgspec.structs.replace(plan(tmp_path, "ct-int8-channel", "qwen3", TP2), folder=str(tmp_path))
    described = PlanReport(holdings=Holdings(plan=made), memory=resolve_sizing(made, 1 << 33)).describe()["model"][
        "notes"
    ]
    assert any(
        "-tp 2: activations have one scale per token" in note and "o_proj and down_proj" in note for note in described
    )
