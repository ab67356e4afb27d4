"""Plans and models without a command: layers get made-up weights, a stand-in keeps what a loader hands to layers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.args.checkpoint import ModelArgs
from quire.assemble.build import build_model
from quire.config.engine import EngineConfig
from quire.contracts.parallel import ALONE, Parallel
from quire.contracts.params import Param, Part, RawTensor
from quire.kernels.experts_plan import MoEPlan
from quire.kernels.select import KernelNeeds, Probe, here
from quire.layers.context import Build, Loads
from quire.layers.decoder import Decoder
from quire.layers.stack import Model
from quire.plan.dtype import DTypePlan
from quire.plan.engine import EnginePlan, Machine, ModelFacts, resolve_engine
from quire.plan.experts import moe_plans
from quire.weights.units import load_units


def planned(
    args: ModelArgs,
    dtype: str = "float32",
    *,
    forced: dict[str, str] | None = None,
    parallel: Parallel = ALONE,
    number: int = 0,
    quantization: dict[str, Any] | None = None,
    weights: str = "",
    probe: Probe = here,
    **options: object,
) -> EnginePlan:
    """The plan of a rank of an engine on this CPU, of a model that lies nowhere. weights: type of the matrices."""
    config = EngineConfig.from_flat(**options)
    machine = Machine(device="cpu", words="a CPU", total_memory=1 << 34)
    types = DTypePlan(dtype=dtype, reason="as asked", weights=weights)
    return resolve_engine(
        config,
        ModelFacts(folder=Path("nowhere"), args=args, dtype=types, quantization=quantization or {}),
        machine,
        probe,
        parallel=parallel,
        number=number,
        forced=forced,
    )


def built(args: ModelArgs, dtype: str = "float32", **asked: Any) -> Decoder:
    """A model without weights on this CPU; `asked` as of `planned`."""
    return build_model(planned(args, dtype, **asked))


def experts_plan(
    args: ModelArgs, dtype: str = "float32", device: str = "cpu", forced: str = "", probe: Probe = here
) -> MoEPlan | None:
    """The plan of the layers with experts, if there are any, on one rank."""
    plan = moe_plans(args, KernelNeeds(device=device, dtype=dtype), probe, forced=forced).get("decode")
    assert not isinstance(plan, str), plan
    return plan


def fill(model: Model, make: Callable[[RawTensor], Tensor]) -> None:
    """Give every layer the tensors that `make` returns, in the model's type."""
    for unit in load_units(model.layout):
        model.take(unit.module, unit.place, {raw.name: _typed(model, raw, make(raw)) for raw in unit.tensors})


def fill_layer(layer: nn.Module, build: Build, make: Callable[[RawTensor], Tensor]) -> None:
    """Give a layer, and those below it, the tensors that `make` returns, in the type of `build` and on its device."""
    owners = {one.at: one for one in layer.modules() if isinstance(one, Loads)}
    for unit in load_units(param for param in build.params.values() if param.module in owners):
        tensors = {raw.name: make(raw).to(build.device, build.dtype) for raw in unit.tensors}
        owners[unit.module].take(tensors, unit.place)


def normal(spread: float, seed: int = 0) -> Callable[[RawTensor], Tensor]:
    """Normal numbers around 0."""
    random = torch.Generator().manual_seed(seed)
    return lambda raw: torch.empty(raw.shape).normal_(0.0, spread, generator=random)


def _typed(model: Model, raw: RawTensor, tensor: Tensor) -> Tensor:
    return tensor.to(model.device, getattr(torch, raw.dtype) if raw.dtype else model.dtype)


class Taken:
    """A model as a loader sees it, which keeps the loaded tensors: "layers.0.mlp.down.weight" of modules,
    "layers.0.mlp.experts.down" of experts, with those of all places stacked. in_place: experts have a destination."""

    def __init__(
        self,
        args: ModelArgs,
        layout: Sequence[Param],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        elsewhere: frozenset[str] = frozenset(),
        in_place: bool = False,
    ) -> None:
        self.args, self.layout, self.elsewhere, self.in_place = args, layout, elsewhere, in_place
        self.dtype, self.device = dtype, torch.device(device)
        self._taken: dict[str, dict[int, Tensor]] = {}  # by name and place

    def take(self, module: str, place: int, tensors: dict[str, Tensor]) -> None:
        """Keep the tensors of a unit. Units come in the order in which threads have read them."""
        for name, tensor in tensors.items():
            kept = self._taken.setdefault(f"{module}.{name}", {})
            assert place not in kept, "units come once"
            kept[place] = tensor

    def destination(self, module: str) -> dict[str, Tensor] | None:
        """See `Model`: NaN until it is written."""
        if not self.in_place or not module.endswith(".experts"):
            return None
        made = {
            param.name: torch.full(param.shape, torch.nan, dtype=self.dtype, device=self.device)
            for param in self.layout
            if param.module == module
        }
        self._taken |= {name: {0: tensor} for name, tensor in made.items()}
        return {name.rpartition(".")[2]: tensor for name, tensor in made.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By the names of the parameters, with their shapes."""
        return {name: torch.cat([kept[place] for place in sorted(kept)]) for name, kept in self._taken.items()}


def stored_tensors(params: Sequence[Param], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under the names and shapes of a checkpoint that these parameters read."""
    random = torch.Generator().manual_seed(seed)
    return {part.stored: torch.randn(part.shape, generator=random) for param in params for part in param.parts}


def sliced(part: Part, stored: Tensor) -> Tensor:
    """The rows of a parameter that a part fills, by the definition of `Part`."""
    matrix = stored if part.expert < 0 else stored[part.expert]
    rows = (matrix.T if part.transposed else matrix).narrow(part.axis, part.start, part.count)
    return rows[order_of(part, len(rows))]


def order_of(part: Part, count: int) -> Tensor:
    """The row of a part's slice for each of its `count` rows, by the definition of `Part`."""
    i, half = torch.arange(count), part.count // 2
    if part.paired:
        return 2 * (i % half) + i // half
    order = torch.tensor(part.order or (0,))
    return i - i % len(order) + order[i % len(order)]
