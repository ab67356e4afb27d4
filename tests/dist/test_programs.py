"""Programs with engines of two processes: however they are written and however they end, they end well.

A script has no `__main__` guard: ranks do not import the program that starts them.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.config.bundled import bundled_model

from ..support import template_process
from ..support.many_ranks import WAIT_SECONDS, Left, until
from ..support.template_process import SWITCH

START = """
import asyncio, os, sys, threading
from quire import LLM, AsyncLLM, SamplingParams
options = dict(device="cpu", dtype="float32", num_threads=1, max_model_len=1024, use_tqdm_on_load=False,
               kv_cache_memory_bytes=16 << 20)
short, long = SamplingParams(max_tokens=8, temperature=0), SamplingParams(max_tokens=1000, ignore_eos=True)
one = [int(word) for word in os.environ["ONE_RANK"].split()]
def answer(llm):
    return llm.generate("The json module", short, use_tqdm=False)[0].outputs[0].token_ids
def make():
    return LLM(**options, tensor_parallel_size=2)
"""
PROGRAMS = {
    "not closed": "llm = make(); print(answer(llm) == one)",
    "an exit in a stream": """
llm = make()
print(answer(llm) == one)
for _ in llm.stream("x", long):
    sys.exit(0)
""",
    "a thread, two at once, one after the other": """
found = []
def work():
    llm = make()
    found.append(answer(llm))
    del llm
thread = threading.Thread(target=work)
thread.start()
with LLM(**options, pipeline_parallel_size=2) as second:
    print(answer(second) == one)
    thread.join()
    print(found == [one])
    first = make()
    print(answer(second) == answer(first) == one)
print(answer(first) == one)
first.close()
""",
    "AsyncLLM, not closed": """
async def main():
    llm = AsyncLLM(**options, tensor_parallel_size=2)
    async def one_of(prompt):
        async for out in llm.generate(prompt, short):
            last = out
        return last.outputs[0].token_ids
    left = llm.generate("x", long)
    await anext(left)
    await left.aclose()
    print(await asyncio.gather(*[one_of("The json module") for _ in range(3)]) == [one] * 3)
    stream = llm.generate("hi", long)
    await anext(stream)
    return llm
kept = asyncio.run(main())
""",
}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """The answer of one rank, in the environment of the programs."""
    with (
        LLM(
            device="cpu",
            dtype="float32",
            num_threads=1,
            max_model_len=1024,
            use_tqdm_on_load=False,
            kv_cache_memory_bytes=16 << 20,
        ) as llm,
        pytest.MonkeyPatch.context() as patch,
    ):
        (out,) = llm.generate("The json module", SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
        patch.setenv("ONE_RANK", " ".join(map(str, out.outputs[0].token_ids)))
        yield


def started(left: Left, *command: str, folder: Path | None = None, real: bool = False) -> "subprocess.Popen[str]":
    """Start a program; `real`: it and its ranks start as a user's do, not as copies."""
    return template_process.start(
        command,
        env=os.environ | left.variables | ({SWITCH: "0"} if real else {}),
        cwd=folder or left.folder.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for the end of a program; return its exit code, output and errors."""
    with process:
        try:
            out, err = process.communicate(timeout=2 * WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_script(program: str, left: Left, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(START + PROGRAMS[program])
    command = ("-c", script.read_text()) if program == "not closed" else (str(script),)
    code, out, err = ended(started(left, *command, real=program == "not closed"))
    assert code == 0 and set(out.split()) == {"True"}, (out, err)
    assert "Traceback" not in err and "Exception ignored" not in err and "terminate" not in err, err


def test_a_working_folder_with_modules_of_the_same_names(left: Left, tmp_path: Path) -> None:
    folder, script = tmp_path / "work", tmp_path / "script.py"
    folder.mkdir()
    for name in ("torch", "msgspec", "quire"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported from the working folder')\n")
    script.write_text(START + PROGRAMS["not closed"])
    code, out, err = ended(started(left, str(script), folder=folder, real=True))
    assert (code, out) == (0, "True\n"), err


def test_ctrl_c_in_generate(left: Left, tmp_path: Path) -> None:
    """The ranks get no signal: the engine goes on, and ends with the program."""
    script = tmp_path / "script.py"
    script.write_text(
        START
        + """
llm = make()
print("ready", flush=True)
try:
    llm.generate(["x"] * 4, long, use_tqdm=False)
except KeyboardInterrupt:
    print(answer(llm) == one)
"""
    )
    process = started(left, str(script))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (0, "True\n"), err


@pytest.mark.parametrize("moment", ["the start of a rank", "generate"])
def test_ctrl_c_ends_a_script(moment: str, left: Left, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(START + "llm = make()\nprint('ready', flush=True)\nllm.generate('x', long, use_tqdm=False)\n")
    process = started(left, str(script))
    if moment == "generate":
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    else:
        until(lambda: len(left.ranks()) == 2, lambda: "no ranks")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code in (-signal.SIGINT, 1, 130) and "KeyboardInterrupt" in err, (code, err)


def test_the_benchmark(left: Left) -> None:
    flags = (
        str(bundled_model()),
        "--device",
        "cpu",
        "--num-threads",
        "1",
        "--max-model-len",
        "64",
        "--max-len",
        "8",
        "--kv-cache-memory-bytes",
        "16M",
        "--repeat",
        "1",
        "--json",
    )
    code, out, err = ended(started(left, "-m", "quire", "bench", "latency", "-tp", "2", *flags))
    assert code == 0 and json.loads(out)["runs"][0]["output_tokens"] == 8, err
    assert "Traceback" not in err
