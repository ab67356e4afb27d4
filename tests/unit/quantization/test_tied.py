"""A tied head on a stage of its own reads the tensor of the embedding, which stays as it is stored."""

from pathlib import Path

import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.parallel import Parallel
from quire.plan.layout import layout
from quire.plan.placement import ranks
from quire.quantization.assigned import FOUND, decided_by, settled, with_formats
from quire.quantization.read import ONLINE, find_quantization

from ...support.quantized_checkpoints import FORMS
from ...support.tiny_models import Tiny, tiny_config

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128}  # which all groups divide


@pytest.mark.parametrize("named", [False, True], ids=["names unknown", "names known"])
@pytest.mark.parametrize("form", [*FORMS, ONLINE])
def test_a_tied_head_of_the_last_stage_is_not_quantized(form: str, named: bool) -> None:
    raw = tiny_config(Tiny(tied=True), **SIZES)
    args, config = parse_checkpoint_config(raw), {"quant_method": ONLINE}
    if form != ONLINE:
        config = find_quantization(Path("nowhere"), raw | {"quantization_config": FORMS[form].config}).config
    stored = {"model.embed_tokens.weight": "F32", "model.layers.0.mlp.down_proj.weight_scale": "F32"} if named else {}
    config = settled(config, layout(args), stored)
    last = list(ranks(args, Parallel(pp=2)))[1]
    params = {param.name: param for param in with_formats(layout(args, last), config)}
    head, down = params["head.weight"], params["layers.2.mlp.down.weight"]
    assert [part.stored for part in head.parts] == ["model.embed_tokens.weight"]
    assert (head.format, head.stored, head.scheme) == ("unquantized", None, None)
    assert decided_by(head, config) == "" and "model.embed_tokens" not in config.get(FOUND, {}).get("plain", ())
    assert down.scheme is not None
