"""The record of a step of replicas in lock-step, made of the plans of all replicas."""

from collections.abc import Sequence

from quire.contracts.step import DraftSync, StepPlan, StepSync


def agreed(plans: Sequence[StepPlan | None], switch: int, *, drafts: bool) -> StepSync:
    """Return the record on which the replicas agree.

    plans    of each replica; None: it has no tokens
    switch   see `StepSync`
    drafts   True: the drafter has layers
    """
    rows = tuple(0 if plan is None else int(plan.num_tokens.sum()) for plan in plans)
    return StepSync(rows, switch, _passes(plans) if drafts else None, _decode(plans))


def _decode(plans: Sequence[StepPlan | None]) -> tuple[int, int]:
    """Return the most decodes of a replica and the most tokens of one; (0, 0): a replica has chunks of prompts."""
    some = [plan for plan in plans if plan is not None]
    if any(len(plan.slots) > plan.num_decodes for plan in some):
        return 0, 0
    counts = [len(plan.slots) for plan in some]
    return max(counts, default=0), max((int(plan.num_tokens.max(initial=0)) for plan in some), default=0)


def _passes(plans: Sequence[StepPlan | None]) -> DraftSync:
    """Return the passes of the drafters of all replicas."""
    passes = [(0, 0) if plan is None else _own_passes(plan) for plan in plans]
    decodes, most = tuple(count for count, _ in passes), max(most for _, most in passes)
    prompts = tuple(plan is not None and len(plan.slots) > plan.num_decodes for plan in plans)
    return DraftSync(most, decodes, prompts)


def _own_passes(plan: StepPlan) -> tuple[int, int]:
    """Return the slots that draft in a step of a replica, and the most drafts of one of them.

    A pipeline drafts at the end of a step, for all slots that it samples; others at its begin, for their decodes.
    """
    if (runs := plan.features.runs) is not None:
        return runs.num_drafting, runs.most if runs.num_drafting else 0
    count = plan.num_decodes
    return count, int(plan.num_tokens[:count].max()) - 1 if count else 0
