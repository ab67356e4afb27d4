"""The reference of a quantized model for `quire verify`: dequantized in float32, with linears that quantize inputs.

Matrices are read from the files once more, so that what kernels packed is compared with what is stored. Activations are
quantized by the rule of each matrix (`quire.kernels.linear.quantized_ref`), never skipped.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.args.wrappers import PLACES
from quire.contracts.errors import UnsupportedModel
from quire.contracts.parallel import Parallel, Rank
from quire.contracts.params import Param, Part, of_expert
from quire.kernels.linear.quantized_ref import rounded
from quire.kernels.pack.matrix import QuantizedMatrix, Weight, dequantize, empty
from quire.plan.as_stored import as_stored
from quire.plan.layout import layout
from quire.quantization.scheme_words import scheme_words
from quire.weights.files import read_checkpoint
from quire.weights.load import load_weights
from quire.weights.slices import write_slice

Holding = tuple[Rank, tuple[Param, ...]]  # a rank and its parameters
# Stored name of a weight, of an expert its parameter and place -> scheme and activation scale, without numbers.
Rules = dict[str | tuple[str, int], QuantizedMatrix]


PRODUCTS = (F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)  # gpt-oss's experts are transposed


MODULES = ((".block_sparse_moe.", ".mlp."), (".forget_gate.", "."))  # names of modules -> one name for both sides


class KeptWeights:
    """A model as a loader sees it, which keeps its weights by parameter and place of the expert.

    elsewhere   names of stored tensors that are left alone
    """

    def __init__(self, args: ModelArgs, layout: tuple[Param, ...], elsewhere: frozenset[str] = frozenset()) -> None:
        self.args, self.layout, self.elsewhere = args, layout, elsewhere
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.weights: dict[str, dict[int, Weight]] = {}

    def take(self, module: str, place: int, tensors: dict[str, Weight]) -> None:
        """Keep the weights `tensors` of a module. `place`: index of the expert they belong to."""
        for name, weight in tensors.items():
            self.weights.setdefault(f"{module}.{name}", {})[place] = weight

    def destination(self, module: str) -> None:
        """Return None, so that the loader calls `take` for the module instead of loading it in place."""


def describe(params: Iterable[Param]) -> tuple[str, bool]:
    """Return (quantization schemes of a model's matrices in words, True if any scheme quantizes activations)."""
    schemes = dict.fromkeys(param.scheme for param in params if param.scheme)
    return "; ".join(map(scheme_words, schemes)), any(scheme.inputs for scheme in schemes)


def write_dequantized(args: ModelArgs, held: Iterable[Holding], folder: Path, out: Path) -> Rules:
    """Write the model in `folder` to `out`, dequantized to float32. Return the rule of each quantized weight.

    held   parameters of each rank, with the names of the tensors in `folder`. A rank that quantizes a slice of a matrix
           while it loads gives the slice scales of its own
    """
    from safetensors.torch import save_file

    stored, rules = dict[str, Tensor](), Rules()
    raw = {
        key: value
        for key, value in json.loads((folder / "config.json").read_text()).items()  # of the whole model
        if key not in ("quantization_config", "compression_config")
    }
    names = frozenset(read_checkpoint(folder).tensors)
    for rank, params in held:
        kept = KeptWeights(args, params, names)
        load_weights(cast(Any, kept), folder)
        for param in _unquantized(params, raw, rank):
            weights = kept.weights.pop(param.name)
            for place, weight in weights.items():  # in the order in which they were read
                for part, rows in parts_of(param, place, len(weights), numbers(weight)):
                    write_slice(stored.setdefault(part.stored, torch.zeros(part.shape)), part, rows)
                    if isinstance(weight, QuantizedMatrix):
                        expert = (param.name, rank.expert_ids[place]) if param.shard == "experts" else part.stored
                        rule = empty(weight.scheme, weight.shape, "meta")
                        rules[expert] = replace(rule, input_scale=weight.input_scale)
    shapes = {name: one.shape for name, one in read_checkpoint(folder).tensors.items()}
    for name, tensor in stored.items():  # a vector may have further axes of length 1 there
        if tensor.dim() == 1 and name in shapes:
            stored[name] = tensor.view(shapes[name])
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(raw))
    return rules


def _unquantized(params: tuple[Param, ...], raw: dict[str, Any], rank: Rank) -> tuple[Param, ...]:
    """Return the parameters with the slices of an unquantized checkpoint: it may store experts in another form.

    raw   config.json of the unquantized checkpoint
    """
    if all(param.shard != "experts" for param in params):
        return params
    named = {part.stored for param in params if param.shard != "experts" for part in param.parts}
    try:
        args = as_stored(parse_checkpoint_config(raw), named)  # its place in a model around it; the form of the family
    except UnsupportedModel:  # a reference that Quire does not know has the names of the model
        return params
    plain = {param.name: param.parts for param in layout(args, rank) if param.shard == "experts"}
    return tuple(structs.replace(param, parts=plain.get(param.name, param.parts)) for param in params)


def numbers(weight: Weight) -> Tensor:
    """Return a weight in float32, dequantized, in the order of its inputs."""
    if isinstance(weight, Tensor):
        return weight.float()
    found = dequantize(weight)
    return found if weight.order is None else found[:, weight.order.argsort()]


def parts_of(param: Param, place: int, count: int, rows: Tensor) -> Iterator[tuple[Part, Tensor]]:
    """Yield the parts of a parameter with their rows; of expert `place` of `count`, whose rows these are."""
    first, parts = 0, of_expert(param, place, count).parts
    for part in parts:
        own = rows if len(parts) == 1 else rows[first : first + part.rows]
        first += part.rows
        yield part, own


class QuantizedInputs(TorchFunctionMode):
    """Context in which the linears of a transformers model quantize their inputs by the schemes of their weights.

    layouts    parameters of each rank
    parallel   with tensor parallelism each rank quantizes its slice of the inputs of a matrix whose columns are divided
    """

    def __init__(self, model: Any, rules: Rules, layouts: Sequence[Sequence[Param]], parallel: Parallel) -> None:
        super().__init__()
        self._rules: dict[int, QuantizedMatrix] = {}  # address of a weight -> its rule
        self._stacks: dict[int, list[QuantizedMatrix]] = {}  # address of all experts' weights -> their rules
        self._slices: dict[int, int] = {}  # address of a weight -> ranks that quantize a slice of its inputs each
        every = [param for params in layouts for param in params]
        cut = {part.stored for param in every if param.shard == "columns" for part in param.parts}
        parameters = {_inside(name): weight for name, weight in model.named_parameters()}
        for name, rule in rules.items():
            if rule.scheme.inputs and isinstance(name, str) and _inside(name) in parameters:
                address = parameters[_inside(name)].data_ptr()
                self._rules[address], self._slices[address] = rule, parallel.tp if name in cut else 1
        for param in {param.name: param for param in every}.values():
            if param.shard == "experts" and param.scheme is not None and param.scheme.inputs:
                kind = "down_proj" if param.name.endswith("down") else "gate_up_proj"
                stacked = _stacked(parameters, param, kind)
                own = [rules[param.name, place] for place in range(len(stacked))]
                self._rules |= {stacked[place].data_ptr(): rule for place, rule in enumerate(own)}
                self._stacks[stacked.data_ptr()] = own
                if kind == "down_proj" and not parallel.experts:
                    self._slices |= {stacked[place].data_ptr(): parallel.tp for place in range(len(own))}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and (rule := self._rules.get(args[1].data_ptr())) is not None:
            x, slices = args[0], self._slices.get(args[1].data_ptr(), 1)
            args = (_rounded(x.reshape(-1, x.shape[-1]), rule, slices).view(x.shape), *args[1:])
        elif func is torch.bmm and (own := self._stacks.get(args[1].data_ptr())) is not None:  # Llama 4
            slices = self._slices.get(args[1].data_ptr(), 1)
            args = (torch.stack([_rounded(x, rule, slices) for x, rule in zip(args[0], own, strict=True)]), *args[1:])
        return func(*args, **(kwargs or {}))


def _rounded(x: Tensor, rule: QuantizedMatrix, slices: int) -> Tensor:
    """Return x quantized and dequantized, in so many slices of its columns, one after the other."""
    return torch.cat([rounded(part, rule) for part in x.tensor_split(slices, -1)], -1)


def _inside(name: str) -> str:
    """Return a tensor's name in its language model. Files and transformers have other names of places and modules."""
    place = next((root for root, _ in (*PLACES, ("model.", "")) if name.startswith(root)), "language_model.")
    for stored, module in MODULES:
        name = name.replace(stored, module)
    return name.removeprefix(place)


def _stacked(parameters: Mapping[str, Tensor], param: Param, kind: str) -> Tensor:
    """Return the weights of all experts of a layer, in a model of transformers. kind: their name there."""
    layer = f"layers.{param.name.split('.')[1]}."
    return next(one for name, one in parameters.items() if name.startswith(layer) and name.endswith(f".experts.{kind}"))
