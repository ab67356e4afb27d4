"""Drafts meet everything that a scheduler does: depths, budgets, preemption, priorities, tiers, the prefix cache."""

import random
from collections import Counter
from typing import Any

import pytest

from quire.contracts.step import Tier

from ...support.pairwise import Row, label, pairwise
from .test_properties import VOCAB, chaos

FACTORS: dict[str, Any] = {
    "depth": (1, 2), "k": (1, 3, 7), "budget": (7, 40), "blocks": (14, 90), "caching": (True, False),
    "policy": ("fcfs", "priority"), "host_blocks": (0, 12), "right": ("all", "none", "some"),
}  # fmt: skip
STEMS = [[letter] * 16 for letter in range(5)]


def possible(row: Row) -> bool:
    """False with tiers and without the prefix cache, which finds their blocks."""
    return bool(row.get("caching", True) or not row.get("host_blocks"))


@pytest.mark.parametrize("row", pairwise(FACTORS, possible), ids=label)
def test_every_request_gets_its_tokens(Rig: Any, row: Row) -> None:
    """Requests come, grow and go at random; each pair of FACTORS is in one of the rows."""
    rng, seen, k = random.Random(0), Counter[str](), row["k"]
    accepts = {"all": [k], "none": [0], "some": [rng.randint(0, k) for _ in range(11)]}[row["right"]]
    rig = Rig(
        row["depth"],
        blocks=row["blocks"],
        slots=6,
        budget=row["budget"],
        vocab=VOCAB,
        caching=row["caching"],
        policy=row["policy"],
        drafts=k,
        accepts=accepts,
        host_blocks=row["host_blocks"],
        delays=[rng.choice([0, 0, 1, 3]) for _ in range(13)],
    )
    chaos(rig, rng, seen, num_requests=50, stems=STEMS)
    rig.drain()
    for handle in rig.asked:
        rig.judge(handle)
    # Drafts behind the end of an answer are wrong, and those of a grammar's forced tokens right.
    runs, drafts, *accepted = rig.scheduler.drafts.totals
    assert runs > 20 and drafts >= runs and accepted == sorted(accepted, reverse=True) and len(accepted) == k
    share = sum(accepted) / drafts
    assert {"all": share > 0.3, "none": share < 0.1, "some": 0.1 < share < 0.9}[row["right"]]
    assert (rig.scheduler.num_preempted > 0) == (row["blocks"] == 14)
    assert rig.scheduler.admitter.prefix_hits > 0 or not row["caching"]
    if row["host_blocks"]:
        assert rig.outputs.stats.tiers[Tier.HOST].num_stored > 0
