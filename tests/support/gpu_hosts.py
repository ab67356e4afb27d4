"""Two hosts with GPUs, which are two programs on one machine: each sees some of its GPUs, and NCCL goes through sockets
on the loopback, because GPUs of several hosts share no memory."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.config.env import CLUSTER_KEY

APART = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    CLUSTER_KEY: "the key of these tests",
}
WAIT_SECONDS = 120
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def second_host(patch: pytest.MonkeyPatch, port: int, model: str, gpus: int) -> Iterator[None]:
    """Start the second host, with the second half of `gpus` GPUs. An engine of this process has the others.

    At its end the second host has ended because the engine has.
    """
    each = gpus // 2
    for name, value in (APART | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}).items():
        patch.setenv(name, value)
    patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(each))))
    own = ",".join(map(str, range(each, gpus)))
    words = ["-m", "quire", "serve", model, "--headless", "--nnodes", "2", "--node-rank", "1", "--device", "cuda"]
    with subprocess.Popen(
        [sys.executable, *words, "--master-port", str(port)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield
            out, _ = process.communicate(timeout=WAIT_SECONDS)
            assert process.returncode == 0 and "the engine has ended" in out, out
        finally:
            process.kill()
