"""Choose the implementation of each operation once, at start-up; the choice is a value that can be printed.

An implementation is a module with the functions that its operation's `__init__` describes; `supports.py` lists its
capabilities. A probe tells what a machine lacks: `here` asks this process; other probes answer for a described machine.
Knows nothing of how implementations work. Imports PyTorch only with the chosen implementations.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from quire.contracts.errors import ConfigError
from quire.contracts.scheme import KINDS, UNQUANTIZED, Scheme
from quire.kernels.joined.choice import JoinedDecodes
from quire.kernels.latent_rows import FEATURE as ROWS
from quire.kernels.supports import DENSE, FIXED_ORDER, NEEDS, SUPPORTS, Support, module_of

Probe = Callable[[str], str]  # key of NEEDS -> the reason why the need is not met, or ""
_WEIGHTS = frozenset({*KINDS, UNQUANTIZED, "ue8m0"})  # features that are words of `Scheme.needs`


@dataclass(frozen=True, kw_only=True)
class KernelNeeds:
    """Requirements of a model for an operation.

    device     "cpu" or "cuda"
    dtype      dtype of the computation, such as "bfloat16"
    features   features that the operation's package defines ("window", "sinks", ...)
    head_dim   size of the attention heads; 0: does not matter
    scheme     quantization of the weights that the operation reads; None: unquantized, or no weights
    """

    device: str
    dtype: str
    features: frozenset[str] = frozenset()
    head_dim: int = 0
    scheme: Scheme | None = None

    @property
    def weights(self) -> frozenset[str]:
        """Kinds of weights that an implementation must be able to read: "unquantized", "int8", ..."""
        return frozenset({UNQUANTIZED}) if self.scheme is None else self.scheme.needs


@dataclass(frozen=True)
class Choice:
    """The chosen implementation of an operation.

    op         operation, such as "attention"
    name       name of the implementation, such as "triton"
    rejected   (implementation, reason against it) of each that comes before the chosen one in `SUPPORTS`, best first
    features   features of the implementation on this machine, sorted, without the kinds of weights
    weights    kind of quantized weights that the choice is for, such as ("int8",); (): unquantized, or no weights
    """

    op: str
    name: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    features: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()

    def __str__(self) -> str:
        others = "".join(f"; not {name}: {why}" for name, why in self.rejected)
        return f"{self.op}{self.of}: {self.name} ({self.reason}{others})"

    @property
    def of(self) -> str:
        """Text to print after the operation's name: " of fp8 block weights"; "" if the weights are not quantized."""
        return f" of {' '.join(self.weights)} weights" if self.weights else ""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The module that implements each operation, and the choices with their reasons.

    The module is None for an operation that the model does not use. The implementation of `experts` is not here: it
    depends on the dispatcher, so `MoEPlan` names it.

    joined   name of an attention layer -> the steps whose decodes `kernels/joined` computes, and its kernel
    """

    choices: tuple[Choice, ...]
    norm: Any = None
    heads: Any = None
    activation: Any = None
    linear: Any = None
    attention: Any = None
    latent: Any = None
    index: Any = None
    delta: Any = None
    mamba: Any = None
    shortconv: Any = None
    routing: Any = None
    blend: Any = None
    lora: Any = None
    joined: Mapping[str, JoinedDecodes] = field(default_factory=dict)

    def features(self, op: str) -> tuple[str, ...]:
        """Return the features of the chosen implementation of `op`; () if the model does not use `op`."""
        return next((choice.features for choice in self.choices if choice.op == op), ())


def here(need: str) -> str:
    """Return the reason why this process cannot meet `need`, a key of `NEEDS`; "" if it can. Imports the checker."""
    module, _, name = NEEDS[need].partition(":")
    why: str = getattr(importlib.import_module(module), name)()
    return why


def probe_of(capability: tuple[int, int] | None) -> Probe:
    """Return a probe like `here` for a described GPU (None: this CPU), as far as that is known without PyTorch.

    The software of a GPU and PyTorch's own kernels count as present. CPU kernels depend on processor and compiler.
    """

    def probe(need: str) -> str:
        if need in ("hopper", "CUDA C++ on Hopper") and capability and capability[0] != 9:
            return "needs compute capability 9.0, this GPU has {}.{}".format(*capability)
        if need == "8-bit numbers" and capability and capability < (8, 9):
            return "8-bit numbers need compute capability 8.9, this GPU has {}.{}".format(*capability)
        return here(need) if need in ("packed bfloat16", "native", "native AMX") else ""

    return probe


def objection(support: Support, needs: KernelNeeds, probe: Probe = here) -> str:
    """Return the reason why an implementation cannot serve `needs`, or "".

    support   capabilities of the implementation
    probe     function that checks the machine for a need; called last
    """
    if why := runs_no(support, needs):
        return why
    if needs.device not in support.devices:
        return f"runs on {', '.join(sorted(support.devices))}, not on {needs.device}"
    if needs.dtype not in support.dtypes:
        return f"computes in {', '.join(sorted(support.dtypes))}, not in {needs.dtype}"
    if support.max_head_dim is not None and needs.head_dim > support.max_head_dim:
        return f"has heads of at most {support.max_head_dim}, not of {needs.head_dim}"
    lacking = sorted(needs.features - support.features.union(*support.extra.values()))
    if lacking:
        return f"has no {', '.join(lacking)}"
    more = (need for need, words in support.extra.items() if (words - support.features) & needs.features)
    return next(filter(None, map(probe, (*support.needs, *support.typed.get(needs.dtype, ()), *more))), "")


def runs_no(support: Support, needs: KernelNeeds) -> str:
    """Return text such as "runs no int8 weights" if an implementation does not run the weights in `needs`, else "".

    The text is "" for an implementation that reads no weights.
    """
    if not support.features & _WEIGHTS:
        return ""
    lacking = sorted(needs.weights - support.features)
    reasons = (f": {support.lacks[kind]}" for kind in lacking if kind in support.lacks)
    return f"runs no {' '.join(lacking)} weights" + next(reasons, "") if lacking else ""


def features(support: Support, probe: Probe = here) -> tuple[str, ...]:
    """Return the features of an implementation on this machine, sorted, without the kinds of weights that it runs."""
    extra = [words for need, words in support.extra.items() if not probe(need)]
    return tuple(sorted(support.features.union(*extra) - _WEIGHTS))


def select(op: str, needs: KernelNeeds, forced: str | None = None, probe: Probe = here) -> Choice:
    """Choose the best implementation of `op` for `needs`.

    Implementations for other kinds of weights do not count, unless they have a reason against this kind on the device.

    forced   name of the implementation to use; None: the best
    probe    function that checks the machine for a need

    Raises ConfigError, with the reason for every candidate, if none can serve the needs, or if `forced` cannot.
    """
    supports = SUPPORTS[op]
    if forced is not None and forced not in supports:
        raise ConfigError(f"kernel {forced!r} does not exist for {op}: use one of {', '.join(supports)}.")
    rejected: list[tuple[str, str]] = []
    weights = () if needs.scheme is None else tuple(sorted(needs.weights))
    for name, support in supports.items():
        told = needs.device in support.devices and needs.weights & support.lacks.keys()
        if name != forced and (runs_no(support, needs) and not told or not support.only_for <= needs.features):
            continue
        why_not = objection(support, needs, probe)
        if forced is not None and name != forced:
            rejected.append((name, why_not or f"{forced} was asked for"))
        elif why_not:
            rejected.append((name, why_not))
        else:
            reason = "asked for" if forced else "first that supports " + _words(needs)
            return Choice(op, name, reason, tuple(rejected), features(support, probe), weights)
    table = "; ".join(f"{name}: {why}" for name, why in rejected)
    remedy = "leave out --batch-invariant, or " if FIXED_ORDER in needs.features else ""
    raise ConfigError(
        f"no implementation of {op} serves {_words(needs)} ({table}): {remedy}choose another implementation, device or "
        "dtype."
    )


def choose_kernels(
    device: str,
    dtype: str,
    *,
    ops: tuple[str, ...] = DENSE,
    head_dim: int = 0,
    attention_features: frozenset[str] = frozenset(),
    cache_features: frozenset[str] = frozenset(),
    forced: dict[str, str] | None = None,
    probe: Probe = here,
) -> tuple[Choice, ...]:
    """Choose an implementation of each operation in `ops` for a model. Return the choices in the order of `ops`.

    device, dtype        device and dtype of the computation, such as "cuda" and "bfloat16"
    head_dim             size of the model's attention heads
    attention_features   features of `quire.kernels.attention` that the model needs; all operations need FIXED_ORDER
    cache_features       features for the dtype of the KV cache; operations that read or write the cache need them
    forced               operation -> name of the implementation to use
    probe                function that checks the machine for a need
    """
    forced = forced or {}
    unknown = sorted(set(forced) - set(ops))
    if unknown:
        raise ConfigError(f"operation {unknown[0]!r} does not exist in this model: use one of {', '.join(ops)}.")
    fixed = attention_features & {FIXED_ORDER}
    needs = KernelNeeds(device=device, dtype=dtype, features=fixed)
    cache = replace(needs, features=cache_features | fixed)
    attention = replace(needs, features=attention_features | cache_features, head_dim=head_dim)
    latent = replace(needs, features=cache_features | attention_features & {"rows", "chosen", FIXED_ORDER})
    own = {
        "heads": cache,
        "latent": latent,
        "index": cache,
        "attention": attention,
        "blend": replace(needs, features=cache_features - {ROWS}),
    }
    return tuple(select(op, own.get(op, needs), forced.get(op), probe) for op in ops)


def choose_linears(
    needs: KernelNeeds, schemes: Iterable[Scheme], forced: str | None = None, probe: Probe = here
) -> tuple[Choice, ...]:
    """Choose an implementation of `linear` for each kind of quantized weights in `schemes`.

    forced   name of the implementation to use for the kinds of weights that it runs; "ref" means "quantized_ref"
    """
    named = {"ref": "quantized_ref"}.get(forced or "", forced)
    chosen = dict[frozenset[str], Choice]()
    for scheme in schemes:
        if scheme.needs not in chosen:
            own = replace(needs, scheme=scheme)
            can = named is not None and named in SUPPORTS["linear"] and not runs_no(SUPPORTS["linear"][named], own)
            chosen[scheme.needs] = select("linear", own, named if can else None, probe)
    return tuple(chosen.values())


def select_kernels(device: str, dtype: str, **asked: Any) -> Kernels:
    """Choose implementations as `choose_kernels` does with these arguments; import and return them."""
    return load_kernels(choose_kernels(device, dtype, **asked))


def load_kernels(choices: tuple[Choice, ...]) -> Kernels:
    """Import the chosen implementations and return them.

    Choices for quantized weights are not imported: the plans of linear layers name these.
    """
    modules = {choice.op: load_kernel(choice.op, choice.name) for choice in choices if not choice.weights}
    return Kernels(choices=choices, **modules)


def load_kernel(op: str, name: str) -> ModuleType:
    """Import and return the module of the implementation `name` of the operation `op`."""
    return importlib.import_module(module_of(op, name))


def _words(needs: KernelNeeds) -> str:
    more = [f"{' '.join(sorted(needs.weights))} weights"] if needs.scheme else []
    more += sorted(needs.features)
    return " ".join([needs.dtype, "on", needs.device, *(f"with {feature}" for feature in more)])
