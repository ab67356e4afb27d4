"""Prompts in every spelling, and what is none."""

from enum import IntEnum

import numpy as np
import pytest

from quire.contracts.errors import InvalidParameter
from quire.entry.prompts import parse_prompt


class Id(IntEnum):
    """A kind of int."""

    THREE = 3


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), [1, Id.THREE]])
def test_integers_of_any_kind_are_ids(ids: list[int]) -> None:
    assert parse_prompt(ids).token_ids == parse_prompt({"prompt_token_ids": ids}).token_ids == list(ids)


@pytest.mark.parametrize("ids", [[], [True], [1, False], [1.0], ["a"], [1, None], [np.int32(3)], {1, 2}, b"ab"])
def test_what_is_no_list_of_integers_is_refused(ids: object) -> None:
    for prompt, words in ((ids, "a prompt must be"), ({"prompt_token_ids": ids}, "non-empty list of integers")):
        with pytest.raises(InvalidParameter, match=words):
            parse_prompt(prompt)
