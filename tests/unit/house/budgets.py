"""Budgets of the house: lines of rooms, files and functions, fields of records, parameters of functions.

Everything is counted as it stands after `ruff format`, C, CUDA C++ and Triton included. A budget has no exceptions.
Names that were over their budget when it was made stand in over.txt with their sizes. A name that shrinks gets a
smaller size there, and a name that fits leaves the list.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from rules import PACKAGE, Source, classes, dotted

MAX_PACKAGE = 134_500
MAX_ROOMS = 34  # sub-rooms of kernels and entry apart
MAX_ROOM, MAX_SUB_ROOM = 4_500, 3_500  # sub-rooms: kernels/<operation>, entry/cli, entry/http, entry/http/openai, ...
MAX_FILE, MAX_LONG_FILE = 450, 900  # the second for kernels and wire schemas
MAX_FUNCTION, MAX_KERNEL_FUNCTION = 60, 150
MAX_FIELDS = 15
MAX_PARAMETERS = 8
SPLIT_ROOMS = ("kernels", "entry")  # rooms that are counted by their sub-rooms
OWN_ROOMS = ("explain/verify", "plan/kinds")  # sub-rooms that count by themselves
KERNEL_MARKS = ("jit", "gluon_jit", "unspecialized")  # decorators of device functions, whose parameters are free
OVER = Path(__file__).with_name("over.txt")
MAX_OVER = 26  # lines of over.txt: lower it when a line leaves the list
RECORD_BASES = frozenset(("Struct", "NamedTuple", "TypedDict"))
C_FUNCTION = re.compile(
    r'^(?!typedef|#|/|extern(?! "C"))\w[^;={]*?\b(?!__attribute__|__launch_bounds__)(\w+)\([^;]*\)\s*\{$', re.MULTILINE
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Count:
    """A size that has a budget.

    budget   name of the budget: room, file, function, record, parameters
    name     the thing counted: a room, a file, or "file:name"
    number   its size
    limit    the largest size allowed
    """

    budget: str
    name: str
    number: int
    limit: int

    @property
    def key(self) -> str:
        """Budget and name, as over.txt has them."""
        return f"{self.budget} {self.name}"


def native_sources() -> list[Source]:
    """Every file of the package in C or CUDA C++."""
    paths = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".c", ".cu", ".h"))
    return [Source(path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in paths]


def counts(sources: Iterable[Source]) -> list[Count]:
    """Everything in these files, Python and C, that has a budget."""
    sources = list(sources)
    names = record_names(sources)
    found = [Count("room", room, number, limit_of_room(room)) for room, number in lines_by_room(sources).items()]
    for source in sources:
        limit = MAX_LONG_FILE if source.is_kernel or _is_schema(source) else MAX_FILE
        found.append(Count("file", source.path, num_lines(source), limit))
        if source.path.endswith(".py"):
            found += functions(source)
            found += records(source, names)
            found += parameters(source)
        else:
            found += native_functions(source)
    return found


def over(counted: Iterable[Count]) -> dict[str, Count]:
    """Counts above their limit, by key. The largest counts where several have a key, such as methods of a property."""
    found: dict[str, Count] = {}
    for count in counted:
        if count.number > max(count.limit, found[count.key].number if count.key in found else 0):
            found[count.key] = count
    return found


def read_over(text: str) -> dict[str, int]:
    """Sizes in over.txt by key: "budget name number" in each line; # begins a comment."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {key: int(number) for key, _, number in (line.rpartition(" ") for line in lines)}


def complaints(found: dict[str, Count], known: dict[str, int]) -> Iterator[str]:
    """Complain about counts over their limit that the list lacks or that grew, and about lines that are out of date."""
    for key, count in found.items():
        if key not in known:
            yield f"{key}: {count.number}, at most {count.limit}: split it along what changes together"
        elif count.number > known[key]:
            yield f"{key}: {count.number}, at most {count.limit}, and {known[key]} in over.txt: it may only shrink"
        elif count.number < known[key]:
            yield f"{key}: {count.number}, and {known[key]} in over.txt: lower its line to {count.number}"
    for key in known.keys() - found.keys():
        yield f"{key}: within its limit, or gone: remove its line from over.txt"


def num_lines(source: Source) -> int:
    """Lines of a file."""
    return len(source.text.splitlines())


def sub_room(source: Source) -> str:
    """Return the room or sub-room whose budget a file belongs to, such as "kv", "kernels/linear" or "entry/http"."""
    folders = source.path.split("/")[:-1]
    if "/".join(folders) in OWN_ROOMS:
        return "/".join(folders)
    if source.room not in SPLIT_ROOMS:
        return source.room
    return "/".join(folders[:2] if source.room == "kernels" else folders)


def rooms(sources: Iterable[Source]) -> set[str]:
    """Return the names of the rooms."""
    return {source.room for source in sources if source.room}


def limit_of_room(room: str) -> int:
    """Return the lines that a room or sub-room may have."""
    return MAX_SUB_ROOM if room.split("/")[0] in SPLIT_ROOMS else MAX_ROOM


def lines_by_room(sources: Iterable[Source]) -> dict[str, int]:
    """Return the lines of each room and sub-room. The package's own two files belong to none."""
    lines: dict[str, int] = defaultdict(int)
    for source in sources:
        if source.room:
            lines[sub_room(source)] += num_lines(source)
    return dict(sorted(lines.items()))


def functions(source: Source) -> Iterator[Count]:
    """Lines of every function and method, nested ones too: signature, docstring and body, without decorators."""
    limit = MAX_KERNEL_FUNCTION if source.is_kernel else MAX_FUNCTION
    for name, node in _named_functions(source.tree.body, ""):
        count = (node.end_lineno or node.lineno) - node.lineno + 1
        yield Count("function", f"{source.path}:{name}", count, limit)


def native_functions(source: Source) -> Iterator[Count]:
    """Lines of every C function: from the line of its name to the brace in the first column that ends it."""
    limit = MAX_KERNEL_FUNCTION if source.is_kernel else MAX_FUNCTION
    for match in C_FUNCTION.finditer(source.text):
        end = source.text.index("\n}", match.end()) if "\n}" in source.text[match.end() :] else len(source.text)
        yield Count("function", f"{source.path}:{match[1]}", source.text.count("\n", match.start(), end + 1) + 1, limit)


def record_names(sources: Iterable[Source]) -> set[str]:
    """Return the names of all records of these files: classes that say so, and the classes that inherit from them."""
    found = [node for source in sources if source.path.endswith(".py") for node in classes(source)]
    names = {node.name for node in found if _is_record(node)}
    while more := {node.name for node in found if names.intersection(_bases(node))} - names:
        names |= more
    return names


def records(source: Source, names: Set[str]) -> Iterator[Count]:
    """Fields of every dataclass, Struct, NamedTuple, TypedDict, plan and config, without the fields of its bases.

    names   names of records of all files: a class that inherits from such a record is a record
    """
    for node in classes(source):
        if _is_record(node) or names.intersection(_bases(node)):
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
            number = sum("ClassVar" not in ast.unparse(field.annotation) for field in fields)
            yield Count("record", f"{source.path}:{node.name}", number, MAX_FIELDS)


def parameters(source: Source) -> Iterator[Count]:
    """Parameters of every public function, method and constructor, `self` not counted. Device functions are free.

    Methods that Python calls, such as `__call__`, are public where their class is.
    """
    for name, node in _named_functions(source.tree.body, "", nested=False):
        words = name.removesuffix(".__init__").split(".")
        if not any(map(_is_private, words)) and not _is_device_function(node):
            names = [a.arg for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
            number = len(names) - (bool(names) and names[0] in ("self", "cls", "mcs"))
            yield Count("parameters", f"{source.path}:{name}", number, MAX_PARAMETERS)


def unformatted(source: Source) -> Iterator[str]:
    """Complain about marks that switch the formatter off, but on tables of data.

    A table is an upper-case constant of a module or class, of literals and names, over four lines or more. Its calls
    make values: a class (a capitalized name), or one of MAKERS.
    """
    if not MARK.search(source.text):
        return
    tables = {node.end_lineno for node in source.nodes if _is_table(node)}
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and MARK.search(token.string) and token.start[0] not in tables:
            yield f"{source.path}:{token.start[0]}: the formatter is switched off only for tables of data"


MARK = re.compile(r"#\s*(?:fmt|yapf)\s*:\s*(?:skip|off|on|disable|enable)")
MAKERS = frozenset(("dict", "dict.fromkeys", "frozenset", "list", "range", "replace", "set", "tuple"))
COMPUTED = (ast.Lambda, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp, ast.IfExp, ast.BoolOp, ast.JoinedStr)


def _is_table(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        return False
    named = all(isinstance(target, ast.Name) and target.id.isupper() for target in targets)
    literal = isinstance(value, ast.Dict | ast.List | ast.Tuple | ast.Set)
    long = (node.end_lineno or node.lineno) - node.lineno + 1 >= 4
    return named and literal and long and not any(map(_is_computed, ast.walk(value)))


def _is_computed(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = dotted(node.func)
        return name not in MAKERS and not (name.isidentifier() and name.lstrip("_")[:1].isupper())
    return isinstance(node, COMPUTED)


def _named_functions(body: Iterable[ast.stmt], owner: str, nested: bool = True) -> Iterator[tuple[str, Function]]:
    """Yield (dotted name, node) of the functions in a body, its classes and its blocks; nested functions if asked."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _named_functions(node.body, f"{owner}{node.name}.", nested)
        elif isinstance(node, Function):
            yield f"{owner}{node.name}", node
            if nested:
                yield from _named_functions(node.body, f"{owner}{node.name}.", nested)
        else:
            for part in ("body", "orelse", "finalbody"):
                yield from _named_functions(getattr(node, part, ()), owner, nested)
            for part in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
                yield from _named_functions(part.body, owner, nested)


def _is_private(word: str) -> bool:
    return word.startswith("_") and not (word.startswith("__") and word.endswith("__"))


def _is_record(node: ast.ClassDef) -> bool:
    marks = [dotted(d.func if isinstance(d, ast.Call) else d).split(".")[-1] for d in node.decorator_list]
    named = node.name.endswith(("Plan", "Config"))
    return "dataclass" in marks or named or not RECORD_BASES.isdisjoint(_bases(node))


def _bases(node: ast.ClassDef) -> set[str]:
    """Last names of a class's bases, without their type arguments."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return {dotted(base).split(".")[-1] for base in bases}


def _is_device_function(node: Function) -> bool:
    marks = [dotted(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
    return any(mark in KERNEL_MARKS for mark in marks)


def _is_schema(source: Source) -> bool:
    return Path(source.path).stem in ("schema", "schemas") or "/schemas/" in source.path
