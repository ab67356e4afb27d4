"""Compiles what the sampler launches for GPUs that are not there: the driver is a stand-in, in a process of its own."""

import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget

from quire.worker.gpu_sampler import GpuSampler, Mode


class Driver:
    """What Triton asks of a driver; launches do nothing."""

    capability = 90

    class utils:
        """No limits."""

        @staticmethod
        def load_binary(name, kernel, shared, device):
            """No spilled registers."""
            return object(), object(), 0, 0, 1024

        @staticmethod
        def get_device_properties(device):
            """Shared memory of sm_80."""
            return {"max_shared_mem": 163 << 10}

    class launcher_cls:
        """Launches nothing."""

        def __init__(self, source, metadata):
            self.launch = None

        def __call__(self, *args):
            return None

    def get_current_device(self):
        """Devices do not share compiled kernels: one for each capability."""
        return self.capability

    def get_current_stream(self, device):
        """The only one."""
        return 0

    def get_current_target(self):
        """The GPU to compile for."""
        return GPUTarget("cuda", self.capability, 32)


def main() -> None:
    """A vocabulary whose rows are aligned and one whose rows are not, on either GPU."""
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    for capability, vocab, dtype in ((90, 151_936, torch.float32), (80, 50_257, torch.bfloat16)):
        driver.capability = capability
        slots = torch.zeros(2, dtype=torch.int64)
        sampler = GpuSampler(slots, slots, torch.zeros(3, 64, dtype=torch.int32), vocab_size=vocab)
        logits = torch.zeros(2, vocab, dtype=dtype)
        for mode in Mode if capability == 90 else (Mode.PLAIN, Mode.FULL):
            for rows in (1, 2):
                sampler.sample(logits[:rows], mode)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        main()
