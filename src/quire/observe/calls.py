"""Recorded calls: a tree of the functions that ran, with their files, shapes and times. `quire trace` shows such trees.

The engine knows nothing of traces. During a trace, functions of live objects and modules are replaced by wrappers that
also note begin, end and shapes; afterwards all functions are put back. Runs without PyTorch.
"""

import inspect
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from quire.contracts.step import CopyJob, FinishedCopy

PACKAGE = Path(__file__).parents[1]
WORK = re.compile(r"quire\.(kernels\.(?!native\.)\w+\.\w+|(layers|worker)\.\w+)")  # modules whose functions are work
PRODUCT = re.compile(r"run(_adapted|_add|_float|(_norm)?(_gated)?)")  # functions of a kernel that multiply weights

NATIVE = re.compile(r"\w+ (\w+)\(")  # a line that begins a C function
RANK = re.compile(r"rank (\d+)\b")  # the name of a span that holds the calls of a rank in a step

Stop = tuple[Any, str, str]  # owner, attribute, and name of a function to record
Began = Callable[[list["Span"], Any, tuple[Any, ...], dict[str, Any]], None]


@dataclass(eq=False)
class Span:
    """A function call in a trace of a step (`quire trace`).

    where          "file:line" of the function
    takes, gives   dtypes and shapes of the arguments and of the result, as text
    way            of a product of quantized weights: where it dequantizes and quantizes, and where that is decided
    decided        what decided the call or its numbers, the reason, "file:line" of the function; "" if nothing is told
    phase          in the call that runs an engine step: its number, kind and tokens, as text; "" in other calls
    begin, end     in nanoseconds of a clock that all processes of a machine share
    inside         calls that this call made
    again          of a folded trace: the calls inside were shown before, in a call that is `alike`
    joined         of a folded trace: number of calls that this span stands for, as `name` says; 0: it is a call itself
    """

    name: str
    where: str
    takes: str = ""
    gives: str = ""
    way: str = ""
    decided: str = ""
    phase: str = ""
    begin: int = 0
    end: int = 0
    inside: list["Span"] = field(default_factory=list)
    again: bool = False
    joined: int = 0

    @property
    def seconds(self) -> float:
        """Time between begin and end."""
        return (self.end - self.begin) / 1e9


Shown = set[tuple[str, object]]  # calls that were shown, each with the rank


@runtime_checkable
class Traced(Protocol):
    """A record that says in words what a trace shows of it."""

    def traced(self) -> str:
        """Return a few words: the numbers that matter."""


def put(undo: ExitStack, owner: Any, name: str, value: object) -> None:
    """Set the attribute `name` of `owner` until `undo` closes."""
    had = vars(owner)
    undo.callback(*((setattr, owner, name, had[name]) if name in had else (delattr, owner, name)))
    setattr(owner, name, value)


class CallRecorder:
    """Context manager that records all calls of given functions, by any thread or task, in the `Span` `root`.

    stops   functions to record, as (owner, attribute, name). The span of a coroutine has the time that it waits, too
    wait    called after each recorded call, before its end is noted; such as torch.cuda.synchronize
    told    called after each recorded call, with its result and the calls that have not ended yet, outermost first
    began   called before each recorded call, with the calls that have not ended, itself the last one, with its
            function and the arguments
    line    returns a key of what runs now: calls with one key lie in each other
    """

    def __init__(
        self,
        stops: Iterable[Stop],
        wait: Callable[[], None] = lambda: None,
        told: Callable[[Any, list[Span]], None] = lambda result, open_ones: None,
        began: Began = lambda open_ones, function, args, kwargs: None,
        line: Callable[[], object] = threading.get_ident,
    ) -> None:
        self.root, self._stops, self._wait, self._told = Span("", ""), stops, wait, told
        self._began, self._line = began, line
        self._stacks: dict[object, list[Span]] = {}
        self._undo = ExitStack()

    def __enter__(self) -> "CallRecorder":
        try:
            for owner, attribute, name in {stop[:2]: stop for stop in self._stops}.values():
                self.put(owner, attribute, self._recorded(getattr(owner, attribute), name))
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.close()

    def put(self, owner: Any, name: str, value: object) -> None:
        """Set the attribute `name` of `owner`; the end of the recording restores it."""
        put(self._undo, owner, name, value)

    def at_end(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the recording ends."""
        self._undo.callback(undo)

    def _recorded(self, function: Any, name: str) -> Any:
        place, told_way = place_of(function) if name else "", _way(function)

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Span, list[Span]]:
            span = Span(
                name or args[0].fn.__name__,
                place or place_of(args[0].fn),
                words(lambda: ", ".join(shapes((args, kwargs)))),
                way=words(lambda: told_way(*args, **kwargs)),
            )
            stack = self._stacks.setdefault(self._line(), [self.root])
            stack[-1].inside.append(span)
            stack.append(span)
            self._began(stack, function, args, kwargs)
            span.begin = time.perf_counter_ns()
            return span, stack

        def end(span: Span, stack: list[Span]) -> None:
            span.end = time.perf_counter_ns()
            stack.pop()

        def tell(span: Span, stack: list[Span], result: Any) -> None:
            span.gives = words(lambda: ", ".join(shapes(result)))
            self._told(result, stack)

        def call(*args: Any, **kwargs: Any) -> Any:
            span, stack = begin(args, kwargs)
            try:
                result = function(*args, **kwargs)
                self._wait()
            finally:
                end(span, stack)
            tell(span, stack, result)
            return result

        async def wait_for(*args: Any, **kwargs: Any) -> Any:
            span, stack = begin(args, kwargs)
            try:
                result = await function(*args, **kwargs)
            finally:
                end(span, stack)
            tell(span, stack, result)
            return result

        return wait_for if inspect.iscoroutinefunction(function) else call


def alike(span: Span) -> tuple[object, ...]:
    """Return a key that is equal for calls which differ only in times, layer or step.

    Calls inside a kernel count as a set: their number and order do not matter.
    """
    kernel = span.where.startswith("kernels/")
    inside = frozenset(one.name for one in span.inside) if kernel else tuple(map(alike, span.inside))
    return re.sub(r"\.\d+", "", span.name), span.takes, span.gives, span.way, span.phase.partition(":")[2], inside


def fold(span: Span, shown: Shown, rank: str = "") -> Span:
    """Return a shorter tree of a call: successive calls that are `alike` are one span behind the first of them.

    shown   calls that are in a tree already: the calls inside one that is `alike` are left out. `fold` adds to it
    rank    name of the call that holds the calls of a rank; "" outside ranks
    """
    rank = span.name if RANK.match(span.name) else rank
    if span.inside and (rank, alike(span)) in shown:
        return replace(span, inside=[], again=True, way="")
    inside = list[Span]()
    for _, calls in groupby(span.inside, key=alike):
        first, *others = calls
        inside.append(fold(first, shown, rank))
        if others:
            ends = dict.fromkeys(call.phase.partition(":")[0] or call.name for call in (others[0], others[-1]))
            words = f"{' to '.join(ends)}: the same stops, {len(others)} in all"
            begin = others[0].begin
            end = begin + sum(one.end - one.begin for one in others)
            inside.append(Span(words, "", begin=begin, end=end, joined=len(others)))
    shown.add((rank, alike(span)))
    return replace(span, inside=inside)


def methods_of(named: Iterable[tuple[str, Any]]) -> Iterator[Stop]:
    """Yield (object, method, label) for each public method of the `named` objects, for `CallRecorder`.

    The label is "name.method", or "name" for the method `forward`. Methods from outside Quire are left out.
    """
    for name, part in named:
        for kind in () if is_dataclass(part) else type(part).__mro__:
            for method, value in vars(kind).items() if kind.__module__.startswith("quire.") else ():
                if isinstance(value, FunctionType) and not method.startswith("_"):
                    yield part, method, name if method == "forward" else f"{name}.{method}"


def _way(function: Any) -> Callable[..., str]:
    """Return a function of the same arguments: the way of a product, see `Span`. "" for any other function.

    The module of a kernel that runs quantized weights has a function `way`, see `quire.kernels.linear`.
    """
    module = sys.modules[function.__module__] if isinstance(function, FunctionType) else None
    way = vars(module).get("way") if module and WORK.fullmatch(module.__name__) else None
    if way is None or not PRODUCT.fullmatch(function.__name__):
        return lambda *args, **kwargs: ""
    signature, place = inspect.signature(function), place_of(way)

    def told(*args: Any, **kwargs: Any) -> str:
        given = signature.bind(*args, **kwargs).arguments
        text = way(given["x"], given["packed"])
        return text and f"{text} ({place})"

    return told


def place_of(function: Any) -> str:
    """Return "file:line" of a Python function or of a C function of the package; "" when it is not found."""
    function = inspect.unwrap(function)
    if inspect.isroutine(function):
        path, line = Path(function.__code__.co_filename), function.__code__.co_firstlineno  # type: ignore[union-attr]
        return f"{path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path.name}:{line}"
    return _native_places().get(function.__name__, "")


@cache
def _native_places() -> dict[str, str]:
    """Return name -> "file:line" of the C functions of the package. A trace inside a server holds up its requests."""
    found: dict[str, str] = {}
    for path in PACKAGE.glob("kernels/*/*.c"):
        for line, text in enumerate(path.read_text().splitlines(), 1):
            if head := NATIVE.match(text):
                found.setdefault(head[1], f"{path.relative_to(PACKAGE)}:{line}")
    return found


def shapes(value: Any, deep: bool = True) -> Iterator[str]:
    """Yield types and shapes of the arrays in a value, with the field names of records that hold arrays."""
    if isinstance(value, np.ndarray) or _is_tensor(value):
        short = re.sub(r"(float|u?int)(?=\d)", lambda kind: kind[0][0], str(value.dtype).removeprefix("torch."))
        yield f"{short}{list(value.shape)}".replace(" ", "")
    elif isinstance(value, Traced):
        yield value.traced()
    elif isinstance(value, CopyJob):
        yield f"{len(value.keys)} blocks {value.source} to {value.target}"
    elif isinstance(value, FinishedCopy):
        yield f"job of {value.num_bytes} bytes done, {len(value.failed)} blocks failed"
    elif isinstance(value, list) and value and isinstance(value[0], int):
        yield f"ints[{len(value)}]"
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from shapes(item, deep)
    elif deep and (is_dataclass(value) or isinstance(value, msgspec.Struct)):
        names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else type(value).__dataclass_fields__
        inside = [f"{name} {shape}" for name in names for shape in shapes(getattr(value, name), False)]
        if inside:
            yield f"{type(value).__name__}({', '.join(inside)})"


def words(describe: Callable[[], str]) -> str:
    """Return a description, or the error that it raises: a call must not fail because nobody can describe it."""
    try:
        return describe()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _is_tensor(value: object) -> bool:
    """True for a tensor. PyTorch is not imported for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
