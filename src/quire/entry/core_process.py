"""The process of the engine core: `python -m quire.entry.core_process`. Only a server starts it.

It reads its configuration from standard input. End of file there later means that the server is gone. It exchanges
messages with the server through sockets. Its standard output and error go to the server's standard error.
"""

import gc
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from quire.assemble.warm_up import warm_up
from quire.config.engine import EngineConfig
from quire.engine.replicas import Core
from quire.kvnet.event_publisher import publish_events
from quire.observe.log_lines import lost_lines, set_up_logging
from quire.observe.log_writer import log_written_apart
from quire.plan.meetings import check, inputs_of, met
from quire.procs.core_server import Send, run_core
from quire.procs.messages import FEATURES, CoreStart, Loading, Ready
from quire.procs.parent import end_with_parent, read_start
from quire.weights.folder import resolve_folders

LINES = ("cache", "states", "ranks", "each rank", *FEATURES)  # of the banner
PROGRESS_SECONDS = 0.1  # between two messages about the same phase


def main() -> int:
    """Run the process of an engine core until the server sends `Stop`. Return the exit code."""
    # The server handles signals: it lets requests finish, then sends stop. Ctrl-C does not reach this session, but a
    # service manager sends SIGTERM to every process of a unit. If the server dies, standard input ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    start = read_start(CoreStart, "quire.entry.core_process")
    with log_written_apart(partial(lost_lines, log_format=start.log_format)):
        set_up_logging(start.log_format, "core", logging.Formatter("quire core: %(message)s"))
        logging.getLogger().setLevel(logging.ERROR)  # notes for users travel in `Ready`
        logging.getLogger("quire").getChild("hosts").setLevel(logging.WARNING)  # those about missing hosts do not wait
        logging.getLogger("quire").getChild("kv").setLevel(logging.WARNING)  # so do those about tiers and peers
        logging.getLogger("quire").getChild("balancing").setLevel(logging.INFO)  # of experts, while requests are served
        end_with_parent(partial(shutil.rmtree, Path(start.places[0].folder), ignore_errors=True))
        return run_core(start, _build_to_stay)


def _build_to_stay(config: EngineConfig, send: Send) -> tuple[Core, Ready]:
    built = build(config, send)
    gc.collect()
    gc.freeze()  # objects that live as long as the process are left out of every later collection
    return built


def build(config: EngineConfig, send: Send) -> tuple[Core, Ready]:
    """Build an engine core and its `Ready` message. `send` gets messages about the progress of loading."""
    if config.device.device == "mock":
        return _build_mock(config)
    from quire.assemble.engine import assemble

    engine = assemble(config, _progress("weights", send))
    began = time.perf_counter()
    warm_up(engine.core)
    phases = engine.phases | {"first steps": round(time.perf_counter() - began, 3)}
    plans = {"dtype": f"{engine.dtype.dtype} ({engine.dtype.reason})"}
    plans |= {choice.op: str(choice).removeprefix(f"{choice.op}: ") for choice in engine.kernels.choices}
    plans |= {name: str(engine.core.facts.plans.get(name, "")) for name in LINES}
    if experts := engine.core.facts.plans["experts"]:
        plans["experts"] = str(experts)
    ready = _ready(
        engine.core,
        dtype=engine.dtype.dtype,
        device=engine.device.device,
        weight_bytes=engine.weight_bytes,
        kv_bytes=engine.memory.kv_bytes,
        plans=plans,
        phases=phases,
        notes=engine.notes,
    )
    return engine.core, ready


def _build_mock(config: EngineConfig) -> tuple[Core, Ready]:
    from quire.engine.mock_core import build_mock_core

    check(met(inputs_of(config)))
    core = publish_events(build_mock_core(config, *resolve_folders(config)), config)
    plans = {"model": f"mock, {config.device.mock_step_ms:g} ms per step"}
    notes = ("device=mock: no model is loaded, and the answers are made up.",)
    return core, _ready(core, dtype="none", device="mock", weight_bytes=0, kv_bytes=0, plans=plans, notes=notes)


def _ready(core: Core, **told: Any) -> Ready:
    """Make the `Ready` message from the core's facts and `told`, its other fields."""
    facts = core.facts
    return Ready(
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        num_slots=facts.num_slots,
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        depth=facts.depth,
        num_drafts=facts.num_drafts,
        blends=facts.blends,
        **told,
    )


def _progress(phase: str, send: Send) -> Callable[[int, int], None]:
    """Return a function that sends progress in bytes: at most every `PROGRESS_SECONDS`, and always at the end."""
    last = float("-inf")

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_SECONDS or done >= total:
            last = time.monotonic()
            send(Loading(phase, done, total, "B"))

    return tell


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # skips the interpreter's shutdown, which a library's thread could block
