"""Assembly of adapters (LoRA): the memory of their slots, and the products of a model's linear layers."""

from functools import partial

import torch

from quire.adapters.slots import SlotPlan, adapter_rules
from quire.contracts.errors import ConfigError
from quire.kernels.lora import AdapterWeights, OutputRun
from quire.layers.adapters import AdaptedExpansion, AdaptedProduct, AdapterBank, attach
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


def products_of(model: Decoder, bank: AdapterBank, slots: SlotPlan) -> dict[str, AdaptedProduct | AdaptedExpansion]:
    """Return the products of adapters by the names of the linear layers of a model."""
    products: dict[str, AdaptedProduct | AdaptedExpansion] = {}
    expansions = {module.at: module for module in model.modules() if isinstance(module, Expansion)}
    kernel, rank = model.kernels.lora, slots.rank
    for linear, ranks in zip(slots.linears, bank.ranks, strict=True):
        weights = AdapterWeights(
            a=bank.view(linear.at_a, len(linear.modules), rank, linear.width),
            b=bank.view(linear.at_b, linear.rows, rank),
            ranks=ranks,
            runs=tuple(OutputRun(run.module, run.first, run.rows, run.first) for run in linear.runs),
        )
        if (expansion := expansions.get(linear.at)) is not None:
            heads = expansion.heads(linear.rows)
            products[linear.at] = AdaptedExpansion(kernel, weights, heads, expansion.nope_dim)
        else:
            products[linear.at] = AdaptedProduct(kernel, weights)
    return products
