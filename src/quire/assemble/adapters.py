"""Assembly of adapters (LoRA): the memory of their slots, and the products of a model's linear layers."""

from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from quire.adapters.slots import EXPERTS, AdaptedLinear, SlotPlan, adapter_rules
from quire.contracts.errors import ConfigError
from quire.kernels.lora import AdapterWeights, OutputRun
from quire.layers.adapters import AdaptedExpansion, AdaptedExperts, AdaptedProduct, AdapterBank, attach
from quire.layers.decoder import Decoder
from quire.layers.latent import Expansion
from quire.plan.engine import EnginePlan
from quire.worker.adapter_slices import read_held


def add_slots(model: Decoder, plan: EnginePlan, slots: SlotPlan) -> AdapterBank:
    """Allocate the slots of a rank, and let the linear layers of its model add the products of adapters.

    Raises ConfigError where there is no memory for them.
    """
    config = plan.config.adapters
    pinned = model.device.type == "cuda"
    read = partial(read_held, rules=adapter_rules(plan.args, config), plan=slots, dtype=model.dtype, pinned=pinned)
    try:  # written once, so that a CPU's memory is taken before the KV cache is sized
        memory = torch.empty(config.num_slots, slots.size, dtype=model.dtype, device=model.device).zero_()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        size = config.num_slots * slots.num_bytes(model.dtype.itemsize) / 2**30
        raise ConfigError(
            f"max_loras={config.num_slots}: the slots of adapters need {size:.2f} GiB, which are not free: "
            "lower max_loras or max_lora_rank, or name fewer modules in lora_target_modules."
        ) from error
    bank = AdapterBank(read, memory, len(slots.linears))
    attach(model, products_of(model, bank, slots))
    return bank


def products_of(
    model: Decoder, bank: AdapterBank, slots: SlotPlan
) -> dict[str, AdaptedProduct | AdaptedExpansion | AdaptedExperts]:
    """Return the products of adapters by the names of the linear layers, and of the experts, of a model."""
    products: dict[str, AdaptedProduct | AdaptedExpansion | AdaptedExperts] = {}
    expansions = {module.at: module for module in model.modules() if isinstance(module, Expansion)}
    experts: dict[str, AdapterWeights] = {}
    kernel, first = model.kernels.lora, 0
    for at, same in groupby(slots.linears, lambda linear: linear.at):
        linears = list(same)
        ranks, first = bank.ranks[first : first + len(linears)], first + len(linears)
        weights = _weights(bank, slots.rank, linears, ranks)
        linear = linears[0]
        if at.endswith(EXPERTS):
            experts[at] = weights
        elif (expansion := expansions.get(at)) is not None:
            products[at] = AdaptedExpansion(kernel, weights, expansion.heads(linear.rows), expansion.nope_dim)
        else:
            products[at] = AdaptedProduct(kernel, weights)
    for at in {name.rpartition(".")[0] for name in experts}:
        products[at] = AdaptedExperts(kernel, *(experts[f"{at}.{name}"] for name in ("gate_up", "down")))
    return products


def _weights(bank: AdapterBank, rank: int, linears: list[AdaptedLinear], ranks: Tensor) -> AdapterWeights:
    """Return the matrices of all slots for a linear layer, or for those of a layer's experts, one behind the other."""
    linear = linears[0]
    routed = linear.at.endswith(EXPERTS)
    each = (linears[1].at_a - linear.at_a if len(linears) > 1 else 1) if routed else 0
    return AdapterWeights(
        a=bank.view(linear.at_a, len(linear.modules), rank, linear.width, each=each, experts=len(linears)),
        b=bank.view(linear.at_b, linear.rows, rank, each=each, experts=len(linears)),
        ranks=ranks.t() if routed else ranks[0],
        runs=tuple(OutputRun(run.module, run.first, run.rows, run.first) for run in linear.runs),
    )
