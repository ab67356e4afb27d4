"""Pages of a tour: for each stop the function that ran with its source, the call, its values, and the texts."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.observe.calls import PACKAGE
from quire.tour.live import Live, TourStop, Values, formula_of
from quire.tour.ran_lines import Place
from quire.tour.texts import Tour

SHOWN = 34  # lines of a function that a page shows at most


class Code(NamedTuple):
    """Source of a function, without its docstring.

    name    with the class: "Attention.forward"
    where   "file:line" below the package
    lines   as they stand in the file, at most SHOWN
    more    lines that are left out at the end
    numbers  line numbers in the file
    marked  places in `lines` of those that matter
    """

    name: str
    where: str
    lines: tuple[str, ...]
    more: int
    numbers: tuple[int, ...]
    marked: tuple[int, ...] = ()


class StopPage(NamedTuple):
    """A stop, as it is shown.

    code      the function that ran, or the formula that it computes
    reference  True: the code is the reference of the kernel that ran, which computes the same
    ran       the name of the call, milliseconds, and its rank
    tie       what the code has to do with the call, a key of `WORDS`; "": the code ran, or the reference computes it
    shapes    of arguments and result, as the trace has them
    command   something to change; "": this page is what it shows
    drawing   name of a drawing; "": none
    usual     values of the tour's own request, where this is another; empty: it is the tour's own
    """

    number: int
    title: str
    code: Code
    reference: bool
    ran: str
    tie: str
    shapes: str
    values: Values
    idea: str
    command: str
    see: str
    vllm: str
    drawing: str
    usual: Sequence[tuple[str, str]] = ()

    def plain(self) -> dict[str, Any]:
        """Return the page as plain values, for JSON."""
        return self._asdict() | {"code": self.code._asdict()}


def pages(live: Live, tour: Tour, facts: dict[str, Any], only: int | None = None) -> Iterator[StopPage]:
    """Yield the pages of a request that ran.

    facts   values of the places {name} in the texts
    only    number of the stop that is shown; None: all
    """
    for number, (stop, text) in enumerate(zip(live.stops, tour.stops, strict=True), 1):
        if only not in (None, number):
            continue
        span = live.span(stop)
        values, code = live.values.get(stop, []), code_of(stop, span.where, live.lines)
        shapes = f"({span.takes}){' -> ' * bool(span.gives)}{span.gives}" if span.takes or span.gives else ""
        yield StopPage(
            number=number,
            title=text.title,
            code=code,
            reference=stop.formula.startswith("quire.kernels.") and code.where != span.where,
            ran=f"{span.name}, {1e3 * span.seconds:.3f} ms{'' if stop.rank is None else f', rank {stop.rank}'}",
            tie=stop.tie,
            shapes=shapes,
            values=values,
            idea=filled(text.idea, facts),
            command=filled(text.command, facts) + tour.flag * text.command.startswith("quire tour"),
            see=filled(text.see, facts),
            vllm=text.vllm,
            drawing=stop.drawing,
        )


def filled(text: str, facts: dict[str, Any]) -> str:
    """Replace each {name} of a text by its value. Other braces stay: commands have JSON."""
    return re.sub(r"\{(\w+)\}", lambda found: str(facts[found[1]]), text)


def code_of(stop: TourStop, where: str, ran: Mapping[Place, Set[int]] = MappingProxyType({})) -> Code:
    """Return the source of a stop: that of its formula, or of the function at `where` of its call.

    Raises LookupError for a mark that no line has, and for one on several lines of a function that is not in `ran`.

    ran   lines that ran, by function: no other line of these functions is marked
    """
    path, _, line = where.partition(":")
    file, first = PACKAGE / path, int(line or 0)
    if stop.formula:
        function = formula_of(stop)
        file, first = Path(inspect.getfile(function)), function.__code__.co_firstlineno
    code, marked = code_at(file, first), set[int]()
    lines = ran.get((str(file), first))
    for mark in stop.marks:
        found = [place for place, one in enumerate(code.lines) if mark in one]
        if not found:
            raise LookupError(f"{code.where}: {code.name} shows no line with {mark!r}")
        if lines is None and len(found) > 1:
            raise LookupError(f"{code.where}: {code.name} has {mark!r} on {len(found)} lines: give more of one")
        marked.update(place for place in found if lines is None or code.numbers[place] in lines)
    return code._replace(marked=tuple(sorted(marked)))


@cache
def code_at(path: Path, line: int) -> Code:
    """Return the function of a Python file that begins at a line. Raises LookupError if none begins there."""
    for name, node in _functions(ast.parse(path.read_text()), ""):
        if line in (node.lineno, *(one.lineno for one in node.decorator_list[:1])):
            whole = inspect.getblock(path.read_text().splitlines(True)[line - 1 :])
            numbers = list(range(line, line + len(whole)))
            if ast.get_docstring(node) is not None:
                told = node.body[0]
                docstring = slice(told.lineno - line, (told.end_lineno or told.lineno) - line + 1)
                del whole[docstring], numbers[docstring]
            lines = textwrap.dedent("".join(whole)).rstrip().splitlines()
            count = len(lines) if len(lines) <= SHOWN else SHOWN - 1
            where = f"{path.relative_to(PACKAGE)}:{line}"
            return Code(name, where, tuple(lines[:count]), len(lines) - count, tuple(numbers[:count]))
    raise LookupError(f"no function begins at {path}:{line}")


def _functions(node: ast.AST, before: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield before + inner.name, inner
        if isinstance(inner, ast.ClassDef):
            yield from _functions(inner, f"{before}{inner.name}.")
