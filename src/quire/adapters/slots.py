"""Adapters (LoRA) of a model: the linear layers that they may change, the slices of a rank, and the memory of a slot.

A slot is one piece of memory with room for any adapter: for each linear layer the matrices A of its modules, one below
the other, then B, whose rows have the order of the layer's. A module with fewer ranks than the slot leaves the others
zero. Knows parameters and the headers of an adapter's files.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from quire.args.checkpoint import ModelArgs
from quire.config.adapters import AdapterConfig
from quire.contracts.errors import AdapterError, listed
from quire.contracts.params import Param, Part
from quire.plan.engine import EnginePlan
from quire.plan.layout import layout
from quire.plan.linears import NOT_LINEAR, is_linear
from quire.weights.adapter_files import AdapterFiles, tail_of

HEAD = "lm_head"
ALIGN = 8  # numbers: of two bytes, 16 bytes
SUFFIX = ".weight"


class Module(NamedTuple):
    """A module of the model: a stored matrix [outputs, inputs], by the tail of its name.

    first, taken   columns of A that the rank reads
    """

    tail: str
    outputs: int
    inputs: int
    first: int
    taken: int


class ModuleRows(NamedTuple):
    """Rows first .. first + rows - 1 of a linear layer, which belong to a module. part: the slice of its rows"""

    module: int
    first: int
    rows: int
    part: Part


class AdaptedLinear(NamedTuple):
    """A linear layer of a rank that adapters may change.

    at        name of the layer
    modules   stored matrices that are fused in it
    runs      rows of the layer that adapters may change
    rows, width   outputs and inputs of the layer on this rank
    at_a, at_b    places of A [modules * rank, width] and B [rows, rank] in a slot, in numbers
    """

    at: str
    modules: tuple[Module, ...]
    runs: tuple[ModuleRows, ...]
    rows: int
    width: int
    at_a: int = 0
    at_b: int = 0


class SlotPlan(NamedTuple):
    """The memory of a slot on a rank. size: numbers; rank: ranks that each module has room for"""

    rank: int
    size: int
    linears: tuple[AdaptedLinear, ...]

    def num_bytes(self, item_bytes: int) -> int:
        """Return the bytes of a slot, in a dtype of so many bytes."""
        return self.size * item_bytes


def slot_plan(plan: EnginePlan) -> SlotPlan | None:
    """Return the memory of a slot on the rank of a plan; None: its engine serves no adapters."""
    config = plan.config.adapters
    return plan_slots(plan.args, plan.params, config, plan.machine.device) if config.enable_lora else None


def plan_slots(args: ModelArgs, params: Iterable[Param], config: AdapterConfig, device: str) -> SlotPlan:
    """Return the memory of a slot for the parameters of a rank.

    On a GPU ranks are padded to 16, the smallest side of a matrix product there.
    """
    rank = -(-config.max_lora_rank // 16) * 16 if device == "cuda" else config.max_lora_rank
    made, size = list[AdaptedLinear](), 0
    for linear in adapted_linears(args, params, config.lora_target_modules):
        at_b = size + _aligned(len(linear.modules) * rank * linear.width)
        made.append(linear._replace(at_a=size, at_b=at_b))
        size = at_b + _aligned(linear.rows * rank)
    return SlotPlan(rank, size, tuple(made))


def adapted_linears(args: ModelArgs, params: Iterable[Param], targets: Sequence[str] = ()) -> Iterator[AdaptedLinear]:
    """Yield the linear layers that adapters may change. targets: last names of their modules; (): all

    Layers that draft are those of the base model, so no adapter changes them. Nor does any change the embedding.
    """
    params = list(params)
    heads = {"embed.weight"} if args.tie_word_embeddings else set[str]()
    heads = {"head.weight"} if any(param.name == "head.weight" for param in params) else heads
    last = any(param.name == "norm.weight" for param in params)
    for param in params:
        head = param.name in heads and last
        if not head and (param.name.endswith("embed.weight") or not _adaptable(args, param)):
            continue
        if (linear := _linear(param, head, targets)) is not None:
            yield linear


def _adaptable(args: ModelArgs, param: Param) -> bool:
    if not (is_linear(param) or param.module.endswith(NOT_LINEAR)):
        return False
    layer = param.name.split(".")[1] if param.name.startswith("layers.") else "0"
    return int(layer) < args.num_layers and all(part.stored.endswith(SUFFIX) for part in param.parts)


def _linear(param: Param, head: bool, targets: Sequence[str]) -> AdaptedLinear | None:
    modules, runs, first = dict[str, Module](), list[ModuleRows](), 0
    for part in param.parts:
        tail = HEAD if head else tail_of(part.stored.removesuffix(SUFFIX))
        outputs, inputs = part.matrix
        if not targets or tail.rpartition(".")[2] in targets:
            columns = (part.start, part.count) if part.axis else (0, inputs)
            modules.setdefault(tail, Module(tail, outputs, inputs, *columns))
            runs.append(ModuleRows(list(modules).index(tail), first, part.rows, part))
        first += part.rows
    if not runs:
        return None
    at = "head" if head else param.module
    return AdaptedLinear(at, tuple(modules.values()), tuple(runs), *param.shape)


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGN) * ALIGN


class AdapterRules(NamedTuple):
    """Limits on adapters of an engine.

    sizes   tail of a module -> its outputs and inputs
    others  tails of the modules that are no target here
    rank    largest rank
    """

    sizes: Mapping[str, tuple[int, int]]
    others: frozenset[str]
    rank: int

    def check(self, files: AdapterFiles) -> None:
        """Raise `AdapterError` for an adapter that does not fit the model or the options."""
        for tail, module in files.modules.items():
            where = f"{files.folder}: {module.name}"
            if tail in self.others:
                raise AdapterError(
                    f"{where} is not among lora_target_modules: add {tail.rpartition('.')[2]}, or leave the option out."
                )
            if tail not in self.sizes:
                if ".experts." in tail:
                    why = "belongs to experts, whose adapters are not implemented: train it without the experts"
                    raise AdapterError(f"{where} {why}.")
                known = sorted({one.rpartition(".")[2] for one in self.sizes})
                raise AdapterError(
                    f"{where} is no linear layer of this model: use an adapter of this model, whose layers are "
                    f"{', '.join(known)}."
                )
            outputs, inputs = self.sizes[tail]
            if (module.b.shape[0], module.a.shape[1]) != (outputs, inputs):
                raise AdapterError(
                    f"{where} is for a layer of {module.b.shape[0]} x {module.a.shape[1]} numbers, and the model's has "
                    f"{outputs} x {inputs}: use an adapter of this model."
                )
            if module.rank > self.rank:
                raise AdapterError(
                    f"{where} has rank {module.rank}, and max_lora_rank={self.rank}: raise --max-lora-rank."
                )


def adapter_rules(args: ModelArgs, config: AdapterConfig) -> AdapterRules:
    """Return the limits on adapters of an engine."""
    whole = layout(args, experts=range(1) if args.moe else None)
    every = [one for linear in adapted_linears(args, whole) for one in linear.modules]
    targets = config.lora_target_modules
    own = [one for one in every if not targets or one.tail.rpartition(".")[2] in targets]
    if targets and not own:
        known = sorted({one.tail.rpartition(".")[2] for one in every})
        raise AdapterError(
            f"lora_target_modules: {listed(targets)}: this model has {', '.join(known)}: name some of these."
        )
    sizes = {one.tail: (one.outputs, one.inputs) for one in own}
    return AdapterRules(sizes, frozenset(one.tail for one in every) - sizes.keys(), config.max_lora_rank)
