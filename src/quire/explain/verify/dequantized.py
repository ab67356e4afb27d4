"""The reference of a quantized model for `quire verify`: dequantized in float32, with linears that quantize inputs.

Matrices are read from the files once more, so that what kernels packed is compared with what is stored. Activations are
quantized by the rule of each matrix (`quire.kernels.linear.quantized_ref`), never skipped.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.contracts.params import Param, fused, of_expert
from quire.kernels.linear.quantized_ref import rounded
from quire.kernels.pack.matrix import QuantizedMatrix, Weight, dequantize, empty
from quire.layers.decoder import Decoder
from quire.plan.as_stored import as_stored
from quire.plan.layout import layout
from quire.quantization.scheme_words import scheme_words
from quire.weights.load import load_weights
from quire.weights.slices import write_slice

Rules = Mapping[str, QuantizedMatrix]  # stored name of a weight -> its scheme and activation scale, without numbers


class _Kept:
    """A model as a loader sees it, which keeps its weights by parameter and place of the expert."""

    def __init__(self, model: Decoder, layout: tuple[Param, ...]) -> None:
        self.args, self.layout, self.elsewhere = model.args, layout, frozenset[str]()
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.weights: dict[str, dict[int, Weight]] = {}

    def take(self, module: str, place: int, tensors: dict[str, Weight]) -> None:
        """Keep the weights `tensors` of a module. `place`: index of the expert they belong to."""
        for name, weight in tensors.items():
            self.weights.setdefault(f"{module}.{name}", {})[place] = weight

    def destination(self, module: str) -> None:
        """Return None, so that the loader calls `take` for the module instead of loading it in place."""


def describe(model: Decoder) -> tuple[str, bool]:
    """Return (quantization schemes of a model's matrices in words, True if any scheme quantizes activations)."""
    schemes = dict.fromkeys(param.scheme for param in model.layout if param.scheme)
    return "; ".join(map(scheme_words, schemes)), any(scheme.inputs for scheme in schemes)


def write_dequantized(model: Decoder, params: tuple[Param, ...], folder: Path, out: Path) -> Rules:
    """Write the model in `folder` to `out`, dequantized to float32.

    params   the model's parameters with the names of the tensors in `folder`

    Returns the scheme and activation scale of each quantized weight, by the weight's name in `folder`.
    """
    from safetensors.torch import save_file

    kept, stored, rules = _Kept(model, params), dict[str, Tensor](), dict[str, QuantizedMatrix]()
    load_weights(cast(Any, kept), folder)
    for param in _unquantized(model, params):
        weights = kept.weights.pop(param.name)
        for place, weight in weights.items():  # in the order in which they were read
            one = of_expert(param, place, len(weights))
            for part, rows in _parts(one, _numbers(weight)):
                write_slice(stored.setdefault(part.stored, torch.zeros(part.shape)), part, rows)
                if isinstance(weight, QuantizedMatrix):
                    rules[part.stored] = replace(
                        empty(weight.scheme, weight.shape, "meta"), input_scale=weight.input_scale
                    )
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    raw = {
        key: value
        for key, value in json.loads((folder / "config.json").read_text()).items()  # of the whole model
        if key not in ("quantization_config", "compression_config")
    }
    (out / "config.json").write_text(json.dumps(raw))
    return rules


def _unquantized(model: Decoder, params: tuple[Param, ...]) -> tuple[Param, ...]:
    """Return the parameters with the slices of an unquantized checkpoint: it may store experts in another form."""
    stacks = {part.stored for param in params for part in param.parts if param.stored and part.expert >= 0}
    if not stacks:
        return params
    plain = {param.name: param.parts for param in layout(as_stored(model.args, stacks))}
    return tuple(
        structs.replace(param, parts=plain[param.name]) if param.parts[0].stored in stacks else param
        for param in params
    )


def _numbers(weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.float()
    found = dequantize(weight)
    return found if weight.order is None else found[:, weight.order.argsort()]


def _parts(param: Param, rows: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield the parts of a parameter with their rows."""
    first = 0
    for part in param.parts:
        own = rows if len(param.parts) == 1 else rows[first : first + part.rows]
        first += part.rows
        yield part, own


class QuantizedInputs(TorchFunctionMode):
    """Context in which the linears of a transformers model quantize their inputs by the schemes of their weights."""

    def __init__(self, model: Any, rules: Rules, layout: tuple[Param, ...]) -> None:
        super().__init__()
        self._rules: dict[int, QuantizedMatrix] = {}  # address of a weight -> its rule
        parameters = dict(model.named_parameters())
        for name, rule in rules.items():
            if rule.scheme.inputs and name in parameters:
                self._rules[parameters[name].data_ptr()] = rule
        for param in layout:
            if param.shard == "experts" and param.scheme is not None and param.scheme.inputs:
                kind = "down_proj" if param.name.endswith("down") else "gate_up_proj"
                stacked = parameters[f"model.{param.module}.{kind}"]
                count = fused(param)[0]
                for place in range(count):
                    self._rules[stacked[place].data_ptr()] = rules[of_expert(param, place, count).parts[0].stored]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and (rule := self._rules.get(args[1].data_ptr())) is not None:
            x = args[0]
            args = (rounded(x.reshape(-1, x.shape[-1]), rule).view(x.shape), *args[1:])
        return func(*args, **(kwargs or {}))
