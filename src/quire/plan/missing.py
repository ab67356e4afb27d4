"""Features that `quire explain` can plan and the engine cannot run yet, with the error messages of `quire serve`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from quire.args.checkpoint import ModelArgs
from quire.config.engine import CacheConfig
from quire.contracts.errors import UnsupportedModel
from quire.contracts.parallel import Parallel
from quire.contracts.speculation import METHODS, Speculation
from quire.contracts.step import CHECK_LAYER
from quire.kernels.experts.plan import MoEPlan


class Missing(NamedTuple):
    """A feature that is not implemented, and the error message of `quire serve` about its flag."""

    feature: str
    reason: str


def missing_features(parallel: Parallel, moe: Mapping[str, MoEPlan | str]) -> tuple[Missing, ...]:
    """Return the features that an engine of these sizes needs and Quire does not have.

    moe   the plan of the experts by phase, or the reason why there is none
    """
    names: dict[str, list[str]] = {}
    for phase, plan in moe.items() if parallel.lockstep else ():
        if isinstance(plan, str) or not plan.implemented:
            name = "a dispatcher" if isinstance(plan, str) else f"dispatcher {plan.dispatcher}"
            names.setdefault(name, []).append(phase)
    remedy = (
        "use --all2all-backend allgather_reducescatter with --enforce-eager, or leave out -dp or "
        "--enable-expert-parallel"
    )
    return tuple(
        Missing(
            f"{name} for {' and '.join(phases)} ({parallel})",
            f"{parallel}: {name} for {' and '.join(phases)}, which takes tokens to the experts of other "
            f"replicas, is not implemented yet: {remedy}.",
        )
        for name, phases in names.items()
    )


def missing_speculation(speculation: Speculation | None, parallel: Parallel) -> tuple[Missing, ...]:
    """Return what keeps an engine of these sizes from verifying drafts; () if nothing does."""
    if speculation is None:
        return ()
    if speculation.method not in METHODS:
        where = f"with method {speculation.method}"
        why = f"drafts come by method {', '.join(METHODS[:-1])} or {METHODS[-1]} alone"
    elif parallel.pp > 1:
        where, why = "with pipeline parallelism", "the stages do not tell each other which drafts were accepted"
    elif speculation.layered and (parallel.lockstep or parallel.redundant is not None):
        where = f"with method {speculation.method} and experts that replicas share or that move"
        why = "a replica without tokens takes no part in the exchanges of the draft layer"
    else:
        return ()
    remedy = "leave out --speculative-config" if parallel.pp > 1 else 'use "method": "ngram"'
    return (
        Missing(
            f"speculative decoding {where} (--speculative-config)",
            f"--speculative-config: speculative decoding {where} is not implemented yet, because {why}: {remedy}.",
        ),
    )


def missing_blend(
    cache: CacheConfig, args: ModelArgs, parallel: Parallel, windows: Sequence[int | None], device: str
) -> tuple[Missing, ...]:
    """Return what keeps an engine from reusing KV at other positions (CacheBlend); () if nothing does, or needs not.

    windows   sliding window of each KV group
    """
    if not cache.enable_cache_blend:
        return ()
    if not cache.enable_prefix_caching:
        where, why = "with --no-enable-prefix-caching", "texts are reused from the prefix cache"
    elif parallel.size > 1:
        where, why = f"with {parallel}", "ranks do not tell each other which rows they keep"
    elif any(window is not None for window in windows):
        where, why = "for layers with a sliding window", "they have given up the KV of most tokens of a text"
    elif args.num_layers <= CHECK_LAYER + 1:
        where, why = f"for {args.num_layers} layers", f"the first {CHECK_LAYER + 1} compute all tokens"
    elif args.draft_layers:
        where, why = "with method mtp", "a layer that drafts needs the states of all tokens"
    elif args.latent is not None and device == "cuda":
        where, why = "for latent attention on a GPU", "its kernels take only the last rows of a sequence"
    else:
        return ()
    return (
        Missing(
            f"CacheBlend {where} (--enable-cache-blend)",
            f"--enable-cache-blend: CacheBlend {where} is not "
            f"implemented yet, because {why}: leave out --enable-cache-blend.",
        ),
    )


def check_missing(missing: Sequence[Missing]) -> None:
    """Raise UnsupportedModel with the reason of the first missing feature; do nothing when there is none."""
    if missing:
        raise UnsupportedModel(missing[0].reason)


def not_runnable(missing: Iterable[str]) -> str:
    """Return the sentence "Not runnable yet: ..." that names these missing features; "" when there is none."""
    *most, last = missing or [""]
    words = f"{', '.join(most)} and {last} are" if most else f"{last} is"
    return last and f"Not runnable yet: {words} not implemented; the plan below is what it would be."
