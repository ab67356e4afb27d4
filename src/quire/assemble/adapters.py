"""Assembly of adapters (LoRA): the memory of their slots, and the products of a model's linear layers."""

from functools import partial

import torch

from quire.adapters.slots import SlotPlan, adapter_rules
from quire.kernels.lora import AdapterWeights
from quire.layers.adapters import AdaptedExpansion, AdaptedProduct, AdapterBank, attach
from quire.layers.decoder import Decoder
from quire.layers.latent import Expansion
from quire.plan.engine import EnginePlan
from quire.worker.adapter_slices import read_held


def add_slots(model: Decoder, plan: EnginePlan, slots: SlotPlan) -> AdapterBank:
    """Allocate the slots of a rank, and let the linear layers of its model add the products of adapters."""
    config, rank = plan.config.adapters, slots.rank
    read = partial(
        read_held,
        rules=adapter_rules(plan.args, config),
        plan=slots,
        dtype=model.dtype,
        pinned=model.device.type == "cuda",
    )
    # Written once, so that a CPU's memory is taken before the KV cache is sized.
    memory = torch.empty(config.num_slots, slots.size, dtype=model.dtype, device=model.device).zero_()
    bank = AdapterBank(read, memory, len(slots.linears))
    products: dict[str, AdaptedProduct | AdaptedExpansion] = {}
    owners = {module.at: module for module in model.modules() if isinstance(module, Expansion)}
    for linear, ranks in zip(slots.linears, bank.ranks, strict=True):
        weights = AdapterWeights(
            a=bank.view(linear.at_a, len(linear.modules) * rank, linear.width),
            b=bank.view(linear.at_b, linear.rows, rank),
            ranks=ranks,
            runs=tuple((run.module, run.first, run.rows) for run in linear.runs),
        )
        if (expansion := owners.get(linear.at)) is not None:
            products[linear.at] = AdaptedExpansion(weights, expansion.heads(linear.rows), expansion.nope_dim)
        else:
            products[linear.at] = AdaptedProduct(model.kernels.lora, weights)
    attach(model, products)
    return bank
