"""A program that ends without closing its engine ends well: no thread of ours computes while the interpreter goes."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from quire import AsyncLLM

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
    done = subprocess.run(
        [sys.executable, "-c", START + program],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE)},  # the same compiler: its path names the kernels
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr and "terminate" not in done.stderr


def test_an_engine_that_nobody_holds_is_freed() -> None:
    before = threading.active_count()
    llm = AsyncLLM(num_threads=1, max_model_len=64, kv_cache_memory_bytes=1 << 22, async_depth=2)
    core = weakref.ref(llm.engine.core)
    assert threading.active_count() == before + 2
    del llm
    gc.collect()
    assert threading.active_count() == before and core() is None
