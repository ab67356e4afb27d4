"""Speculative decoding as it is asked for, and as a device that captures steps does it."""

from typing import Any

import pytest

from quire.contracts.speculation import read_speculative_config
from quire.contracts.step import MAX_VERIFY_ROWS
from quire.engine.drafts import DraftLength

TABLES: list[tuple[int, list[list[int]]]] = [
    (3, []), (3, [[1, 1000, 3]]), (7, [[1, 8, 7], [9, 200, 3], [201, 900, 2]]), (3, [[1, 256, 3], [257, 999, 1]]),
    (2, [[1, 400, 0], [401, 500, 2]]), (1, [[1, 64, 1], [65, 1024, 0]]), (3, [[1, 10, 3], [300, 900, 3]]),
]  # fmt: skip


@pytest.mark.parametrize(("most", "table"), TABLES)
def test_drafts_of_a_captured_step_fit_or_there_are_none(most: int, table: list[list[int]]) -> None:
    """A smaller number would not be captured."""
    given: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": most}
    asked = read_speculative_config(given | {"num_speculative_tokens_per_batch_size": table})
    assert asked is not None
    captured = asked.captured()
    sizes = [size for size, _ in captured.by_batch]
    assert sizes == sorted(set(sizes))
    for decodes in range(1, 1100):
        k = DraftLength(most, asked.by_batch).choose(decodes)
        fits = decodes * (1 + k) <= MAX_VERIFY_ROWS
        assert DraftLength(most, captured.by_batch).choose(decodes) == (k if fits else 0), decodes
