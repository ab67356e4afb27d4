"""Kernels in CUDA C++ on a CPU: the source compiled as C++, its PTX by functions of `cuda_threads.hpp`. Slow."""

import ctypes
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

THREADS = Path(__file__).with_name("cuda_threads.hpp")
VALUE = re.compile(r"%(\d+)|\b([a-z])\b")  # an operand, or a predicate of the `asm` itself
ENTRY = """
static const Args *given;
static void whole() { KERNEL(*given); }
extern "C" const char *launch(const Args *args, int x, int y, int size, int of_block, int bytes, int early,
                              void (*then)()) {
  given = args;
  for (int j = 0; j < y; j++)
    for (int i = 0; i < x; i += size) {
      first_block = {(unsigned)i, (unsigned)j, 0};
      if (*run(size, of_block, bytes, early, whole, then)) return fault;
    }
  return "";
}
"""


class EmulatedKernel:
    """A stand-in for `CudaKernel`, for a kernel with one parameter, a structure `Args`.

    early      see `cuda_threads.hpp`
    released   called when all threads of a cluster wait for earlier kernels; with `early` before they begin
    """

    def __init__(self, source: Path, defines: Mapping[str, int | str], name: str, folder: Path) -> None:
        macros = [f"-D{key}={value}" for key, value in defines.items()]
        command = ["g++", "-x", "c++", "-E", "-P", *macros, "-"]
        text = subprocess.run(command, input=source.read_text(), capture_output=True, text=True, check=True).stdout
        text = re.sub(r"extern __shared__ .*?char (\w+)\[\]", r"char *\1 = blocks[self->block].shared.data()", text)
        made, library = folder / "emulated.cpp", folder / "emulated.so"
        entry = ENTRY.replace("KERNEL", name)
        made.write_text(f'#include "{THREADS}"\n{_translated(text)}\n{entry}')
        options = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", *(["-mf16c"] if defines.get("HALF") else [])]
        subprocess.run(["g++", *options, *macros, "-o", library, made], check=True)
        self._launch: Any = ctypes.CDLL(str(library)).launch
        self._launch.restype = ctypes.c_char_p
        self.early = False
        self.released: Callable[[], object] = lambda: None

    def launch(
        self,
        grid: tuple[int, ...],
        block: tuple[int],
        args: Sequence[Any],
        *,
        shared_bytes: int,
        cluster: tuple[int] = (1,),
        pdl: bool,
    ) -> None:
        then = ctypes.CFUNCTYPE(None)(self.released)
        x, y = (*grid, 1)[:2]
        fault = self._launch(ctypes.byref(args[0]), x, y, *cluster, *block, shared_bytes, self.early, then)
        assert not fault, fault.decode()


def _translated(text: str) -> str:
    """Return a source with each `asm` as calls of functions, named as the instructions."""
    parts, at = [], 0
    for found in re.finditer(r"\basm\s*(volatile\s*)?\(", text):
        end = _closing(text, found.end())
        parts += [text[at : found.start()], _calls(text[found.end() : end])]
        at = end + 1
    return "".join([*parts, text[at:]])


def _closing(text: str, at: int) -> int:
    """Return the place of the bracket that closes the one before `at`."""
    depth = 1
    for one in re.finditer(r'"(\\.|[^"])*"|[()]', text[at:]):
        depth += {"(": 1, ")": -1}.get(one[0], 0)
        if not depth:
            return at + one.start()
    raise ValueError(text[at:])


def _calls(text: str) -> str:
    words = re.match(r'\s*("(\\.|[^"])*"\s*)+', text)
    assert words
    operands = list(_operands(text[words.end() :]))
    code = "".join(re.findall(r'"((?:\\.|[^"])*)"', words[0])).replace("\\n", " ")
    calls = [f"int {name} = 0;" for name in re.findall(r"\.reg \.pred (\w+);", code)]
    for line in filter(None, (one.strip("{} ") for one in re.sub(r"\.reg [^;]*;", "", code).split(";"))):
        name, _, rest = line.partition(" ")
        values = ", ".join(operands[int(number)] if number else own for number, own in VALUE.findall(rest))
        calls.append(f"{name.replace('::', '').replace('.', '_')}({values});")
    return "{" + " ".join(calls) + "}"


def _operands(text: str) -> Iterator[str]:
    """Yield the expressions of an `asm`'s operands."""
    at = 0
    while found := re.compile(r'"[=+]?[a-z]"\s*\(').search(text, at):
        at = _closing(text, found.end())
        yield text[found.end() : at]
