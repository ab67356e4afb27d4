"""Which implementation of each operation runs: decided once, at start-up, as a value that can be printed.

An implementation is a module with the functions its operation's `__init__` describes and a `SUPPORT` that says what
it can do. Knows nothing of how they work.
"""

import importlib
from dataclasses import dataclass, replace
from types import ModuleType

from quire.contracts.errors import ConfigError

# Operation -> its implementations, best first. Every one ends with the reference, which supports everything.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "norm": ("triton", "native", "cpu", "ref"),
    "heads": ("triton", "native", "cpu", "ref"),
    "activation": ("triton", "native", "cpu", "ref"),
    "linear": ("cuda", "native", "cpu", "ref"),
    "attention": ("hopper", "triton", "native", "cpu", "ref"),
}


@dataclass(frozen=True, kw_only=True)
class Support:
    """What an implementation can do. `missing` names something of this machine or PyTorch build it lacks, or is "".

    max_head_dim   the widest attention head; None: any
    """

    devices: frozenset[str]
    dtypes: frozenset[str]
    features: frozenset[str] = frozenset()
    missing: str = ""
    max_head_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a model asks of an operation. `features` are words of the operation's `__init__` (window, sinks, ...).

    head_dim   of its attention heads; 0: does not matter
    """

    device: str
    dtype: str
    features: frozenset[str] = frozenset()
    head_dim: int = 0


@dataclass(frozen=True)
class Choice:
    """The implementation that was picked for `op`, why, and why each one before it was not."""

    op: str
    name: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        others = "".join(f"; not {name}: {why}" for name, why in self.rejected)
        return f"{self.op}: {self.name} ({self.reason}{others})"


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The chosen implementation modules, one per operation, and the choices that led to them."""

    norm: ModuleType
    heads: ModuleType
    activation: ModuleType
    linear: ModuleType
    attention: ModuleType
    choices: tuple[Choice, ...]


def objection(support: Support, needs: Needs) -> str:
    """Why an implementation cannot serve `needs`; "" when it can."""
    if needs.device not in support.devices:
        return f"runs on {', '.join(sorted(support.devices))}, not on {needs.device}"
    if support.missing:
        return support.missing
    if needs.dtype not in support.dtypes:
        return f"computes in {', '.join(sorted(support.dtypes))}, not in {needs.dtype}"
    if support.max_head_dim is not None and needs.head_dim > support.max_head_dim:
        return f"has heads of at most {support.max_head_dim}, not of {needs.head_dim}"
    lacking = sorted(needs.features - support.features)
    return f"has no {', '.join(lacking)}" if lacking else ""


def select(op: str, needs: Needs, forced: str | None = None) -> tuple[Choice, ModuleType]:
    """The best implementation of `op` for `needs`, or `forced`.

    Raises ConfigError when `forced` does not exist or cannot serve the needs, with the reasons for every candidate.
    """
    names = IMPLEMENTATIONS[op]
    if forced is not None and forced not in names:
        raise ConfigError(f"kernel {forced!r} does not exist for {op} (one of {', '.join(names)}).")
    rejected: list[tuple[str, str]] = []
    for name in names:
        module = importlib.import_module(f"quire.kernels.{op}.{name}")
        why_not = objection(module.SUPPORT, needs)
        if forced is not None and name != forced:
            rejected.append((name, why_not or f"{forced} was asked for"))
        elif why_not:
            rejected.append((name, why_not))
        else:
            reason = "asked for" if forced else "first that supports " + _words(needs)
            return Choice(op, name, reason, tuple(rejected)), module
    table = "; ".join(f"{name}: {why}" for name, why in rejected)
    raise ConfigError(f"no implementation of {op} serves {_words(needs)} ({table}).")


def select_kernels(
    device: str,
    dtype: str,
    *,
    head_dim: int = 0,
    attention_features: frozenset[str] = frozenset(),
    forced: dict[str, str] | None = None,
) -> Kernels:
    """Pick every operation for a model computed in `dtype` on `device`, with attention heads of `head_dim`; `forced`
    maps operations to names."""
    forced = forced or {}
    unknown = sorted(set(forced) - set(IMPLEMENTATIONS))
    if unknown:
        raise ConfigError(f"operation {unknown[0]!r} does not exist (one of {', '.join(IMPLEMENTATIONS)}).")
    choices: list[Choice] = []
    modules: dict[str, ModuleType] = {}
    for op in IMPLEMENTATIONS:
        needs = Needs(device=device, dtype=dtype)
        if op == "attention":
            needs = replace(needs, features=attention_features, head_dim=head_dim)
        choice, modules[op] = select(op, needs, forced.get(op))
        choices.append(choice)
    return Kernels(choices=tuple(choices), **modules)


def _words(needs: Needs) -> str:
    return " ".join([needs.dtype, "on", needs.device, *(f"with {feature}" for feature in sorted(needs.features))])
