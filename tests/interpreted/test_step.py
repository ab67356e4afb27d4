"""Kernels of steps, drafts and moved tokens compile for GPUs that are not there; other tests interpret them."""

from collections.abc import Callable


def test_compiles_for_hopper(compiled: Callable[[str], set[str]]) -> None:
    assert compiled("compile_step") == {
        "_apply_kernel",
        "_inputs_kernel",
        "_finish_kernel",
        "_keep_kernel",
        "_propose_kernel",
        "_move_kernel",
        "_deviation_kernel",
    }
