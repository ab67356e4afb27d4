"""Trace of a request from the entry point to the kernels: every call with its file, shapes and time.

The engine knows nothing of traces. During a trace, functions of live objects and modules are replaced by wrappers that
also note begin, end and shapes; afterwards all functions are put back.
"""

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass
from itertools import groupby
from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec
import numpy as np
import torch

from quire.engine.scheduler import InFlight
from quire.entry.llm import LLM
from quire.entry.prompts import PromptLike
from quire.kernels.native.library import library
from quire.kernels.triton_runtime import INTERPRETED, triton
from quire.procs.in_process import InProcessExecutor
from quire.text.sequence import SequenceText

PACKAGE = Path(__file__).parents[1]
WORK = re.compile(r"quire\.(kernels\.(?!native\.)\w+\.\w+|quantization\.pack\.\w+|(layers|worker)\.\w+)")
STEP = "LLM._step"


@dataclass(eq=False)
class Span:
    """A recorded call.

    takes, gives   shapes of arguments and result, in words
    phase          number, kind and tokens of the engine step, in the call that runs the step; "" in all others
    begin, end     nanoseconds
    """

    name: str
    where: str
    takes: str = ""
    gives: str = ""
    phase: str = ""
    begin: int = 0
    end: int = 0
    inside: list["Span"] = field(default_factory=list)

    def alike(self) -> tuple[object, ...]:
        """Return a key that is equal for calls which differ only in times, layer or step.

        Calls inside a kernel count as a set: their number and order do not matter.
        """
        kernel = self.where.startswith("kernels/")
        inside = frozenset(span.name for span in self.inside) if kernel else tuple(map(Span.alike, self.inside))
        return re.sub(r"\.\d+", "", self.name), self.takes, self.gives, self.phase.partition(":")[2], inside

    def render(self, shown: set[object] | None, depth: int = 0) -> Iterator[str]:
        """Yield the lines of a tree. Calls like the call before them are joined in a line.

        shown   keys (`alike`) of the calls shown so far; a further call with such a key gets one line; None = show all
        """
        indent, again = "  " * depth, shown is not None and self.inside and self.alike() in shown
        if self.phase:
            yield from ("", f"{' ' * 14}{indent}{self.phase}")
        shapes = f"  ({self.takes}){' -> ' * bool(self.gives)}{self.gives}" if self.takes or self.gives else ""
        yield f"{_ms(self)}  {indent}{self.name}  {self.where}{shapes}{'  (as before)' * bool(again)}".rstrip()
        for _, calls in groupby([] if again else self.inside, key=id if shown is None else Span.alike):
            first, *others = calls
            yield from first.render(shown, depth + 1)
            if others:
                ends = dict.fromkeys(call.phase.partition(":")[0] or call.name for call in (others[0], others[-1]))
                yield f"{_ms(*others)}  {indent}  {' to '.join(ends)}: the same stops, {len(others)} in all"
        if shown is not None:
            shown.add(self.alike())

    def events(self, origin: int, phase: str = "entry") -> Iterator[dict[str, object]]:
        """Yield events of the call and those inside, for Perfetto or chrome://tracing; `origin`: time 0."""
        phase = self.phase or phase
        told = {"function": self.name, "where": self.where, "takes": self.takes, "gives": self.gives}
        yield {"name": self.phase or self.name, "cat": phase, "ph": "X", "ts": (self.begin - origin) / 1e3,
               "dur": (self.end - self.begin) / 1e3, "pid": 1, "tid": 1, "args": told}  # fmt: skip
        for span in self.inside:
            yield from span.events(origin, phase)


def trace(llm: LLM, prompt: PromptLike, *, max_tokens: int = 4) -> Span:
    """Run a request and return its recorded calls. The engine has one step in flight and no CUDA graphs.

    The request first runs without a trace, to warm up. The prefix cache is emptied before each run. Nothing else
    may run in this process meanwhile. Puts back all functions that it has replaced, also after an error.
    """
    engine, params = llm.engine, llm.get_default_sampling_params().clone(max_tokens=max_tokens, ignore_eos=True)
    assert engine.core.facts.depth == 1, "steps in flight would be mixed up"
    cuda = engine.device.device == "cuda"
    llm.reset_prefix_cache()
    llm.generate(prompt, params, use_tqdm=False)
    llm.reset_prefix_cache()
    with recording(llm, torch.cuda.synchronize if cuda else lambda: None) as root:
        llm.generate(prompt, params, use_tqdm=False)
    root.begin, root.end = root.inside[0].begin, root.inside[0].end
    root.name = f"{engine.folder.name}, {engine.dtype.dtype} on {engine.device.device}; the host's time, " + (
        "which waits for the device after every stop; no graphs" if cuda else
        "without replay of recorded CPU steps")  # fmt: skip
    return root


@contextmanager
def recording(llm: LLM, wait: Callable[[], None] = lambda: None) -> Iterator[Span]:
    """Context manager: yield a root span and record calls inside the block below it. wait: called after each call."""
    root = Span("", "")
    stack, num_steps = [root], 0

    def recorded(function: Any, name: str) -> Any:
        place = _where(function) if name else ""

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_steps
            span = Span(name or args[0].fn.__name__, place or _where(args[0].fn), ", ".join(_shapes((args, kwargs))))
            stack[-1].inside.append(span)
            stack.append(span)
            span.begin = time.perf_counter_ns()
            try:
                result = function(*args, **kwargs)
                wait()
            finally:
                span.end = time.perf_counter_ns()
                stack.pop()
            span.gives = ", ".join(_shapes(result))
            if isinstance(result, InFlight):
                kind, count = "prefill" if result.num_prefills else "decode", int(result.plan.num_tokens.sum())
                step = next(span for span in stack if span.name == STEP)
                step.phase = f"step {num_steps}: {kind}, {count} token{'s' * (count > 1)}"
                num_steps += 1
            return result

        return call

    def put(owner: Any, name: str, value: object) -> None:
        had = vars(owner)
        undo.callback(*((setattr, owner, name, had[name]) if name in had else (delattr, owner, name)))
        setattr(owner, name, value)

    with ExitStack() as undo:
        for owner, attribute, name in {stop[:2]: stop for stop in _stops(llm)}.values():
            put(owner, attribute, recorded(getattr(owner, attribute), name))
        put(llm.engine.worker.programs, "on_hidden", lambda where, hidden: None)  # observers are not recorded
        yield root


def _stops(llm: LLM) -> Iterator[tuple[Any, str, str]]:
    """Yield (owner, attribute, name) of every function to record.

    The name is "" for launches of Triton kernels: the kernel is the first argument and has the name.
    """
    core, worker, kernels = llm.engine.core, llm.engine.worker, llm.engine.kernels
    executor = core.executor._runner if isinstance(core.executor, InProcessExecutor) else core.executor
    parts = [llm, llm._front, core, core.scheduler, core.scheduler.allocator, core._finisher, worker, worker.state,
             worker.programs, worker.sampler, worker.sampler.operations, worker.model.rotary]  # fmt: skip
    named = [*((type(part).__name__, part) for part in parts), (type(core.executor).__name__, executor),
             *worker.model.named_modules()]  # fmt: skip
    kinds = {kind for _, part in named for kind in type(part).__mro__ if kind.__module__.startswith("quire.")}
    for name, part in named:
        for kind in () if is_dataclass(part) else kinds & set(type(part).__mro__):
            for method, value in vars(kind).items():
                if isinstance(value, FunctionType) and not method.startswith("_"):
                    yield part, method, name if method == "forward" else f"{name}.{method}"
    yield llm, "_step", STEP
    yield SequenceText, "push", "SequenceText.push"
    if isinstance(core.executor, InProcessExecutor):
        yield core.executor._runner, "_run", "StepRunner.run"
    modules = {sys.modules[kind.__module__] for kind in kinds} | set(filter(inspect.ismodule, vars(kernels).values()))
    modules.add(worker.programs.operations)
    modules |= {value for module in modules for value in vars(module).values()
                if inspect.ismodule(value) and WORK.fullmatch(value.__name__)}  # fmt: skip
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, FunctionType) and WORK.fullmatch(value.__module__) and not name.startswith("_"):
                yield module, name, f"{re.sub(r'^quire.(kernels.)?', '', value.__module__)}.{name}"
    if any(choice.name == "native" for choice in kernels.choices):
        yield from ((library(), name, name) for name in vars(library()) if name.startswith("quire_"))
    if triton is not None:
        run = triton.runtime
        yield run.interpreter.InterpretedFunction if INTERPRETED else run.jit.JITFunction, "run", ""


def _where(function: Any) -> str:
    """Return "file:line" of a Python function or of a C function of the package; "" when it is not found."""
    function = inspect.unwrap(function)
    if inspect.isroutine(function):
        path, line = Path(function.__code__.co_filename), function.__code__.co_firstlineno
        return f"{path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path.name}:{line}"
    for path in PACKAGE.glob("kernels/*/*.c"):
        for line, text in enumerate(path.read_text().splitlines(), 1):
            if re.match(rf"\w+ {function.__name__}\(", text):
                return f"{path.relative_to(PACKAGE)}:{line}"
    return ""


def _shapes(value: Any, deep: bool = True) -> Iterator[str]:
    """Yield types and shapes of the arrays in a value, with the field names of records that hold arrays."""
    if isinstance(value, torch.Tensor | np.ndarray):
        short = re.sub(r"(float|u?int)(?=\d)", lambda kind: kind[0][0], str(value.dtype).removeprefix("torch."))
        yield f"{short}{list(value.shape)}".replace(" ", "")
    elif isinstance(value, list) and value and isinstance(value[0], int):
        yield f"ints[{len(value)}]"
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _shapes(item, deep)
    elif deep and (is_dataclass(value) or isinstance(value, msgspec.Struct)):
        names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else type(value).__dataclass_fields__
        inside = [f"{name} {shape}" for name in names for shape in _shapes(getattr(value, name), False)]
        if inside:
            yield f"{type(value).__name__}({', '.join(inside)})"


def _ms(*spans: Span) -> str:
    return f"{sum(span.end - span.begin for span in spans) / 1e6:9.3f} ms"
