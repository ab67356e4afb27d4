"""Compiles what is launched for a GPU that is not there, in a process whose kernels are not interpreted.

Triton gets a driver that stands for the GPU's: it specializes and compiles what is launched as it does on a GPU, each
specialization once, and the launch itself does nothing. Tensors need no storage (device "meta"). Kernels that are known
to compile (`known_kernels.py`) are launched, but not compiled.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from .known_kernels import key_of, known

COMPILE = triton.compiler.compile


@dataclass(frozen=True)
class Made:
    """A kernel that was compiled, "hopper." before its name if it is in Gluon. `constants` by name, with arguments that
    are None or 1; `signature`: types by name; `options`: num_stages and whatever else a launch has."""

    name: str
    constants: dict[str, Any]
    signature: dict[str, str]
    options: dict[str, Any]
    shared: int
    files: dict[str, str]

    @property
    def ptx(self) -> str:
        """The kernel's text in PTX."""
        return self.file("ptx").read_text()

    @property
    def stack(self) -> int:
        """Bytes of a thread's stack: 0 where no register was spilled."""
        (found,) = [word for word in self._dump("--dump-resource-usage").split() if word.startswith("STACK:")]
        return int(found.removeprefix("STACK:"))

    @property
    def waits(self) -> float:
        """Waits for Hopper's products, of each: 1 where ptxas does not see that they may run beside other work."""
        if "wgmma" not in self.ptx:
            return 0.0
        sass = self._dump("-sass")
        return sass.count("WARPGROUP.DEPBAR") / max(1, len(re.findall("[HIQ]GMMA\\.", sass)))

    @property
    def byte_loads(self) -> int:
        """Number of loads of single bytes from shared memory."""
        return self._dump("-sass").count("LDS.U8")

    @property
    def loads_ahead(self) -> int:
        """Most loads of 16 bytes from memory that run one after the other without a barrier or another wait."""
        parts = re.split(r"BAR\.SYNC|ACQBULK", self._dump("-sass"))
        return max(len(re.findall(r"LDG\.\S*\b128\b", part)) for part in parts)

    def _dump(self, what: str) -> str:
        command = [triton.knobs.nvidia.cuobjdump.path, what, self.file("cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def file(self, kind: str) -> Path:
        """Return the path of a compiled file ("ptx", "cubin", ...) of the kernel in Triton's cache."""
        return next(Path(path) for name, path in self.files.items() if name.endswith("." + kind))


class Known:
    """A kernel that is known to compile, as Triton launches it."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        """Nothing."""

    def run(self, *_: Any) -> None:
        """Launches nothing."""


class AbsentGpu:
    """A Triton driver without a GPU. Prints a line for each kernel, and calls `check` with each that it compiles.

    After the line of a compiled kernel comes another with its hash.

    `capability` (90: Hopper) and `room`, bytes of shared memory of a program, can be changed at any time: whatever is
    launched then is seen anew. Programs must fit into the room; those in Gluon, which are for Hopper alone, into
    Hopper's, next to none of their registers may be spilled, and their products must run beside other work.
    """

    HOPPER = 227 << 10

    def __init__(self, check: Callable[[Made], None] = lambda made: None, room: int = HOPPER) -> None:
        self.check, self.room, self.capability = check, room, 90
        self.known = known(Path(sys._getframe(1).f_code.co_filename).stem)  # of the module that makes this
        triton.runtime.driver.set_active(self)
        triton.knobs.compilation.listener = self.listen
        triton.compiler.compile = self.compile

    def compile(self, src: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
        """Called by Triton for each specialization of a kernel."""
        key = key_of(src, target, options)
        if key in self.known:
            print("compiled", name_of(src.fn))
            return Known()
        made = COMPILE(src, target=target, options=options)
        print("kernel", key)
        return made

    def listen(self, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
        """Called by Triton with everything that is compiled, or found in its cache."""
        names, in_gluon = src.fn.arg_names, src.fn.is_gluon()
        constants = {names[path[0]]: value for path, value in src.constants.items()}
        made = Made(
            name_of(src.fn),
            constants,
            src.signature,
            metadata,
            metadata["shared"],
            metadata_group,
        )
        print("compiled", made.name)
        assert made.shared <= (self.HOPPER if in_gluon else self.room), made
        spilled = 24 if constants.get("DIVIDED") else 0  # numbers that are read once in a part of a context
        assert not in_gluon or (made.stack <= spilled and made.waits < 0.5), (made.stack, made.waits, made)
        self.check(made)

    def describe_to(self, *modules: ModuleType) -> None:
        """Let modules find this GPU where they ask PyTorch for the sizes of one."""
        for module in modules:
            for name, answer in (("multiprocessors", lambda: 132), ("shared_memory", lambda: self.room)):
                if hasattr(module, name):
                    setattr(module, name, answer)

    class utils:
        """No limits but that of `room`."""

        @staticmethod
        def load_binary(name, kernel, shared, device):
            """No spilled registers."""
            return object(), object(), 0, 0, 1024

        @staticmethod
        def get_device_properties(device):
            """Return as much shared memory as any GPU has."""
            return {"max_shared_mem": AbsentGpu.HOPPER}

    class launcher_cls:
        """Launches nothing."""

        def __init__(self, source, metadata):
            self.launch = None

        def __call__(self, *args):
            return None

    def get_current_device(self):
        """Devices do not share compiled kernels."""
        return self.capability, self.room

    def get_current_stream(self, device):
        """The only one."""
        return 0

    def get_current_target(self):
        """The GPU to compile for."""
        return GPUTarget("cuda", self.capability, 32)


def name_of(kernel: Any) -> str:
    """Return the name of a kernel, "hopper." before it if it is in Gluon."""
    return "hopper." * kernel.is_gluon() + str(kernel.__name__)
