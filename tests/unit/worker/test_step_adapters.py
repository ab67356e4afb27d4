"""Tables of the adapters of a step's rows, as captured steps read them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.contracts.step import SAMPLE
from quire.kernels import lora
from quire.kernels.step.upload import Change, InPlaceUpload
from quire.layers.context import StepContext
from quire.worker.adapters import StepAdapters
from quire.worker.recorder import StepShape


def plan_of(counts: list[int], **more: Any) -> Any:
    """A step of prompts of the first slots, with these numbers of tokens."""
    slots = np.arange(len(counts))
    fields = {"released": [], "admitted": [], "num_decodes": 0, "outputs": np.full(len(counts), SAMPLE)}
    return SimpleNamespace(slots=slots, num_tokens=np.array(counts), **fields | more)


def rows_of(adapters: StepAdapters, shape: StepShape) -> lora.AdapterRows:
    found = adapters.context(StepContext(torch.zeros(0), (), None), shape).adapters  # type: ignore[arg-type]
    assert found is not None
    return found


def test_long_steps_that_no_graph_holds_have_taller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "LONG", 40)
    loader: Any = SimpleNamespace(num_slots=2)
    adapters = StepAdapters(loader, 4, 200, torch.device("cpu"), captured=64)
    admitted = [SimpleNamespace(slot=slot, adapter=slot - 1) for slot in range(3)]

    def sent(counts: list[int], **more: Any) -> list[Change]:
        changes = adapters.apply(plan_of(counts, **more))
        InPlaceUpload.write(changes)
        return changes

    assert sent([1, 20, 70], admitted=admitted)
    rows = rows_of(adapters, StepShape(91, 3, 3, False, adapted=True))
    assert rows.tile == lora.TALL
    assert rows.tiles.tolist()[:3] == [[0, 0, 20], [1, 20, 64], [1, 84, 6]]
    assert sent([2, 3, 40])
    rows = rows_of(adapters, StepShape(64, 4, 3, False, recorded=True, adapted=True))
    assert rows.tile == lora.TILE
    used = int(rows.used)  # type: ignore[arg-type]
    assert rows.tiles.tolist()[:used] == [[0, 0, 3], [1, 3, 16], [1, 19, 16], [1, 35, 8]]
    assert not rows.tiles[used:].any()
    assert rows.slots.tolist() == [-1] * 2 + [0] * 3 + [1] * 40 + [-1] * 19, "rows behind the step have none"
    assert not sent([2, 3, 40]), "the tables of the step before hold"
