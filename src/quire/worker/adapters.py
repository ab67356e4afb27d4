"""Adapters (LoRA) as a step feature: which rows of a step have which adapter, and the loads of adapters into slots.

A load reads files, or finds the adapter in host memory, in a thread of its own, then copies it to its slot. Plans name
no adapter before the load is reported, and no load begins into a slot that an earlier step still reads.
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from quire.contracts.adapters import AdapterLoad, AdapterLoaded
from quire.contracts.errors import UserError
from quire.contracts.step import I32, SAMPLE, StepPlan
from quire.kernels.lora import TILE, AdapterRows, group_rows, grouped, most_tiles, tile_of, tiles_of
from quire.kernels.step.state import zeros
from quire.kernels.step.upload import Change
from quire.layers.adapters import AdapterBank, HeldAdapter
from quire.layers.context import StepContext
from quire.worker.features import StepFeature
from quire.worker.recorder import StepShape

LOG = logging.getLogger("quire")
IDLE_SECONDS = 0.005  # for a load, when a step has no tokens
NONE = np.empty(0, np.int32)


class AdapterLoader:
    """Loads adapters into slots, one after the other, in a thread that begins with the first load."""

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank
        self._held: dict[str, HeldAdapter] = {}  # by digest
        self._jobs = queue.SimpleQueue[tuple[AdapterLoad, Any, float]]()
        self._done = queue.SimpleQueue[AdapterLoaded]()
        self._num_open = 0
        self._thread: threading.Thread | None = None
        on_gpu = bank.memory.is_cuda
        self._stream = torch.cuda.Stream(bank.memory.device) if on_gpu else None

    @property
    def num_slots(self) -> int:
        """Adapters that a step can have."""
        return len(self._bank.memory)

    @property
    def num_open(self) -> int:
        """Loads that were begun and are not reported."""
        return self._num_open

    def begin(self, job: AdapterLoad) -> None:
        """Begin a load, behind all work that is launched. The slot may be read by that work, and by none after it."""
        behind = torch.cuda.current_stream().record_event() if self._stream is not None else None
        self._num_open += 1
        self._jobs.put((job, behind, time.perf_counter()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="quire-adapters", daemon=True)
            self._thread.start()

    def reports(self, seconds: float) -> tuple[AdapterLoaded, ...]:
        """Return the reports of loads that have ended. If none has, wait so long for one."""
        found = list[AdapterLoaded]()
        while self._num_open:
            try:
                found.append(self._done.get(block=not found and seconds > 0, timeout=seconds or None))
            except queue.Empty:
                break
            self._num_open -= 1
        return tuple(found)

    def _work(self) -> None:
        while True:
            job, behind, began = self._jobs.get()
            read, error = False, ""
            try:
                read = self._load(job, behind)
            except UserError as refusal:
                error = str(refusal)
            except Exception as fault:  # of one adapter: its requests fail, the engine goes on
                LOG.exception("adapter %s could not be loaded", job.adapter.name)
                error = f"{type(fault).__name__}: {fault}"
            self._done.put(AdapterLoaded(id=job.id, error=error, seconds=time.perf_counter() - began, read=read))

    @torch.inference_mode()
    def _load(self, job: AdapterLoad, behind: Any) -> bool:
        """Bring an adapter into its slot. Return True if its files were read."""
        for digest in job.forget:
            self._held.pop(digest, None)
        held = self._held.get(job.adapter.digest)
        if read := held is None:
            held = self._bank.read(job.adapter)
        assert held is not None
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(behind)
            self._bank.put(job.slot, held)
            if self._stream is not None:
                self._stream.synchronize()
        self._held[job.adapter.digest] = held
        return read


class StepAdapters(StepFeature):
    """Tells layers the adapter of each row, and begins the loads of plans.

    captured    most tokens of a captured step, which reads tables at fixed addresses; None: no step is captured
    """

    def __init__(
        self, loader: AdapterLoader, num_slots: int, tokens: int, device: torch.device, captured: int | None
    ) -> None:
        self._loader, self._device, self._captured = loader, device, captured
        self.parts, self.head = (loader,), self._head
        self._of_slot = np.full(num_slots + 1, -1, np.int32)  # adapter of each request's slot
        self._rows, self._heads = NONE, NONE  # adapters of the rows of the step, and of its sampled rows
        self._tile = TILE
        kinds = {"dtype": torch.int32, "device": device}
        self._slots, self._order = zeros(tokens, **kinds) - 1, zeros(tokens, **kinds)
        self._tiles = zeros(most_tiles(tokens, min(num_slots, loader.num_slots)), 3, **kinds)
        self._used, self._sent = zeros(1, **kinds), NONE

    def apply(self, plan: StepPlan) -> list[Change]:
        """Note the adapters of the step's rows, and return the changes of the tables that captured steps read."""
        self._of_slot[plan.released] = -1
        for one in plan.admitted:
            self._of_slot[one.slot] = one.adapter
        own = self._of_slot[plan.slots]
        if not (own >= 0).any():
            self._rows = self._heads = NONE
            return []
        decodes = plan.num_decodes
        counts = np.where(np.arange(len(own)) < decodes, plan.num_tokens, (plan.outputs & SAMPLE) != 0)
        self._rows, self._heads = np.repeat(own, plan.num_tokens), np.repeat(own, counts)
        return [] if self._captured is None else self._changes(self._captured)

    def _changes(self, captured: int) -> list[Change]:
        if np.array_equal(self._sent, self._rows):
            return []
        slots = np.full(max(len(self._rows), len(self._sent)), -1, np.int32)  # none behind the rows of the step
        slots[: len(self._rows)] = self._rows
        self._sent, self._tile = self._rows, tile_of(len(self._rows)) if len(self._rows) > captured else TILE
        order, groups = group_rows(self._rows)
        tiles, made = np.zeros((len(self._tiles), 3), np.int32), tiles_of(groups, self._tile)
        tiles[: len(made)] = made
        return [
            Change(self._slots, 0, slots),
            Change(self._order, 0, order),
            Change(self._tiles, 0, tiles.ravel()),
            Change(self._used, 0, np.array([len(made)], np.int32)),
        ]

    def before(self, plan: StepPlan) -> None:
        """Begin the loads of the plan: all earlier steps are launched."""
        for job in plan.features.adapters:
            self._loader.begin(job)

    def fit(self, plan: StepPlan, shape: StepShape) -> StepShape:
        """Return the shape; a step with an adapter has recordings of its own."""
        return replace(shape, adapted=True) if len(self._rows) else shape

    def context(self, ctx: StepContext, shape: StepShape) -> StepContext:
        """Return the context with the adapters of the rows, in a step with an adapter."""
        return replace(ctx, adapters=self._of_rows(self._rows, shape)) if shape.adapted else ctx

    def _head(self, shape: StepShape) -> AdapterRows | None:
        """Return the adapters of the sampled rows, in a step with an adapter."""
        if not shape.adapted:
            return None
        return self._of_rows(self._rows if shape.decode else self._heads, shape if shape.decode else None)

    def _of_rows(self, rows: I32, shape: StepShape | None) -> AdapterRows:
        """Return the adapters of rows: in the tables, for those of a captured step. shape: of a step; None: its head"""
        if self._captured is None or shape is None:
            return grouped(rows, self._device, tile_of(len(rows)))
        tile = TILE if shape.recorded else self._tile
        tiles = most_tiles(shape.tokens, min(shape.seqs, self._loader.num_slots), tile)
        tables = self._slots[: shape.tokens], self._order[: shape.tokens], self._tiles[:tiles]
        return AdapterRows(*tables, used=self._used, early=True, tile=tile)

    def of_prompt(self, slot: int, count: int) -> AdapterRows | None:
        """Return the adapters of `count` rows of the prompt in a slot; None: it has none."""
        adapter = int(self._of_slot[slot])
        return None if adapter < 0 else grouped(np.full(count, adapter, np.int32), self._device)

    def results(self, plan: StepPlan, counts: I32 | None, words: I32) -> Mapping[str, Any]:
        """Return the reports of the loads that have ended. A step without tokens may wait a moment for one."""
        idle = not len(plan.slots) and not plan.joins
        return {"loaded": self._loader.reports(IDLE_SECONDS * idle)} if self._loader.num_open else {}
