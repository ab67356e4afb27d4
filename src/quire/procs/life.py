"""The life of an engine core: pauses, sleep, and updates of its weights. No torch.

    paused     no step with tokens is planned; requests wait
    asleep     paused, and memory of weights, KV cache or both is free; requests are refused
    updating   between `start_weight_update` and `finish_weight_update`
    at fault   the weights are not whole: requests are refused until an update has come to its end

Ranks do the work (`quire.worker.held_memory`), all of them in the same order. Before the first one writes a weight, all
have proved that every tensor of the update is there and has its shape.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from quire.contracts.errors import EngineAsleep, InvalidParameter, UserError
from quire.contracts.request import PAUSED
from quire.engine.core import EngineCore
from quire.engine.replicas import Core, Replicas

MODES = ("abort", "wait", "keep")
PARTS = ("weights", "kv_cache")
LEVELS = (1, 2)


class Life:
    """Pauses, sleep and weight updates of one core. For the thread of the core.

    advance   runs a step of the core, and hands its outputs to their readers
    paused    True: `pause` was called, and `resume` was not
    level     level of the sleep; 0: the engine is awake
    folder    tensors of an update that a caller in this process has given; None: it gave none
    """

    def __init__(self, core: Core, advance: Callable[[], None]) -> None:
        self._core, self.advance = core, advance
        self.paused, self.level = False, 0
        self.folder: TemporaryDirectory[str] | None = None
        self._freed: set[str] = set()
        self._updating = False
        self._fault = ""

    @property
    def operations(self) -> Mapping[str, Callable[..., bool | int]]:
        """Operations by name; see `messages.Control`."""
        return {
            "pause": self.pause,
            "quiet": self.quiet,
            "resume": self.resume,
            "settled": lambda: self.settled,
            "is_paused": lambda: self.held,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "is_sleeping": lambda: self.level > 0,
            "init_weights": self.init_weights,
            "start_weights": self.start_weights,
            "update_weights": self.update_weights,
            "finish_weights": self.finish_weights,
        }

    @property
    def held(self) -> bool:
        """True when requests stay as they are."""
        return self.paused or self.level > 0 or self._updating or bool(self._fault)

    @property
    def settled(self) -> bool:
        """True when no request runs and no step is in flight. Becomes true some steps after `pause`."""
        return not any(core.in_flight or (len(core.scheduler.table) and not core.held) for core in self._cores)

    def check(self) -> None:
        """Raise `EngineAsleep` when the engine takes no requests."""
        if self._fault:
            raise EngineAsleep(self._fault)
        if self.level:
            raise EngineAsleep(f"the engine sleeps (level {self.level}): wake it by POST /wake_up or LLM.wake_up().")

    def check_running(self) -> None:
        """Raise `EngineAsleep` when the engine plans no steps."""
        self.check()
        if self.held:
            raise EngineAsleep("a weight update is under way: end it by finish_weight_update().")

    def pause(self, mode: str = "abort") -> bool:
        """Plan no more steps. Returns `settled`.

        mode   "abort": end all requests; "wait": let those that run come to their end, others wait; "keep": keep all
        """
        settled = self.quiet(mode)
        self.paused = True
        return settled

    def quiet(self, mode: str = "abort") -> bool:
        """Do what `pause` does, before a `sleep`: `wake_up` ends it."""
        if mode not in MODES:
            raise InvalidParameter(f"mode={mode!r}: must be one of {', '.join(MODES)}.", param="mode")
        self._hold(at_once=mode != "wait")
        if mode == "abort":
            for handle in self._core.handles:
                self._core.abort(handle, PAUSED)
        return self.settled

    def resume(self) -> bool:
        """Go on with the requests. Raises a `UserError` while the engine sleeps or its weights are not whole."""
        self.check()
        if self._updating:
            raise UserError("a weight update is under way: end it by /finish_weight_update.")
        self.paused = False
        self._go_on()
        return True

    def sleep(self, level: int = 1) -> bool:
        """Free the memory of weights and KV cache; kept requests are computed again after `wake_up`.

        level   1: the weights go to host memory; 2: the weights are dropped
        """
        if level not in LEVELS:
            raise InvalidParameter(f"level={level}: must be 1 or 2; /pause stops requests alone.", param="level")
        if self.level or self._updating:
            raise UserError("the engine sleeps already." if self.level else "a weight update is under way: end it.")
        self._settle()
        self._drop()
        try:
            self._ranks("sleep", {"level": level})
        except Exception:
            self._ranks("wake", {"parts": list(PARTS), "load": level == 2})  # ranks that slept already
            self._go_on()
            raise
        self.level, self._freed = level, set(PARTS)
        return True

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Bring parts back: "weights", "kv_cache"; None: both. When all are back, requests go on.

        After level 2 weights are read from the model's files if nothing sleeps any longer after this call. Weights that
        wake before the KV cache are empty: an update has to bring them.
        """
        parts = self._freed & set(PARTS if tags is None else tags)
        if unknown := set(tags or ()) - set(PARTS):
            raise InvalidParameter(f"tags: {min(unknown)!r} is not one of {', '.join(PARTS)}.", param="tags")
        if not self.level:
            return True
        empty = self.level == 2 and "weights" in parts
        load = empty and parts == self._freed
        if empty:
            self._fault = (
                "the weights were dropped by sleep level 2, and woken before the KV cache: send new ones "
                "(/start_weight_update, /update_weights, /finish_weight_update), or have those of the files read "
                "(/sleep?level=2, then /wake_up)."
            )
        self._ranks("wake", {"parts": sorted(parts), "load": load})
        if load:
            self._fault = ""
        self._freed -= parts
        self.level = self.level if self._freed else 0
        self._go_on()
        return True

    def init_weights(self, init_info: dict[str, Any]) -> bool:
        """Join the group from which weights come. init_info: see `quire.worker.new_weights`."""
        self._ranks("init_weights", {"info": init_info})
        return True

    def start_weights(self) -> bool:
        """Begin an update. Requests that run are held until it ends."""
        if "weights" in self._freed:
            raise UserError("the weights are not in memory: wake them first (/wake_up?tags=weights).")
        if self._updating:
            raise UserError("a weight update is under way: end it by /finish_weight_update.")
        self._settle()
        try:
            self._ranks("start_weights", {})
            self._updating = True
        finally:
            self._go_on()
        return True

    def update_weights(self, update_info: dict[str, Any]) -> bool:
        """Get tensors of the update. No weight changes yet. update_info: see `quire.worker.new_weights`."""
        if not self._updating:
            raise UserError("no weight update is under way: begin one by /start_weight_update.")
        self._ranks("update_weights", {"info": update_info})
        return True

    def finish_weights(self) -> bool:
        """Replace the weights. All KV is dropped, and kept requests are computed again.

        If a tensor is missing or has another shape, all weights stay as they are. If a later error leaves weights that
        are not whole, the engine refuses requests until another update has come to its end.
        """
        if not self._updating:
            raise UserError("no weight update is under way: begin one by /start_weight_update.")
        self._updating = False
        try:
            folder = next(filter(None, self._ranks("staged", {})), None)
            if folder is None:
                raise UserError("the update has no tensors: send them by /update_weights before its end.")
            self._ranks("prove_weights", {"folder": folder})
            self._settle()
            self._drop()
            self._fault = "the weights are being replaced."
            try:
                self._ranks("load_weights", {"folder": folder})
            except Exception as error:
                self._fault = (
                    f"the weights are not whole, because an update failed in the middle ({error}): send a whole "
                    "update, or restart the engine."
                )
                raise
            self._fault = ""
        finally:
            self._ranks("end_weights", {})
            self._go_on()
        return True

    @property
    def _cores(self) -> Collection[EngineCore]:
        return self._core.live if isinstance(self._core, Replicas) else (self._core,)

    def _ranks(self, name: str, args: dict[str, Any]) -> list[Any]:
        """Run an operation on every rank. Return the values in the order of ranks."""
        values = self._core.executor.control(name, args)
        return values if isinstance(values, list) else [values]

    def _hold(self, *, at_once: bool) -> None:
        for core in self._cores:
            core.scheduler.admits = False
            core.held = core.held or at_once

    def _go_on(self) -> None:
        """Let requests go on, unless something holds them still."""
        for core in self._cores:
            core.held = self.held
            core.scheduler.admits = not self.held

    def _settle(self) -> None:
        """Hold all requests and wait for the steps in flight."""
        self._hold(at_once=True)
        while self._core.has_work:
            self.advance()

    def _drop(self) -> None:
        """Send running requests back to the queue, and forget all KV: none of it is of the next weights."""
        for core in self._cores:
            for request in list(core.scheduler.table.active()):
                core.scheduler.roster.preempt(request)
        self._core.reset_prefix_cache()
