"""The core's process: `python -m quire.entry.core_process`, started by a server and by nobody else.

Reads its configuration from standard input, whose end later means that the server is gone. Speaks to the server through
sockets; what it writes goes to the server's standard error.
"""

import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.procs.core_server import Send, run_core
from quire.procs.messages import CoreStart, Loading, Ready
from quire.weights.folder import resolve_folders

PROGRESS_SECONDS = 0.1  # between two messages about the same phase


def main() -> int:
    """Serve one core until the server says stop; returns the exit code."""
    # Signals are the server's to handle: it lets requests finish, then says stop. A Ctrl-C does not reach this session,
    # but a service manager sends SIGTERM to every process of a unit at once. The end of standard input ends us anyway.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.ERROR, format="quire core: %(message)s")  # notes for users travel in `Ready`
    start = _read_start(sys.stdin.fileno())
    folder = Path(start.to_core.removeprefix("ipc://")).parent
    threading.Thread(target=_watch_parent, args=(sys.stdin.fileno(), folder), name="quire-parent", daemon=True).start()
    return run_core(start, _build_to_stay)


def _build_to_stay(config: EngineConfig, send: Send) -> tuple[EngineCore, Ready]:
    built = build(config, send)
    gc.collect()
    gc.freeze()  # what lives as long as the process need not be looked at in every collection
    return built


def build(config: EngineConfig, send: Send) -> tuple[EngineCore, Ready]:
    """The core that a configuration asks for, and what to say of it. Imports torch only when there is a model."""
    if config.device.device == "mock":
        return _build_mock(config)
    from quire.assemble import assemble

    engine = assemble(config, _progress("weights", send))
    plans = {"dtype": f"{engine.dtype.dtype} ({engine.dtype.reason})"}
    plans |= {choice.op: str(choice).removeprefix(f"{choice.op}: ") for choice in engine.kernels.choices}
    if experts := engine.core.facts.plans["experts"]:
        plans["experts"] = str(experts)
    ready = _ready(engine.core, dtype=engine.dtype.dtype, device=engine.device.device, weight_bytes=engine.weight_bytes,
                   kv_bytes=engine.memory.kv_bytes, plans=plans, phases=engine.phases, notes=engine.notes)
    return engine.core, ready


def _build_mock(config: EngineConfig) -> tuple[EngineCore, Ready]:
    from quire.engine.mock_core import build_mock_core

    core = build_mock_core(config, *resolve_folders(config))
    plans = {"model": f"mock, {config.device.mock_step_ms:g} ms per step"}
    notes = ("device=mock: no model is loaded, and the answers are made up.",)
    return core, _ready(core, dtype="none", device="mock", weight_bytes=0, kv_bytes=0, plans=plans, notes=notes)


def _ready(core: EngineCore, **told: Any) -> Ready:
    """What is told of a core, beside its own facts."""
    facts = core.facts
    return Ready(max_model_len=facts.max_model_len, vocab_size=facts.vocab_size, num_slots=facts.num_slots,
                 num_blocks=facts.num_blocks, block_size=facts.block_size, depth=facts.depth, **told)


def _progress(phase: str, send: Send) -> Callable[[int, int], None]:
    """Tells of progress in bytes, not too often, and always of the end."""
    last = float("-inf")

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_SECONDS or done >= total:
            last = time.monotonic()
            send(Loading(phase, done, total, "B"))

    return tell


def _read_start(descriptor: int) -> CoreStart:
    """The first line; unbuffered, so that nothing is held by whoever reads on."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (data := os.read(descriptor, 1 << 16)):
            sys.exit("quire.entry.core_process is started by `quire serve`, with its configuration on standard input.")
        line += data
    return msgspec.json.decode(line, type=CoreStart)


def _watch_parent(descriptor: int, folder: Path) -> None:
    """End at once, with the sockets' folder, when the server is gone: nobody else would end this process."""
    while os.read(descriptor, 1 << 16):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # not through the interpreter's end: a thread of some library could hold it up
