"""Adapters (LoRA) of a model: the linear layers that they may change, the slices of a rank, and the memory of a slot.

A slot is one piece of memory with room for any adapter: for each linear layer the matrices A of its modules, one below
the other, then B, whose rows have the order of the layer's. A module with fewer ranks than the slot leaves the others
zero. Knows parameters and the headers of an adapter's files.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from quire.args.checkpoint import ModelArgs
from quire.config.adapters import ALL_LINEAR, ROUTED, AdapterConfig
from quire.contracts.errors import AdapterError, listed
from quire.contracts.params import Param, Part, num_experts, of_expert
from quire.kernels.activation import UNGATED
from quire.models.names import EACH, STACKED_FORMS
from quire.plan.engine import EnginePlan
from quire.plan.layout import layout
from quire.plan.linears import NOT_LINEAR, is_linear
from quire.weights.adapter_files import PARAMETERS, AdaptedStack, AdapterFiles, expert_tail, tail_of
from quire.weights.files import AGAIN

HEAD = "lm_head"
EXPERTS = (".experts.gate_up", ".experts.down")
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
    """Yield the linear layers that adapters may change. targets: see `Targets`

    The matrices of a layer's experts are linear layers each, in the order of the experts of the rank. Layers that draft
    are those of the base model, so no adapter changes them. Nor does any change the embedding.
    """
    params, targets = list(params), Targets.of(targets)
    heads = {"embed.weight"} if args.tie_word_embeddings else set[str]()
    heads = {"head.weight"} if any(param.name == "head.weight" for param in params) else heads
    last = any(param.name == "norm.weight" for param in params)
    for param in params:
        if param.name.endswith(EXPERTS):
            if targets.experts and _layer_of(param) < args.num_layers:
                yield from _of_experts(args, param)
            continue
        head = param.name in heads and last
        if not head and (param.name.endswith("embed.weight") or not _adaptable(args, param)):
            continue
        if (linear := _linear(param, head, targets)) is not None:
            yield linear


def _adaptable(args: ModelArgs, param: Param) -> bool:
    if not (is_linear(param) or param.module.endswith(NOT_LINEAR)):
        return False
    return _layer_of(param) < args.num_layers and all(part.stored.endswith(SUFFIX) for part in param.parts)


def _layer_of(param: Param) -> int:
    """Return the number of a parameter's layer; 0 for one of no layer."""
    return int(param.name.split(".")[1]) if param.name.startswith("layers.") else 0


def _linear(param: Param, head: bool, targets: "Targets") -> AdaptedLinear | None:
    modules, runs, first = dict[str, Module](), list[ModuleRows](), 0
    for part in param.parts:
        tail = HEAD if head else tail_of(part.stored.removesuffix(SUFFIX))
        outputs, inputs = part.matrix
        if targets.has(tail):
            columns = (part.start, part.count) if part.axis else (0, inputs)
            modules.setdefault(tail, Module(tail, outputs, inputs, *columns))
            runs.append(ModuleRows(list(modules).index(tail), first, part.rows, part))
        first += part.rows
    if not runs:
        return None
    at = "head" if head else param.module
    return AdaptedLinear(at, tuple(modules.values()), tuple(runs), *param.shape)


def _of_experts(args: ModelArgs, param: Param) -> Iterator[AdaptedLinear]:
    """Yield a linear layer for each expert of the rank: gate and up, or down."""
    assert args.moe is not None
    count, layer = num_experts(param), _layer_of(param)
    for place in range(count):
        own = of_expert(param, place, count)
        first = own.parts[0]
        number = int(first.name.partition(".")[0])
        if first.axis:  # down, which the ranks cut by columns
            outputs, inputs = first.matrix
            tail = expert_tail(layer, number, "down")
            part = Part(tail, first.matrix, first.start, first.count, axis=1)
            module = Module(tail, outputs, inputs, first.start, first.count)
            yield AdaptedLinear(param.name, (module,), (ModuleRows(0, 0, outputs, part),), *own.shape)
            continue
        sides = ("up",) if args.moe.act in UNGATED else ("gate", "up")
        size, (rows, inputs) = args.moe.expert_size, own.shape
        start, each = first.start >> first.paired, rows // len(sides)
        modules, runs = list[Module](), list[ModuleRows]()
        for turn, side in enumerate(sides):
            tail = expert_tail(layer, number, side)
            modules.append(Module(tail, size, inputs, 0, inputs))
            runs.append(ModuleRows(turn, turn * each, each, Part(tail, (size, inputs), start, each)))
        yield AdaptedLinear(param.name, tuple(modules), tuple(runs), *own.shape)


class Targets(NamedTuple):
    """Modules that adapters may change, as the option `lora_target_modules` names them.

    names     last names of modules; (): all linear layers but those of routed experts; ("",): none of these
    experts   True: routed experts, too
    """

    names: tuple[str, ...] = ()
    experts: bool = False

    @classmethod
    def of(cls, given: Sequence[str]) -> "Targets":
        """Return the targets of a value of the option."""
        names = tuple(one for one in given if one != ROUTED)
        return cls(() if ALL_LINEAR in names else names or ("",) * bool(given), ROUTED in given)

    def has(self, tail: str) -> bool:
        """Return True if adapters may change the linear layer, which is none of experts."""
        return not self.names or tail.rpartition(".")[2] in self.names


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGN) * ALIGN


class AdapterRules(NamedTuple):
    """Limits on adapters of an engine.

    sizes     tail of a module -> its outputs and inputs; of experts, those of the first
    others    tails of the modules that are no target here
    rank      largest rank
    experts   experts of a layer; 0: the model has none
    paired    True: outputs of gate and up alternate in a parameter of all experts (g0, u0, g1, u1)
    """

    sizes: Mapping[str, tuple[int, int]]
    others: frozenset[str]
    rank: int
    experts: int = 0
    paired: bool = False

    def check(self, files: AdapterFiles) -> None:
        """Raise `AdapterError` for an adapter that does not fit the model or the options."""
        for tail, module in files.modules.items():
            where = f"{files.folder}: {module.name}"
            known = self._of_first(tail)
            self._check_target(where, known)
            found = module.b.shape[0], module.a.shape[1]
            if found != (wanted := self.sizes[known]):
                raise AdapterError(f"{where} is for a layer of {_by(found)} numbers, and {_wanted(wanted)}")
            self._check_rank(where, module.rank)
        for layer, stacks in files.stacks.items():
            taken = [self._parameter(f"{files.folder}: {one.name}", layer, one) for one in stacks]
            if len(taken) > len({*taken}):
                raise AdapterError(f"{files.folder}: layer {layer} has two adapters of experts.{taken[0]}: {AGAIN}")
            for tail in files.modules:
                if tail.startswith(f"layers.{layer}.experts."):
                    raise AdapterError(
                        f"{files.folder}: layer {layer} has adapters for single experts and for all at once: use one."
                    )

    def stack_of(self, files: AdapterFiles, layer: int, parameter: str) -> AdaptedStack | None:
        """Return the matrices of a checked adapter for a parameter of all experts of a layer."""
        stacks = files.stacks.get(layer, ())
        return next((one for one in stacks if self._parameter(one.name, layer, one) == parameter), None)

    def gated(self, layer: int) -> bool:
        """Return True if the experts of a layer have gates."""
        return expert_tail(layer, 0, "gate") in self.sizes

    def _of_first(self, tail: str) -> str:
        """Return the tail of the first expert's matrix for that of any expert; another tail as it is."""
        head, mark, rest = tail.partition(".experts.")
        number, _, side = rest.partition(".")
        return f"{head}{mark}0.{side}" if mark and number.isdigit() and int(number) < self.experts else tail

    def _parameter(self, where: str, layer: int, stack: AdaptedStack) -> str:
        """Return the name of the parameter that a stack's sizes belong to. Raises `AdapterError` for none."""
        up, down = (expert_tail(layer, 0, side) for side in ("up", "down"))
        self._check_target(where, down)
        (size, hidden), found = self.sizes[up], (stack.b.shape[0], stack.a.shape[1])
        gates = 2 if self.gated(layer) else 1
        for parameter, wanted in zip(PARAMETERS, ((gates * size, hidden), (hidden, size)), strict=True):
            rank = stack.ranks[parameter][0]
            if found == wanted:
                if stack.a.shape[0] != rank * self.experts:
                    raise AdapterError(
                        f"{where} has {stack.a.shape[0]} rows of A, and rank {rank} of {self.experts} experts are "
                        f"{rank * self.experts}: use an adapter of this model."
                    )
                self._check_rank(where, rank)
                return parameter
        wanted = f"{_by((gates * size, hidden))} or {_by((hidden, size))}"
        raise AdapterError(
            f"{where} is for experts of {_by(found)} numbers, and the model's have {wanted}: use an adapter of this "
            "model, saved by PEFT 0.18 or later."
        )

    def _check_target(self, where: str, tail: str) -> None:
        """Raise `AdapterError` for a module that the model does not have, or that is no target."""
        if tail in self.others:
            last = last_name(tail)
            left = "" if last == ROUTED else ", or leave the option out"
            all_linear = f" (with {ALL_LINEAR}, all other linear layers are targets, too)" if last == ROUTED else ""
            raise AdapterError(f"{where} is not among lora_target_modules: add {last}{left}{all_linear}.")
        if tail not in self.sizes:
            known = sorted({last_name(one) for one in self.sizes})
            raise AdapterError(
                f"{where} is no linear layer of this model: use an adapter of this model, whose layers are "
                f"{', '.join(known)}."
            )

    def _check_rank(self, where: str, rank: int) -> None:
        if rank > self.rank:
            raise AdapterError(f"{where} has rank {rank}, and max_lora_rank={self.rank}: raise --max-lora-rank.")


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _wanted(size: tuple[int, int]) -> str:
    return f"the model's has {_by(size)}: use an adapter of this model."


def adapter_rules(args: ModelArgs, config: AdapterConfig) -> AdapterRules:
    """Return the limits on adapters of an engine."""
    whole = layout(args, experts=range(1) if args.moe else None)
    every = [one for linear in adapted_linears(args, whole, (ALL_LINEAR, ROUTED)) for one in linear.modules]
    given = config.lora_target_modules
    targets = Targets.of(given)
    own = [one for one in every if (targets.experts if last_name(one.tail) == ROUTED else targets.has(one.tail))]
    if given and not own:
        known = sorted({last_name(one.tail) for one in every})
        raise AdapterError(
            f"lora_target_modules: {listed(given)}: this model has {', '.join(known)}: name some of these."
        )
    sizes = {one.tail: (one.outputs, one.inputs) for one in own}
    others = frozenset(one.tail for one in every) - sizes.keys()
    if args.moe is None:
        return AdapterRules(sizes, others, config.max_lora_rank)
    paired = args.moe.act == "swiglu_oai" or (args.moe.stored != EACH and STACKED_FORMS[args.moe.stored].paired)
    return AdapterRules(sizes, others, config.max_lora_rank, args.moe.routing.num_experts, paired)


def last_name(tail: str) -> str:
    """Return the last name of a module, by which `lora_target_modules` names it."""
    return ROUTED if ".experts." in tail else tail.rpartition(".")[2]
