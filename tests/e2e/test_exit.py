"""A program that ends without closing its engine ends well: no thread of ours computes while the interpreter goes."""

import gc
import os
import subprocess
import threading
import weakref
from pathlib import Path

import pytest

from quire import AsyncLLM

from ..support import template_process

SOURCE = Path(__file__).resolve().parents[2] / "src"
START = """
import asyncio, sys, threading
from quire import LLM, AsyncLLM, SamplingParams
params, options = SamplingParams(max_tokens=4000, ignore_eos=True), dict(num_threads=1, max_model_len=4096)
"""
PROGRAMS = {
    "a loop in a daemon thread": """
llm = AsyncLLM(**options)
ready = threading.Event()
async def main():
    async for _ in llm.generate("hi", params):
        ready.set()
threading.excepthook = lambda told: None
threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
ready.wait()
""",
    "an open stream of an AsyncLLM": """
llm = AsyncLLM(**options, async_depth=2)
stream = llm.generate("hi", params)
asyncio.new_event_loop().run_until_complete(stream.__anext__())
""",
    "an open stream": """
llm = LLM(**options, async_depth=2)
stream = llm.stream("hi", params)
next(stream)
""",
    "an exit in a stream": """
llm = LLM(**options, async_depth=2)
for _ in llm.stream("hi", params):
    sys.exit(0)
""",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_ending_without_closing(program: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    if program == PROGRAMS["a loop in a daemon thread"]:  # starts as a user's does: a copy ends in another order
        environment[template_process.SWITCH] = "0"
    with template_process.start(
        ["-c", START + program],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "Exception ignored" not in said and "terminate" not in said


def test_an_engine_that_nobody_holds_is_freed() -> None:
    before = threading.active_count()
    llm = AsyncLLM(num_threads=1, max_model_len=64, kv_cache_memory_bytes=1 << 22, async_depth=2)
    core = weakref.ref(llm.engine.core)
    assert threading.active_count() == before + 2
    del llm
    gc.collect()
    assert threading.active_count() == before and core() is None
