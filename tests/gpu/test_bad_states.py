"""Bad states of a GPU as users see them: no room, a device that fails, engines that come and go, no kernels."""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.contracts.errors import ConfigError

from ..e2e.serving import PATIENCE, SOURCE, running_server, wait_until
from ..e2e.test_server_signals import FOREVER, start_streams
from ..support.gpu_memory import END_SECONDS, held_here, is_there
from . import children

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda"
SMALL: dict[str, Any] = {
    "device": DEVICE,
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "use_tqdm_on_load": False,
    "kv_cache_memory_bytes": 64 << 20,
}
PROMPTS = ["To create a new file you", "The module provides a", "def main("]
HUGE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 200_000, "hidden_size": 16_384,
    "intermediate_size": 65_536, "num_hidden_layers": 90, "num_attention_heads": 128, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def python(program: Callable[..., None], *args: str, **environment: str | None) -> "subprocess.CompletedProcess[str]":
    """Run a program of `children.py` in a process of its own; variables that are None are taken away."""
    env = {name: value for name, value in (dict(os.environ) | environment).items() if value is not None}
    path = os.pathsep.join([str(SOURCE), *filter(None, [env.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", children.__name__, program.__name__, *args],
        cwd=ROOT,
        env=env | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
    )


# --- no room ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.001},
            ("the weights need", "gpu_memory_utilization=0.001 allows", "are missing", "--gpu-memory-utilization 0.0"),
        ),
        (
            {"kv_cache_memory_bytes": 3 << 20, "max_model_len": 4096},
            ("max_model_len=4096 needs", "are missing", "--max-model-len", "kv_cache_memory_bytes"),
        ),
        (
            {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 10**8},
            ("num_gpu_blocks_override asks for", "are free", "lower it to"),
        ),
    ],
)
def test_what_does_not_fit_says_how_much_is_missing(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(**(SMALL | options))
    print(refused.value)
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)


def test_a_model_larger_than_the_gpu_is_refused_before_it_is_built(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUGE))
    gc.collect()  # the engines of tests before this one
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with pytest.raises(ConfigError, match="the weights need .* are missing. Try .*a smaller model") as refused:
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, device=DEVICE)
    print(refused.value)
    assert torch.cuda.max_memory_allocated() < before + (1 << 20)


# --- a device that fails ----------------------------------------------------------------------------------------------

# Python imports a module of this name when it starts. In the engine's process it waits for a file, then makes an
# assertion of a kernel fail: from then on every CUDA call of that process fails. Another such module is run, too.
HOOK = """
import importlib.machinery, importlib.util, os, sys, threading, time

def strike(trigger):
    with open(trigger + ".pid", "w") as file:
        file.write(str(os.getpid()))
    while not os.path.exists(trigger):
        time.sleep(0.001)
    import torch
    torch._assert_async(torch.zeros(1, device="cuda"))

here = os.path.dirname(os.path.abspath(__file__))
rest = [path for path in sys.path if os.path.abspath(path) != here]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
if spec is not None and spec.loader is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
if "quire.entry.core_process" in sys.orig_argv:
    threading.Thread(target=strike, args=(os.environ["FAULT_TRIGGER"],), daemon=True).start()
"""


def test_a_cuda_error_ends_the_engine_and_every_stream_hears_of_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    trigger = tmp_path / "now"
    path = os.pathsep.join([str(tmp_path), str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = (
        "--device",
        DEVICE,
        "--dtype",
        "float32",
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "512",
        "--kv-cache-memory-bytes",
        "1G",
    )
    with running_server(*flags, PYTHONPATH=path, FAULT_TRIGGER=str(trigger)) as server, ThreadPoolExecutor(16) as pool:
        engine = int(Path(f"{trigger}.pid").read_text())
        streams = start_streams(pool, server, 16, **FOREVER)
        assert server.ask("/health").status == 200
        trigger.touch()
        told = time.monotonic()
        messages = set()
        for stream in streams:
            error = stream.result().error()
            assert error is not None and error["code"] == "engine_dead", error
            messages.add(error["message"])
        print(messages, f"{time.monotonic() - told:.1f} s")
        assert time.monotonic() - told < END_SECONDS
        assert server.ask("/ready").status == server.ask("/health").status == 503
        assert server.ask("/live").status == 200 and server.complete().status == 503
        assert server.exit_code() == 1
        wait_until(lambda: not is_there(engine), "the end of the engine's process")
        assert "The engine died" in server.stderr


def test_a_cuda_error_is_final_for_an_llm_and_its_process_ends() -> None:
    """The driver's libraries may change the exit code while the process ends, so it is not compared."""
    done = python(children.fail_on_the_device, json.dumps(SMALL))
    print(done.returncode, done.stdout, done.stderr[-2000:])
    first, second, *_ = done.stdout.splitlines()
    assert first == second and first.startswith("dead: the engine stopped: the step failed: ") and "CUDA" in first


# --- engines that come and go -----------------------------------------------------------------------------------------


def test_twenty_engines_leave_the_memory_as_it_was(device: torch.device) -> None:
    """The memory of this process, as the driver counts it (contexts, graphs and kernels, too), and of its tensors."""
    gc.collect()  # the engines of tests before this one
    torch.cuda.empty_cache()
    taken, held = [], []
    for _ in range(20):
        llm = LLM(**SMALL)
        answers(llm)
        llm.close()
        taken.append(held_here() >> 20)
        held.append(torch.cuda.memory_allocated(device) >> 20)
    print("taken MiB:", taken, "held MiB:", held)
    assert max(taken[1:]) - min(taken[1:]) <= 8 and max(held[1:]) - min(held[1:]) <= 1
    assert held[-1] < 100, "an engine that was closed keeps its cache or its weights"


# --- no kernels -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The answers of the kernels that are there."""
    with LLM(**SMALL) as llm:
        return answers(llm)


@pytest.mark.parametrize("old, reason", [(False, "C compiler"), (True, "compute capability")])
def test_without_triton_slower_kernels_answer_the_same(
    old: bool, reason: str, expected: list[list[int]], tmp_path: Path
) -> None:
    without: dict[str, Any] = {} if old else {"PATH": str(tmp_path), "CC": None}
    done = python(children.answer, *map(json.dumps, (SMALL, PROMPTS, old)), **without)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found["notes"], found["kernels"])
    assert found["tokens"] == expected
    assert any(reason in note for note in found["notes"]), found["notes"]
    attention = next(choice for choice in found["kernels"] if choice.startswith("attention: "))
    assert not attention.startswith("attention: triton") and reason in attention
