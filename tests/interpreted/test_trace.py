"""A trace ends at the Triton kernels, here those of the interpreter."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterator

import pytest
import torch

from quire import LLM
from quire.kernels import triton_runtime
from quire.kernels.norm import triton as norm
from quire.observe.calls import Span
from quire.traces.trace import recording
from quire.worker.runner import StepRunner

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from .test_cuda_worker import PLANS, cuda_runner  # noqa: F401  (a fixture)


def names(span: Span) -> Iterator[str]:
    yield span.name
    for inner in span.inside:
        yield from names(inner)


def test_a_step_of_a_gpus_runner(cuda_runner: Callable[..., StepRunner]) -> None:  # noqa: F811
    worker = cuda_runner()
    with LLM(async_depth=1, num_threads=1, kv_cache_memory_bytes=1 << 22, use_tqdm_on_load=False) as llm:
        llm.engine.runner, llm.engine.kernels = worker, worker.model.kernels
        with recording(llm) as root:
            worker.submit(PLANS[0])
            worker.collect()
    called = list(names(root))
    way = [
        "StepRunner.submit",
        "DeviceState.apply",
        "step.triton.apply_runs",
        "_apply_kernel",
        "step.triton.build_inputs",
        "_inputs_kernel",
        "layers.stack.run_layers",
        "layers.0",
        "layers.0.attention",
        "norm.triton.rms_norm",
        "_norm_kernel",
        "layers.1",
        "step.triton.finish_step",
        "_finish_kernel",
        "StepRunner.collect",
    ]
    at = [called.index(name) for name in way]
    assert at == sorted(at), called


def test_a_kernel_is_a_stop_under_its_own_name() -> None:
    with LLM(async_depth=1, num_threads=1, kv_cache_memory_bytes=1 << 22, use_tqdm_on_load=False) as llm:
        with recording(llm) as root:
            norm.rms_norm(torch.ones(3, 64), torch.ones(64), 1e-5)
        (kernel,) = root.inside
        norm.rms_norm(torch.ones(3, 64), torch.ones(64), 1e-5)
        assert kernel.name == "_norm_kernel" and kernel.where.startswith("kernels/norm/triton.py:")
        assert "f32[3,64], f32[64]" in kernel.takes and root.inside == [kernel]
