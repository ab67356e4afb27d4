"""The house rules as functions from source text to complaints; the tests beside this file run them on the package.

Nothing here imports the package: everything is read from its syntax trees.
"""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "src" / "quire"

MAX_LINE = 120
MAX_METHODS = 15
MAX_POSITIONAL = 6
VAGUE_NAMES = {"util", "utils", "common", "helper", "helpers", "misc", "manager"}
NOT_FIRST = frozenset("What Whether How One Where Who Which Whose That Those".split())  # of docstrings
TORCH_FREE_ROOMS = (
    "contracts",
    "args",
    "config",
    "plan",
    "reports",
    "quantization",
    "kv",
    "text",
    "answers",
    "engine",
    "adapters",
)
BRINGS_TORCH = {"torch", "torchvision", "triton", "transformers", "accelerate", "flash_attn", "safetensors.torch"}

# Who may import whom, level by level. A room may import its own level's other rooms only one way round (no cycles).
_FLOOR = {"contracts"}
_GROUND = _FLOOR | {"args"}
_BASE = _GROUND | {"config", "observe", "platforms"}
_QUANTIZATION = _BASE | {"quantization"}
_KERNELS = _QUANTIZATION | {"kernels"}
_SPREAD = _KERNELS | {"distributed"}
_LAYERS = _SPREAD | {"layers", "weights", "kvstore"}
_PLAN = _KERNELS | {"weights", "models", "plan"}
_SPEC = _LAYERS | {"spec"}
_FOREIGN = _LAYERS | {"foreign"}
_ADAPTERS = _PLAN | {"adapters"}
_WORKER = _SPEC | _ADAPTERS | {"worker"}
_STATE = _GROUND | {"config", "kv", "text", "answers"}
_ENGINE = _STATE | {"engine"}
_PROCS = _WORKER | _ENGINE | {"procs"}
_RANKS = _PROCS | {"ranks"}
_KVNET = _PROCS | {"kvnet"}
_ENTRY = _RANKS | _KVNET | {"reports", "assemble", "entry", "foreign"}
_ALL = _ENTRY | {"explain", "traces", "bench", "router"}
MAY_IMPORT: dict[str, set[str]] = {
    "contracts": _FLOOR,
    "args": _GROUND,
    **dict.fromkeys(("config", "observe", "platforms"), _BASE),
    "quantization": _QUANTIZATION,
    "kernels": _KERNELS,
    "distributed": _SPREAD,
    **dict.fromkeys(("layers", "weights", "kvstore"), _LAYERS),
    "foreign": _FOREIGN,
    "models": _FLOOR | {"models"},
    "plan": _PLAN,
    "adapters": _ADAPTERS,
    "reports": _ADAPTERS | {"reports"},
    "spec": _SPEC,
    "worker": _WORKER,
    **dict.fromkeys(("kv", "text", "answers"), _STATE),
    "engine": _ENGINE,
    "procs": _PROCS,
    "ranks": _RANKS,
    "kvnet": _KVNET,
    "assemble": _RANKS | _KVNET | {"reports", "assemble", "foreign"},
    "router": _FLOOR | {"config", "observe", "router"},
    "entry": _ENTRY,
    **dict.fromkeys(("explain", "traces", "bench"), _ALL),
    **dict.fromkeys(("entry/cli", "tour"), _ALL | {"tour"}),
}


@dataclass(frozen=True)
class Source:
    """A Python file of the package or of the tests; `path` is relative to the folder, with slashes."""

    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The syntax tree, parsed once."""
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree."""
        return list(ast.walk(self.tree))

    @property
    def room(self) -> str:
        """The folder or module under the package it belongs to; "" for the package's own two files."""
        if self.path in ("__init__.py", "__main__.py"):
            return ""
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def module(self) -> str:
        """Dotted name."""
        parts = self.path.removesuffix(".py").removesuffix("__init__").strip("/").replace("/", ".")
        return f"quire.{parts}".rstrip(".")

    @property
    def is_kernel(self) -> bool:
        """True where the looser budgets of kernels hold."""
        return self.room == "kernels"


Rule = Callable[[Source], Iterable[str]]


@functools.cache
def package_sources() -> list[Source]:
    """Every Python file of the package, read and parsed once for all tests of a process."""
    return [Source(p.relative_to(PACKAGE).as_posix(), p.read_text()) for p in sorted(PACKAGE.rglob("*.py"))]


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def classes(source: Source) -> Iterator[ast.ClassDef]:
    """Every class, nested ones too."""
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            yield node


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


# -- sizes -----------------------------------------------------------------------------------------


def line_length(source: Source) -> Iterator[str]:
    """Lines have at most 120 characters."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if len(line) > MAX_LINE:
            yield f"{source.path}:{number}: {len(line)} characters, at most {MAX_LINE}"


def public_methods(source: Source) -> Iterator[str]:
    """Classes have at most 15 public methods, properties included."""
    for node in classes(source):
        names = {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        public = [name for name in names if not name.startswith("_")]
        if len(public) > MAX_METHODS:
            yield f"{source.path}:{node.lineno}: {node.name} has {len(public)} public methods, at most {MAX_METHODS}"


def positional_parameters(source: Source) -> Iterator[str]:
    """Functions take at most 6 positional parameters, self not counted; kernels are free."""
    if source.is_kernel:
        return
    for node in functions(source):
        names = [a.arg for a in node.args.posonlyargs + node.args.args]
        count = len(names) - (bool(names) and names[0] in ("self", "cls"))
        if count > MAX_POSITIONAL:
            yield f"{source.path}:{node.lineno}: {node.name}: {count} positional parameters, at most {MAX_POSITIONAL}"


# -- habits ----------------------------------------------------------------------------------------


def no_mixins(source: Source) -> Iterator[str]:
    """Compose; no class is called a mixin."""
    for node in classes(source):
        if node.name.lower().endswith("mixin"):
            yield f"{source.path}:{node.lineno}: {node.name}: no mixins"


def no_global(source: Source) -> Iterator[str]:
    """No `global` statement."""
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield f"{source.path}:{node.lineno}: global {', '.join(node.names)}"


def no_bare_except(source: Source) -> Iterator[str]:
    """Every `except` says what it expects."""
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{source.path}:{node.lineno}: bare except"


def environment(source: Source) -> Iterator[str]:
    """The environment is read in config/env.py only."""
    if source.path == "config/env.py":
        return
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    for node in source.nodes:
        imported = isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & names
        used = isinstance(node, ast.Attribute) and node.attr in names and dotted(node.value) in ("os", "posix")
        if imported or used:
            yield f"{source.path}:{node.lineno}: the environment belongs in config/env.py"


def triton_home(source: Source) -> Iterator[str]:
    """Triton functions live under kernels/ only."""
    if source.is_kernel:
        return
    for node in source.nodes:
        imported = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triton"
        if imported or (isinstance(node, ast.Attribute) and dotted(node) in ("triton.jit", "triton.autotune")):
            yield f"{source.path}:{node.lineno}: triton belongs in kernels/"


def no_unfinished(source: Source) -> Iterator[str]:
    """No comment promises work."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and re.search(r"\b(?:TODO|FIXME|XXX|HACK)\b", token.string):
            yield f"{source.path}:{token.start[0]}: {token.string}"


def module_names(source: Source) -> Iterator[str]:
    """No file or folder has a name that says nothing."""
    for part in source.path.removesuffix(".py").split("/"):
        if part in VAGUE_NAMES:
            yield f"{source.path}: {part!r} says nothing; name what it knows"


_CONTAINERS = frozenset("list dict set bytearray defaultdict deque OrderedDict Counter WeakValueDictionary".split())
_ADDING = frozenset("append appendleft extend insert add update setdefault".split())
_MUTATORS = _ADDING | frozenset("remove discard pop popleft popitem clear sort reverse".split())


def _is_container(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Call):
        return dotted(node.func).split(".")[-1] in _CONTAINERS
    return isinstance(node, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id, statement.value  # type: ignore[attr-defined]


def _module_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for part in ("body", "orelse", "finalbody"):
                yield from _module_statements(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _module_statements(handler.body)


def _changes(node: ast.AST) -> Iterator[str]:
    """Names whose value this node changes in place."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
        yield dotted(node.func.value)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        yield dotted(node.value)
    elif isinstance(node, ast.AugAssign):
        yield dotted(node.target)


def module_state(source: Source) -> Iterator[str]:
    """A container at module level is an UPPER_CASE constant that nothing changes; so is one in a class body.

    Kernels and platforms may keep caches of compiled handles, in names that end in _HANDLES.
    """
    constants = {"__all__"}
    for statement in _module_statements(source.tree.body):
        for name, value in _assigned(statement):
            if name.isupper():
                constants.add(name)
            elif name != "__all__" and _is_container(value):
                yield f"{source.path}:{statement.lineno}: {name} is mutable state at module level"
    for node in classes(source):
        for statement in node.body:
            for name, value in _assigned(statement) if isinstance(statement, ast.Assign) else ():
                if not name.isupper() and not name.startswith("__") and _is_container(value):
                    yield f"{source.path}:{statement.lineno}: {node.name}.{name} is shared by all instances"
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom):
            constants |= {alias.name for alias in node.names if alias.name.isupper()}
    if source.room in ("kernels", "platforms"):
        constants = {name for name in constants if not name.endswith("_HANDLES")}
    for node in source.nodes:
        for name in _changes(node):
            if name in constants or (name.count(".") and name.split(".")[-1].isupper()):
                yield f"{source.path}:{node.lineno}: {name} is a constant and is changed here"  # type: ignore[attr-defined]


# -- docstrings ------------------------------------------------------------------------------------


def docstrings(source: Source) -> Iterator[str]:
    """Modules, public classes, public functions and public methods say what they are.

    Free: nested functions, private names and what is inside private classes, and methods of a class with bases (they
    may implement what the base has described).
    """
    if not ast.get_docstring(source.tree) and source.text.strip():
        yield f"{source.path}: no module docstring"
    yield from _undocumented(source, source.tree.body, "", True)


def _undocumented(source: Source, body: list[ast.stmt], owner: str, methods: bool) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield f"{source.path}:{node.lineno}: class {owner}{node.name} has no docstring"
            bases = [dotted(b).split(".")[-1] for b in node.bases]
            free = any(b not in ("", "Protocol", "Struct", "Exception", "object") for b in bases)
            yield from _undocumented(source, node.body, f"{node.name}.", not free)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and methods and not node.name.startswith("_"):
            overload = any(dotted(d).split(".")[-1] in ("overload", "setter") for d in node.decorator_list)
            if not overload and not ast.get_docstring(node):
                yield f"{source.path}:{node.lineno}: {owner}{node.name} has no docstring"


def docstring_beginnings(source: Source) -> Iterator[str]:
    """Docstrings begin with what the thing is or does, not with a question word or a relative clause."""
    for node in source.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = next(iter((ast.get_docstring(node) or "").split()), "").rstrip(",:;")
            if first in NOT_FIRST:
                place = f"{source.path}:{getattr(node, 'lineno', 1)}: {getattr(node, 'name', 'the module')}"
                yield f"{place}: the docstring begins with {first}: say what it is or does"


# -- imports ---------------------------------------------------------------------------------------


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports: eager, in functions, under TYPE_CHECKING, or named in a string.

    `from a import b` gives both `a` and `a.b`, since `b` may be a module.
    """
    package = source.module.split(".") if source.path.endswith("__init__.py") else source.module.split(".")[:-1]
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"quire(\.[a-z_]\w*)+", node.value):
                yield node.lineno, node.value


def imported_rooms(source: Source) -> Iterator[tuple[int, str]]:
    """(line, room) of the package's rooms a file imports; "" is the package itself (its version is free)."""
    for line, name in imported_modules(source):
        parts = name.split(".")
        if parts[0] != "quire" or name == "quire.__version__":
            continue
        if len(parts) > 1:
            yield line, parts[1]
        elif not _only_version(source, line):
            yield line, ""


def _only_version(source: Source, line: int) -> bool:
    """True when the import of `quire` itself on this line takes rooms or the version, not lazy public names."""
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.lineno == line and node.module == "quire":
            return all(a.name == "__version__" or a.name in MAY_IMPORT for a in node.names)
    return False


def import_directions(source: Source) -> Iterator[str]:
    """Imports go one way, by the table above."""
    if source.room == "":
        return
    place = "entry/cli" if source.path.startswith("entry/cli/") else source.room
    if place not in MAY_IMPORT:
        yield f"{source.path}: {place!r} is no room of the house; add it to docs/design.md and to the table first"
        return
    for line, room in imported_rooms(source):
        if room == "":
            yield f"{source.path}:{line}: imports the public names; import the room that defines them"
        elif room not in MAY_IMPORT[place] | {source.room}:
            yield f"{source.path}:{line}: {place} may not import {room}"


def room_cycles(sources: Iterable[Source]) -> list[str]:
    """Cycles between rooms: two rooms of one level may depend on each other one way only."""
    graph: dict[str, set[str]] = {}
    for source in sources:
        if source.room not in ("", "entry", "explain", "traces", "bench"):
            graph.setdefault(source.room, set()).update(r for _, r in imported_rooms(source) if r != source.room)
    found = []
    for room in sorted(graph):
        seen, todo = set(), list(graph[room])
        while todo:
            other = todo.pop()
            if other not in seen:
                seen.add(other)
                todo += graph.get(other, ())
        if room in seen:
            found.append(f"{room} imports itself by way of {', '.join(sorted(seen & set(graph)))}")
    return found


def module_cycles(sources: Iterable[Source]) -> list[str]:
    """Return the circles of modules that import each other, in functions and under TYPE_CHECKING, too.

    The version, a name of the package itself, is free.
    """
    known = {source.module: source for source in sources if source.module != "quire"}
    graph = {name: _imports(source, known.keys()) - {name} for name, source in known.items()}
    found, left = [], set(graph)
    while left:  # modules that import none of the rest, or that none of the rest imports, are in no circle
        free = {name for name in left if not graph[name] & left or not any(name in graph[other] for other in left)}
        if not free:
            found.append(f"imports go round in {', '.join(sorted(left))}")
            break
        left -= free
    return found


def _imports(source: Source, known: Collection[str]) -> set[str]:
    """Return the modules, of `known`, from which the import statements of `source` take something."""
    found = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & set(known) if inner & set(known) else {node.module}
    return found & set(known)


def repeated_classes(sources: Iterable[Source]) -> list[str]:
    """Names of top-level classes that stand in more than one room: a reader who greps for one finds another."""
    homes: dict[str, list[Source]] = {}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(source)
    return [
        f"class {name} stands in {', '.join(source.path for source in found)}: name it after its room"
        for name, found in sorted(homes.items())
        if len({source.room for source in found}) > 1
    ]


def brings_torch(sources: Iterable[Source], rooms: Iterable[str]) -> list[str]:
    """The ways by which files of `rooms` reach torch, directly or through other modules; eager or not."""
    by_module = {source.module: source for source in sources}
    found = []
    for start in (s for s in by_module.values() if s.room in rooms):
        seen, todo = {start.module}, [(start, start.module)]
        while todo:
            source, way = todo.pop()
            for line, name in imported_modules(source):
                if any(name == b or name.startswith(b + ".") for b in BRINGS_TORCH):
                    found.append(f"{start.path}: {way}:{line} imports {name}")
                elif name in by_module and name not in seen and name != "quire":
                    seen.add(name)
                    todo.append((by_module[name], f"{way} > {name}"))
    return found


# -- text ------------------------------------------------------------------------------------------

# Written so that this file does not match itself.
_PLACES = r"(?<![\w.:/-])/(?:work|root|mnt|opt/(?:pypi|wheels)|(?:home|Users)/\w+)(?=/)"
_WORDS = (
    r"\bhelper agents?\b|\bhouse helper\b|\bshared/(?:DESIGN|STYLE|facts)\b"
    r"|\bfacts/(?:kv|moe_quant|peer_engine|server)\b"
)
FOREIGN = re.compile(_PLACES + "|" + _WORDS, re.IGNORECASE)


def foreign_text(path: str, text: str) -> Iterator[str]:
    """Paths of one machine, and words of the place where the project was written."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := FOREIGN.search(line):
            yield f"{path}:{number}: {match.group()!r}"


FILE_RULES: tuple[Rule, ...] = (
    line_length,
    public_methods,
    positional_parameters,
    no_mixins,
    no_global,
    no_bare_except,
    environment,
    triton_home,
    no_unfinished,
    module_names,
    module_state,
    docstrings,
    docstring_beginnings,
    import_directions,
)
