"""Programs that tests of this folder run in a process of their own: `python -m tests.gpu.children NAME ARGUMENTS...`.

They import Quire and PyTorch late, inside: some change the process before. In functions, so that types are checked.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch


class Parent:
    """The test that started this process: it reads and writes lines. Other output goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def tell(self, value: Any) -> None:
        """Write a line of JSON."""
        print(json.dumps(value), file=self._answers, flush=True)

    def hear(self) -> str:
        """Return the next line; "" when the test is over."""
        return sys.stdin.readline().strip()


def hold(num_bytes: str) -> None:
    """Hold so much memory of the GPU until a line comes."""
    parent = Parent()
    import torch

    held = torch.empty(int(num_bytes), dtype=torch.uint8, device="cuda")
    parent.tell(held.numel())
    parent.hear()


def own_memory() -> None:
    """Tell two handles of this process's memory of the GPU, with the offsets in it; keep it until a line comes."""
    parent = Parent()
    import torch

    from quire.kernels.ipc import CudaIpc

    device = torch.device("cuda", 0)
    torch.zeros(3 << 20, dtype=torch.uint8, device=device)
    rest = torch.zeros((5, 1 << 10), dtype=torch.uint8, device=device)  # shares an allocation of the driver with others
    pages = torch.arange(6 << 20, device=device).remainder(251).to(torch.uint8)
    torch.cuda.synchronize()
    ipc = CudaIpc(device)
    parent.tell([[handle.hex(), offset] for handle, offset in map(ipc.export, (pages, rest))])
    parent.hear()


def own_blocks(place: str) -> None:
    """Share the KV blocks of an engine at an address. Tell its tokens and keys. At a line the engine forgets them."""
    parent = Parent()
    from quire.config.bundled import bundled_model
    from quire.engine.replicas import flush

    from ..support.engines import store_of
    from .test_engine import make
    from .test_ipc import PROMPTS, SMALL, params

    with make(bundled_model(), **SMALL, kv_share=place) as llm:
        tokens = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params(), use_tqdm=False)]
        flush(llm.engine.core)
        parent.tell([tokens, [key.hex() for key in store_of(llm)._pool._index]])
        while parent.hear():
            llm.reset_prefix_cache()
            parent.tell(True)


def fail_on_the_device(options: str) -> None:
    """Let a kernel's assertion fail in a step. Print the first line of the error of two calls, then "closed"."""
    import torch

    from quire import LLM, SamplingParams
    from quire.contracts.errors import EngineDead
    from quire.contracts.step import StepPlan

    llm = LLM(**json.loads(options))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm.generate(["One"], params, use_tqdm=False)
    worker = llm.engine.worker
    submit = worker.submit

    def strike(plan: StepPlan) -> None:
        submit(plan)
        torch._assert_async(torch.zeros(1, device="cuda"))

    with patch.object(worker, "submit", strike):
        for _ in range(2):
            try:
                llm.generate(["Two", "Three"], params, use_tqdm=False)
            except EngineDead as error:
                print("dead:", str(error).splitlines()[0], flush=True)
    llm.close()
    print("closed", flush=True)


def answer(options: str, prompts: str, old: str) -> None:
    """Print the tokens, notes and kernels of an engine as JSON. old: "true": the GPU seems too old for Triton."""
    import torch

    with contextlib.ExitStack() as stack:
        if json.loads(old):
            stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda device=None: (7, 5)))
        from quire import LLM, SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        llm = stack.enter_context(LLM(**json.loads(options)))
        outputs = llm.generate(json.loads(prompts), params, use_tqdm=False)
        found = {
            "tokens": [list(one.outputs[0].token_ids) for one in outputs],
            "notes": llm.engine.notes,
            "kernels": [str(choice) for choice in llm.engine.kernels.choices],
        }
        print(json.dumps(found))


def profiled(options: str) -> None:
    """Print what a profile of 30 steps of an engine has, as JSON, and leave without the interpreter's end.

    The driver's profiler stays in its process, and that end sometimes aborts then.
    """
    import msgspec

    from quire import LLM, SamplingParams
    from quire.procs.step_profile import StepProfiled

    from ..unit.procs.test_step_profile import asking, new, served

    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    with LLM(**json.loads(options)) as llm:
        counts, texts = llm.engine.worker.recorder.counts, []
        texts.append(llm.generate("Once", greedy, use_tqdm=False)[0].outputs[0].text)
        replayed = counts.get("replayed", 0)
        reply, tokens = served(llm.engine.core, asking(30), new(40))
        replayed = counts.get("replayed", 0) - replayed
        texts.append(llm.generate("Once", greedy, use_tqdm=False)[0].outputs[0].text)
        assert reply.error is None, reply.error
        found = msgspec.json.decode(str(reply.value), type=StepProfiled)
        said = {"profile": msgspec.to_builtins(found), "tokens": tokens, "replayed": replayed, "texts": texts}
        print(json.dumps(said), flush=True)
    os._exit(0)


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program for program in (hold, own_memory, own_blocks, fail_on_the_device, answer, profiled)
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    PROGRAMS[name](*arguments)
