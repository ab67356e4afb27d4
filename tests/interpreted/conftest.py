"""Every test here runs in Triton's interpreter, repaired."""

from quire.kernels import triton_runtime

from ..support.triton_interpreter import repair_interpreter

if triton_runtime.INTERPRETED:
    repair_interpreter()
