"""Step mode of a trace: `quire trace --step` halts at each stop of a request, as a debugger would.

A halt shows the stop's file, its name in vLLM, what decided it, and its tensors by name. Commands come from a terminal,
from a file or from standard input; `step_words.py` has them.
"""

import inspect
import re
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.contracts.errors import QuireError
from quire.contracts.step import StepPlan
from quire.engine.core import EngineCore
from quire.engine.plan_writer import InFlight
from quire.entry.llm import LLM
from quire.layers.context import StepContext
from quire.observe.calls import Span, shapes, words
from quire.traces.decisions import decisions_of
from quire.traces.step_words import HELP, VLLM, StopNames, is_comment, matches, read_command

MOST_LINES, MOST_DEPTH = 12, 3  # tensors of a halt; records in records
MOST_NUMBERS, MOST_COPIED = 1 << 24, 1 << 16  # of a tensor whose norm is shown, and that is copied for its first ones
FIRST, FIRST_OF_ONE = 4, 32  # numbers of a tensor at a halt, and of one that `p` prints
MOST_ROWS, FIRST_OF_ROW = 16, 8  # rows of a matrix that `p` prints, and numbers of each
BEST = 5  # tokens of logits
OUTER = 2  # open calls in the outermost one: the root, and `LLM.generate`

Commands = Callable[[], str | None]  # returns the next command; None: there are no more


class Left(BaseException):
    """The user has left step mode in the middle of a request. Nobody on the way may take it for a failed step."""


class Stepper:
    """Halts at stops of a request.

    names      stops that the request can come to
    commands   source of commands
    say        prints a line
    unmet      names of `b` that the request has not come to
    """

    def __init__(self, llm: LLM, names: StopNames, commands: Commands, say: Callable[[str], None]) -> None:
        self._llm, self._names, self._commands, self._say = llm, names, commands, say
        self.unmet = dict[str, None]()
        self._decisions = decisions_of(msgspec.json.decode(str(llm.engine.core.facts.plans["engine"])))
        self._breaks = dict[str, None]()
        self._mode, self._limit = "s", 0  # the last command that goes on; most calls that a halt of `n` may lie in
        self._halted = list[Span]()  # stops that halted and have not returned
        self._phase, self._last = "", "n"
        self._values: dict[str, Any] = {}  # by the names of `p`
        self._result: Any = None
        self._function: Any = None  # of the stop
        self._open = list[Span]()  # calls that have not ended
        self._halts = False  # functions that a halt calls are no stops of the request

    def began(self, open_ones: list[Span], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Halt before a call, if the last command or a name asks for that. Raises `Left`."""
        span = open_ones[-1]
        if self._halts or threading.current_thread() is not threading.main_thread():
            return
        asked = self._mode == "s" or (self._mode == "n" and len(open_ones) <= self._limit)
        asked = asked and len(open_ones) > OUTER  # the whole request
        if self._breaks_at(span) or asked:
            self._values, self._function, self._open = _arguments(function, args, kwargs), function, open_ones[1:]
            self._halted.append(span)
            self._halts = True
            self._show(span, open_ones)
            self._obey(len(open_ones))
            self._halts = False

    def told(self, result: Any, open_ones: list[Span]) -> None:
        """Show what a stop returns that has halted."""
        if self._halts:
            return
        span = open_ones[-1].inside[-1]
        self._result = result
        if self._halted and self._halted[-1] is span:
            self._halted.pop()
            self._halts = True
            self._say(f"{span.name} returns after {1e3 * span.seconds:.3f} ms")
            self._tensors("", result)
            self._halts = False

    def _breaks_at(self, span: Span) -> bool:
        met = [one for one in self._breaks if matches(one, span.name, span.where)]
        for one in met:
            self.unmet.pop(one, None)
        return bool(met)

    def _show(self, span: Span, open_ones: list[Span]) -> None:
        phase = next((one.phase for one in open_ones if one.phase), "")
        if phase != self._phase:
            self._phase = phase
            self._say(f"\n{phase or 'between two steps'}")
        theirs = next((f"  vLLM: {name}" for pattern, name in VLLM if fnmatch(span.name, pattern)), "")
        self._say(f"\n{'  ' * (len(open_ones) - 2)}{span.name}  {span.where}{theirs}")
        for told in (span.way, *(told for names, told in self._decisions.items() if names.match(span.name))):
            if told:
                self._say(f"    decided from: {told}")
        for name, value in self._values.items():
            if isinstance(value, bool | int | float | str):
                self._say(
                    f"    {name:<28} {str(value)[:80]!r}" if isinstance(value, str) else f"    {name:<28} {value}"
                )
            elif name != "self":
                self._tensors(name, value)
                self._requests(value)

    def _obey(self, depth: int) -> None:
        """Read commands until one goes on. Raises `Left`."""
        while True:
            with _interruptible():
                line = self._commands()
            if line is None:
                raise Left
            self._last = line.strip() or self._last
            if is_comment(self._last):
                continue
            try:
                command, name = read_command(self._last)
            except ValueError as error:
                self._say(str(error))
                continue
            if command in ("n", "s", "c"):
                self._mode, self._limit = command, depth
                if command == "c":
                    self._halted.clear()
                return
            if command == "q":
                raise Left
            {"b": self._toggle, "p": self._print, "w": self._where, "l": self._source, "h": self._help}[command](name)

    def _help(self, name: str) -> None:
        self._say(HELP)

    def _where(self, name: str) -> None:
        for depth, span in enumerate(self._open):
            self._say(f"  {'  ' * depth}{span.name}  {span.where}")

    def _source(self, name: str) -> None:
        function = inspect.unwrap(self._function)
        if not inspect.isroutine(function) or inspect.isbuiltin(function):
            self._say(f"  its source is no Python: {self._open[-1].where}")
            return
        self._say("\n".join(f"  {line}".rstrip() for line in textwrap.dedent(inspect.getsource(function)).splitlines()))

    def _toggle(self, name: str) -> None:
        if name in self._breaks:
            del self._breaks[name]
            self.unmet.pop(name, None)
        elif name and (said := self._names.unknown(name)):
            self._say(said)
        elif name:
            self._breaks[name] = self.unmet[name] = None
        self._say(f"halts at: {', '.join(self._breaks) or 'no names'}")

    def _print(self, name: str) -> None:
        path, bracket, rest = name.partition("[")
        found = self._found(path)
        if found is None and path == "result":
            self._say("the last stop that ended returned nothing, or none has ended.")
        elif found is None:
            names = [key for key, value in self._values.items() if value is not None]
            self._say(f"nothing here is called {path!r}: {', '.join([*names, 'result'])}, and parts of them.")
        elif bracket and (wrong := _no_index(found, bracket + rest)):
            self._say(f"{path}{bracket}{rest}: {wrong}")
        else:
            found = _indexed(found, bracket + rest) if bracket else found
            if not self._tensors(name, found, FIRST_OF_ONE):
                self._say(f"  {name} = {str(found)[:400]}")
            self._requests(found)

    def _found(self, path: str) -> Any:
        values = self._values | {"result": self._result}
        found = _part(values, path)
        if found is None:
            named = [one for key, value in values.items() for one in _named(key, value) if key != "self"]
            found = next((value for key, value in named if key == path or key.endswith(f".{path}")), None)
        return found

    def _tensors(self, name: str, value: Any, count: int = FIRST) -> bool:
        """Print the tensors of a value, by name. Return False when there is none."""
        found = list(_named(name, value))
        for key, one in found[:MOST_LINES]:
            self._say(f"    {key or 'result':<28} {words(partial(_described, one, count))}")
            if count > FIRST and getattr(one, "ndim", 0) == 2 and len(one) > 1:
                for number, row in enumerate(one[:MOST_ROWS]):
                    self._say(f"      {f'[{number}]':<26} {words(partial(_numbers, row, FIRST_OF_ROW))}")
            if isinstance(one, Tensor) and one.ndim == 2 and one.shape[1] == self._llm.engine.core.facts.vocab_size:
                self._say(f"      best tokens of the last row: {self._best(one[-1])}")
        if len(found) > MOST_LINES:
            self._say(f"    ... and {len(found) - MOST_LINES} more: p NAME")
        return bool(found)

    def _best(self, logits: Tensor) -> str:
        best = logits.float().topk(BEST)
        try:
            tokenizer = self._llm.get_tokenizer()
            texts = [repr(tokenizer.decode([token], skip_special_tokens=False)) for token in best.indices.tolist()]
        except QuireError:  # there is no tokenizer
            texts = [str(token) for token in best.indices.tolist()]
        return ", ".join(f"{text} {value:.3f}" for text, value in zip(texts, best.values.tolist(), strict=True))

    def _requests(self, value: Any) -> None:
        """Print slots, tokens and block tables of the requests in a step's plan."""
        plan = value.plan if isinstance(value, InFlight) else value
        if not isinstance(plan, StepPlan):
            return
        core = self._llm.engine.core
        assert isinstance(core, EngineCore), "replicas are processes of their own"
        scheduler = core.scheduler
        for slot, count in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True):
            end, handle = int(scheduler.table.planned[slot]), int(scheduler.table.handle[slot])
            tables = [scheduler.allocator.table(slot, group) for group in range(len(scheduler.allocator.groups))]
            blocks = "; ".join(", ".join(map(str, table)) for table in tables)
            self._say(f"    slot {slot}: request {handle}, tokens {end - count} to {end}, block table: {blocks}")


def _arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, and its object as `self`."""
    try:
        given = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # a function of C
        given = {str(number): one for number, one in enumerate(args)} | kwargs
    owner = getattr(function, "__self__", None)
    return given if owner is None else given | {"self": owner}


def _part(values: dict[str, Any], path: str) -> Any:
    """Return the value at a path, such as "ctx.attention.0.kv_slots"; None: there is none."""
    found: Any = values
    for part in path.split("."):
        if isinstance(found, dict):
            found = found.get(part)
        elif isinstance(found, list | tuple) and part.isdigit():
            found = found[int(part)] if int(part) < len(found) else None
        else:
            found = getattr(found, part, None)
    return found


def _named(name: str, value: Any, depth: int = MOST_DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays of a value with their names, those of records and lists, too."""
    if isinstance(value, Tensor | np.ndarray):
        yield name, value
    elif isinstance(value, list) and value and isinstance(value[0], int):
        yield name, value
    elif depth and isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _named(f"{name}.{number}".lstrip("."), one, depth - 1)
    elif depth:
        for key in _fields(value):
            yield from _named(f"{name}.{key}".lstrip("."), getattr(value, key), depth - 1)


def _fields(value: Any) -> list[str]:
    """Return the names of the fields of a record; of a step's context all but the KV caches of all layers."""
    if isinstance(value, msgspec.Struct):
        return list(value.__struct_fields__)
    names = [one.name for one in fields(value)] if is_dataclass(value) and not isinstance(value, type) else []
    return [one for one in names if not (one == "kv" and isinstance(value, StepContext))]


def _described(value: Any, count: int) -> str:
    """Return shape, dtype, norm and first numbers of a tensor or array."""
    tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    norm = ""
    if tensor.is_floating_point() and 0 < tensor.numel() <= MOST_NUMBERS:
        norm = f"  norm {float(tensor.float().norm()):.5g}"
    return f"{', '.join(shapes(value))}{norm}  {_numbers(tensor, count)}"


def _numbers(value: Any, count: int) -> str:
    """Return the first numbers of a tensor or array."""
    tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    few = tensor
    while few.numel() > MOST_COPIED and few.ndim > 1:  # a view of a KV cache cannot be flattened without a copy
        few = few[0]
    flat = (few.float() if few.is_floating_point() else few).flatten()[:count].tolist()
    first = ", ".join(f"{one:.4g}" if isinstance(one, float) else str(one) for one in flat)
    return f"[{first}{', ...' * (tensor.numel() > count)}]"


def _no_index(value: Any, brackets: str) -> str:
    """Return why a value has no part at an index such as "[5]" or "[1, :2][0]"; "" if it has."""
    if not re.fullmatch(r"(\[-?\d*(:-?\d*)?(,-?\d*(:-?\d*)?)*\])+", brackets):
        return "an index is of numbers: [5], [1,0], [2:4]."
    try:
        _indexed(value, brackets)
    except (IndexError, TypeError, KeyError, ValueError) as error:
        return f"{', '.join(shapes(value)) or type(value).__name__} has no such place ({error})."
    return ""


def _indexed(value: Any, brackets: str) -> Any:
    for index in re.findall(r"\[([^\]]*)\]", brackets):
        places = tuple(
            slice(*[int(end) if end else None for end in one.split(":")]) if ":" in one else int(one)
            for one in index.split(",")
        )
        value = value[places if len(places) > 1 else places[0]]
    return value


@contextmanager
def _interruptible() -> Iterator[None]:
    """Context manager: Ctrl-C raises KeyboardInterrupt at once, although an engine step delays it to its end."""
    if signal.getsignal(signal.SIGINT) in (None, signal.SIG_IGN):
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
