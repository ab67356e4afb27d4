"""Small steps without drafts leave the rows of a drafter with layers to a later pass."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.contracts.step import I32
from quire.engine.finish import Finisher
from quire.kernels.attention import KVView
from quire.kv.pool import BlockPool
from quire.plan.as_stored import with_prediction
from quire.spec.late_rows import LateRows

from ...support.compared import LIMITS, make_model, model_args, runner_of
from ...support.drafters import compare_some_drafts, draft_with_layers
from ...support.features import drafter_of

pytestmark = pytest.mark.usefixtures("one_thread")


def i32(*values: int) -> I32:
    return np.array(values, np.int32)


@pytest.mark.parametrize(("kind", "depth"), [("glm", 1), ("latent", 2)])
def test_drafts_are_those_of_a_drafter_that_leaves_nothing(
    kind: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a block of an answer has all its entries, which were no numbers before, when others may reuse it."""
    args, found, calls = with_prediction(model_args(kind), drafting=1), [], Counter[str]()
    publish, advance, steps = BlockPool.publish, Finisher._advance, list[bool]()
    monkeypatch.setattr(Finisher, "_advance", lambda *given: (steps.append(True), advance(*given), steps.pop()))
    for late in (False, True):
        runner = runner_of(make_model(args), replace(LIMITS, num_drafts=2, depth=depth))
        found.append(draft_with_layers(runner, 2, late=late))
        drafter, view = drafter_of(runner), runner.programs.kv[-1]
        for name in ("catch_up", "keep", "draft") if late else ():
            work = getattr(drafter, name)
            setattr(drafter, name, lambda *given, name=name, work=work: (calls.update((name,)), work(*given)))

        def published(pool: BlockPool, block: int, key: bytes, view: KVView = view, late: bool = late) -> bool:
            parts = [part for part in vars(view).values() if isinstance(part, torch.Tensor)]
            assert not steps or all(part[block].isfinite().all() for part in parts), "an entry is missing"
            calls["published"] += late and bool(steps)
            return publish(pool, block, key)

        monkeypatch.setattr(BlockPool, "publish", published)
        compare_some_drafts(runner, args, monkeypatch, number=8)
    assert calls["published"] > 6 and calls["keep"] > calls["catch_up"] > 10, calls
    assert len(found[0]) > 10 and [place for place, _ in found[0]] == [place for place, _ in found[1]]
    for (_, expected), (_, logits) in zip(*found, strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_pass_is_due_when_rows_have_no_room_or_others_must_see_them() -> None:
    rows, none = LateRows(5, most=4, width=3, room=6), i32()

    def due(*slots: int, tokens: int = 1, prompts: I32 = none, late: bool = True, completes: bool = False) -> list[int]:
        asked = rows.step(i32(*slots), np.full(len(slots), tokens, np.int32), prompts, late=late, completes=completes)
        return np.flatnonzero(asked).tolist()

    assert due(prompts=i32(0, 1), late=False) == []
    assert [due(0) for _ in range(6)] == [[]] * 5 + [[0]], "1 row of the prompt, 5 of steps, then no room"
    assert due(0, 1, completes=True) == [0, 1]
    assert due(0, 1) == [] == due(0, 1, tokens=3, late=False), "2 rows: a first pass takes them"
    assert due(0, 1) == [0, 1], "drafts that were accepted may have completed a block"
    assert [due(0) for _ in range(3)] == [[]] * 3
    assert due(1, 0, late=False) == [1], "4 rows of slot 0 are more than a first pass takes"
