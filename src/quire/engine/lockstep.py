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
    return StepSync(rows, switch, _passes(plans) if drafts else None)


def _passes(plans: Sequence[StepPlan | None]) -> DraftSync:
    """Return the passes of the drafters of all replicas."""
    decodes = tuple(0 if plan is None else plan.num_decodes for plan in plans)
    most = max(
        (int(plan.num_tokens[: plan.num_decodes].max()) - 1 for plan in plans if plan is not None and plan.num_decodes),
        default=0,
    )
    prompts = tuple(plan is not None and len(plan.slots) > plan.num_decodes for plan in plans)
    return DraftSync(most, decodes, prompts)
