"""The record of a step of replicas in lock-step."""

import numpy as np
import pytest

from quire.contracts.step import StepPlan
from quire.engine.lockstep import agreed


def plan(tokens: tuple[int, ...], decodes: int) -> StepPlan:
    counts = np.array(tokens, np.int32)
    return StepPlan(
        step=1,
        slots=np.arange(len(tokens), dtype=np.int32),
        num_decodes=decodes,
        num_tokens=counts,
        num_rows=counts,
        outputs=np.zeros(len(tokens), np.uint8),
    )


@pytest.mark.parametrize(
    ("plans", "rows", "decode"),
    [
        ([plan((1, 1, 1), 3), plan((1, 4), 2)], (3, 5), (3, 4)),
        ([plan((1, 1, 1), 3), None], (3, 0), (3, 1)),
        ([plan((), 0), plan((1, 1), 2)], (0, 2), (2, 1)),  # a plan with changes of tables alone
        ([plan((1, 1, 1), 3), plan((1, 9), 1)], (3, 10), (0, 0)),
        ([plan((), 0), None], (0, 0), (0, 0)),
    ],
)
def test_the_size_of_decode_steps_is_that_of_the_fullest_replica(
    plans: list[StepPlan | None], rows: tuple[int, ...], decode: tuple[int, int]
) -> None:
    """A replica with chunks of prompts leaves the others without such a size."""
    sync = agreed(plans, -1, drafts=False)
    assert (sync.rows, sync.decode) == (rows, decode)
