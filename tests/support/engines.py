"""Parts of an engine of this process, by their types: an engine may have one core or several, and executors differ."""

from quire import LLM
from quire.contracts.output import TierStats
from quire.contracts.step import Tier
from quire.engine.core import EngineCore
from quire.engine.replicas import Replicas, flush
from quire.kv.store import KVStore
from quire.ranks.executor import RanksExecutor


def core_of(llm: LLM) -> EngineCore:
    """Return the only core of an engine."""
    core = llm.engine.core
    assert isinstance(core, EngineCore)
    return core


def cores_of(llm: LLM) -> tuple[EngineCore, ...]:
    """Return the cores of an engine, one of each replica."""
    core = llm.engine.core
    return core.cores if isinstance(core, Replicas) else (core,)


def store_of(llm: LLM) -> KVStore:
    """Return the tiers below the device's KV blocks."""
    store = core_of(llm).scheduler.roster.store
    assert store is not None
    return store


def tier_stats(llm: LLM, tier: Tier) -> TierStats:
    """Return the counters of a tier, after the copies that are under way."""
    flush(llm.engine.core)
    return core_of(llm).state().stats.tiers[tier]


def draft_totals(llm: LLM) -> tuple[int, int, list[int]]:
    """Return the runs that verified drafts, the drafts, and how many were accepted at each place of a run."""
    runs, made, *accepted = core_of(llm).scheduler.drafts.totals
    return runs, made, accepted


def rank_pids(llm: LLM) -> list[int]:
    """Return the process of each rank, in the order of the ranks."""
    found: dict[int, None] = {}
    for core in cores_of(llm):
        assert isinstance(core.executor, RanksExecutor)
        found |= dict.fromkeys(core.executor.pids)
    return list(found)
