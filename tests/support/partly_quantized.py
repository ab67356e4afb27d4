"""Checkpoints of every quantized format that leave the experts of some layers as they are, by its ignore list."""

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from .quantized_checkpoints import FORMS, Form, quantize_checkpoint

MIXES: dict[str, tuple[int, ...]] = {
    "first as it is": (1,),
    "last as it is": (2,),
}  # of the layers 1 and 2, with experts
# Of recurrent layers, which files of AWQ have unquantized.
RATES = ("in_proj_ba", "in_proj_b", "in_proj_a", "self_attn.b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj")
EXPERTS = re.compile(r"model\.layers\.(\d+)\..*\.experts\.")


def leaving(form: str, layers: Collection[int], block: str = "mlp") -> Form:
    """The format, with an ignore list that names the experts of these layers; block: the module that has them."""
    found = FORMS[form]
    names = [f"model.layers.{layer}.{block}.experts" for layer in layers]
    method: str = found.config["quant_method"]
    more: dict[str, dict[str, Any]] = {
        "fp8": {"modules_to_not_convert": names},
        "fbgemm_fp8": {"modules_to_not_convert": names},
        "modelopt": {"ignore": [*found.config.get("ignore", ()), *(f"{name}.*" for name in names)]},
        "awq": {"modules_to_not_convert": [*names, *RATES]},
        "gptq": {"dynamic": {f"-:{re.escape(name)}": {} for name in names}},
        "compressed-tensors": {
            "ignore": [*found.config.get("ignore", ()), *(f"re:{re.escape(name)}.*" for name in names)]
        },
    }
    return replace(found, config=found.config | more[method])


def write_partly(
    plain: Path, folder: Path, form: str, layers: Collection[int], block: str = "mlp"
) -> dict[str, Tensor]:
    """Write a checkpoint whose experts of these layers are as they were. Return the numbers of all its tensors."""

    def which(name: str) -> bool:
        found = EXPERTS.match(name)
        return found is None or int(found[1]) not in layers

    return quantize_checkpoint(plain, folder, leaving(form, layers, block), which=which)
