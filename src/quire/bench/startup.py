"""Start-up benchmark: seconds from the start of a process to its first token, by phase, measured from outside."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.bench.workload import printable, resolve_target
from quire.contracts.errors import ConfigError, EngineDead, UserError

NUM_PROMPT = 8
# The child imports the same package as this process.
CHILD = "import sys; sys.path.insert(0, sys.argv[1]); from quire.bench.startup import child; child(sys.stdin.read())"


def measure_startup(options: dict[str, Any], repeat: int, on_run: Callable[[], None]) -> dict[str, Any]:
    """Start an engine in `repeat` processes, one after the other. Return each total, and the phases of the fastest.

    Times are in seconds, up to the first token. `on_run` is called after each run. Raises `ConfigError` with a child's
    user error, `EngineDead` with the last line that a failed child wrote.
    """
    name, given = resolve_target(options)
    runs = []
    for _ in range(repeat):
        runs.append(_start(given))
        on_run()
    best = min(runs, key=lambda run: float(run["total"]))
    return {"model": name, "engine_args": printable(options), "phases": best, "totals": [run["total"] for run in runs]}


def _start(options: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, "-c", CHILD, str(Path(__file__).resolve().parents[2])]
    pipe = subprocess.PIPE
    started = time.monotonic()  # since boot, the same clock in every process of Linux and macOS
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps({"options": options, "started": started}))  # not argv: it may hold a token
            process.stdin.close()
            line = process.stdout.readline()  # printed at the first token, so the child's exit is not measured
            total = time.monotonic() - started
        errors.seek(0)
        reason = (errors.read().strip().splitlines() or ["no output"])[-1]
    if process.returncode or not line:
        raise EngineDead(f"the measured process failed: {reason}")
    answer: dict[str, Any] = json.loads(line)
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    return answer | {"total": round(total, 3)}


def child(request: str) -> None:
    """Generate a token in the measured process; print the phases, or the error, as JSON. `request`: options as JSON."""
    task: dict[str, Any] = json.loads(request)
    phases = {"python": time.monotonic() - task["started"]}
    try:
        _first_token(task["options"], phases)
    except UserError as error:
        print(json.dumps({"refused": str(error)}))


def _first_token(options: dict[str, Any], phases: dict[str, float]) -> None:
    last = time.monotonic()
    from quire.contracts.sampling import SamplingParams
    from quire.entry.llm import LLM

    phases["import"] = time.monotonic() - last
    last = time.monotonic()
    with LLM(**({"use_tqdm_on_load": False} | options)) as llm:
        constructed = time.monotonic() - last
        phases |= llm.engine.phases
        phases["rest of construction"] = max(0.0, constructed - sum(llm.engine.phases.values()))
        last = time.monotonic()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate({"prompt_token_ids": list(range(1, NUM_PROMPT + 1))}, params, use_tqdm=False)
        phases["first token"] = time.monotonic() - last
        print(json.dumps({name: round(seconds, 3) for name, seconds in phases.items()}), flush=True)
