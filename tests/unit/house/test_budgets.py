"""The budgets hold for the package, apart from the names in over.txt; each budget turns red on a planted violation."""

import textwrap

import pytest

import budgets
import rules
from rules import Source

SHORT_BODY = "\n".join(f"    x{i} = {i}" for i in range(59))
LONG_BODY = f"{SHORT_BODY}\n    y = 1"
FIELDS = "\n".join(f"    f{i}: int = 0" for i in range(15))
NAMES = ", ".join(f"p{i}" for i in range(8))
NATIVE_BODY = "    x = 1;\n" * 149
TABLE = "TABLE = {\n    1: (2, 3),\n    4: (5,   6),\n}  # fmt: skip"


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return [*rules.package_sources(), *budgets.native_sources()]


def test_the_package_keeps_its_budgets(sources: list[Source]) -> None:
    known = budgets.read_over(budgets.OVER.read_text())
    complaints = sorted(budgets.complaints(budgets.over(budgets.counts(sources)), known))
    assert not complaints, "\n" + "\n".join(complaints)


def test_nothing_is_added_to_the_list() -> None:
    number = len(budgets.read_over(budgets.OVER.read_text()))
    assert number == budgets.MAX_OVER, "a name over its budget is split, not listed; MAX_OVER falls with the list"


def test_the_whole_stays_small(sources: list[Source], capsys: pytest.CaptureFixture[str]) -> None:
    lines = budgets.lines_by_room(sources)
    rooms = budgets.rooms(sources)
    with capsys.disabled():
        print(f"\nquire: {sum(lines.values()):,} lines of at most {budgets.MAX_PACKAGE:,} in {len(rooms)} rooms:")
        print(textwrap.fill(", ".join(f"{room} {number:,}" for room, number in lines.items()), 120))
    assert sum(lines.values()) <= budgets.MAX_PACKAGE
    assert len(rooms) <= budgets.MAX_ROOMS


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "examples"])
def test_only_tables_are_written_without_the_formatter(folder: str) -> None:
    paths = sorted((rules.ROOT / folder).rglob("*.py"))
    assert paths
    found = [Source(path.relative_to(rules.ROOT).as_posix(), path.read_text()) for path in paths]
    complaints = [complaint for source in found for complaint in budgets.unformatted(source)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_native_lines_have_at_most_120_characters() -> None:
    complaints = [complaint for source in budgets.native_sources() for complaint in rules.line_length(source)]
    assert not complaints, "\n" + "\n".join(complaints)


OVER = [
    ("file", "x = 1\n" * 451, "worker/x.py"),
    ("file", "x = 1\n" * 901, "kernels/x.py"),
    ("file", "x = 1;\n" * 901, "kernels/linear/x.c"),
    ("room", "x = 1\n" * 4501, "worker/x.py"),
    ("room", "x = 1\n" * 3501, "kernels/linear/x.py"),
    ("room", "x = 1;\n" * 3501, "kernels/linear/x.c"),
    ("room", "x = 1\n" * 3501, "entry/http/openai/x.py"),
    ("function", f"def f():\n{LONG_BODY}", "worker/x.py"),
    ("function", f"class A:\n  def f():\n{LONG_BODY}", "worker/x.py"),
    ("function", f"try:\n  pass\nexcept OSError:\n  def f():\n{LONG_BODY}", "worker/x.py"),
    ("function", f"def f():\n  def g():\n{LONG_BODY}", "worker/x.py"),
    ("function", f"static void f(int a,\n              int b) {{\n{NATIVE_BODY}}}", "kernels/linear/x.c"),
    (
        "function",
        f"match x:\n  case 1:\n    pass\n  case _:\n   def f():\n{textwrap.indent(LONG_BODY, ' ')}",
        "worker/x.py",
    ),
    ("function", f"def f():\n{LONG_BODY}\ndef f(): pass", "worker/x.py"),
    ("function", f"struct pair f(int a) {{\n{NATIVE_BODY}}}", "kernels/linear/x.c"),
    ("function", f"enum kind\nf(int a) {{\n{NATIVE_BODY}}}", "kernels/linear/x.c"),
    ("record", f"class A(NamedTuple):\n{FIELDS}\n    more: int", "worker/x.py"),
    ("record", f"class A(typing.TypedDict):\n{FIELDS}\n    more: int", "worker/x.py"),
    ("record", f"class A(Struct): pass\nclass B(A): pass\nclass C(x.B[int]):\n{FIELDS}\n    more: int", "worker/x.py"),
    ("record", f"class B(A):\n{FIELDS}\n    more: int\n@dataclass\nclass A: pass", "worker/x.py"),
    ("record", f"class StepPlan:\n{FIELDS}\n    more: int", "worker/x.py"),
    ("record", f"class Result(msgspec.Struct):\n{FIELDS}\n    more: int", "worker/x.py"),
    ("record", f"@dataclass(frozen=True)\nclass Limits:\n{FIELDS}\n    more: int", "layers/x.py"),
    ("parameters", f"def f({NAMES}, more): pass", "kernels/x.py"),
    ("parameters", f"class A:\n  def __init__(self, {NAMES}, *, more): pass", "worker/x.py"),
    ("parameters", f"class A:\n  def __call__(self, {NAMES}, more): pass", "worker/x.py"),
    ("parameters", f"class A:\n  def __new__(cls, {NAMES}, more): pass", "worker/x.py"),
]

WITHIN = [
    ("x = 1\n" * 450, "worker/x.py"),
    ("x = 1\n" * 900, "kernels/x.py"),
    ("x = 1\n" * 900, "text/schemas.py"),
    (f"def f():\n{SHORT_BODY}", "worker/x.py"),
    (f"def f():\n{LONG_BODY}", "kernels/x.py"),
    (f"void f(int a) {{\n{NATIVE_BODY[:-11]}}}\n\nvoid g(int a) {{\n{NATIVE_BODY[:-11]}}}\n", "kernels/linear/x.c"),
    (f"@dataclass\nclass A:\n{FIELDS}\n    more: ClassVar[int] = 1", "worker/x.py"),
    (f"class A:\n{FIELDS}\n    more: int", "worker/x.py"),
    (f"class A(Base):\n{FIELDS}\n    more: int", "worker/x.py"),
    (f"class A(Struct):\n{FIELDS}\nclass B(A):\n{FIELDS}", "worker/x.py"),
    (f"class _A:\n  def __call__(self, {NAMES}, more): pass", "worker/x.py"),
    (f"class A:\n  def f(self, {NAMES}): pass\n  def _f(self, {NAMES}, more): pass", "worker/x.py"),
    (f"@jit(do_not_specialize=['a'])\ndef f({NAMES}, more): pass", "kernels/x.py"),
]


def over(text: str, path: str) -> list[budgets.Count]:
    return list(budgets.over(budgets.counts([Source(path, text)])).values())


def label(value: object) -> str:
    return str(value).replace("\n", "; ")[:40]


@pytest.mark.parametrize(("budget", "text", "path"), OVER, ids=label)
def test_a_size_over_its_budget_is_seen(budget: str, text: str, path: str) -> None:
    assert budget in [count.budget for count in over(text, path)]


@pytest.mark.parametrize(("text", "path"), WITHIN, ids=label)
def test_a_size_within_its_budget_is_not(text: str, path: str) -> None:
    assert over(text, path) == []


def test_a_record_of_another_file_makes_its_subclasses_records() -> None:
    sources = [
        Source("worker/x.py", f"class B(A):\n{FIELDS}\n    more: int"),
        Source("contracts/x.py", "class A(Struct): pass"),
    ]
    assert list(budgets.over(budgets.counts(sources))) == ["record worker/x.py:B"]


def test_the_larger_of_two_functions_counts() -> None:
    shorter, longer = f"def f():\n{LONG_BODY}\n", f"def f():\n{LONG_BODY}\n    z = 1\n"
    for text in (shorter + longer, longer + shorter):
        assert [count.number for count in over(text, "worker/x.py")] == [62]


def test_rooms_are_counted_with_their_native_files_and_by_sub_rooms() -> None:
    sources = [
        Source("kv/x.py", "a\nb\n"),
        Source("entry/http/x.py", "a\n"),
        Source("entry/http/openai/x.py", "a\n" * 3),
        Source("kernels/linear/x.c", "a\n" * 4),
        Source("kernels/linear/parts/x.py", "a\n" * 5),
        Source("__init__.py", "a\n"),
    ]
    assert budgets.lines_by_room(sources) == {"entry/http": 1, "entry/http/openai": 3, "kernels/linear": 9, "kv": 2}
    assert budgets.rooms(sources) == {"entry", "kernels", "kv"}


def test_a_name_of_the_list_may_shrink_and_not_grow() -> None:
    count = budgets.Count("file", "kv/x.py", 500, 450)
    known = budgets.read_over("# budget name lines\n\nfile kv/x.py 500\n")
    assert list(budgets.complaints({count.key: count}, known)) == []
    grown = budgets.Count("file", "kv/x.py", 501, 450)
    assert "may only shrink" in next(budgets.complaints({grown.key: grown}, known))
    shrunk = budgets.Count("file", "kv/x.py", 480, 450)
    assert "lower its line to 480" in next(budgets.complaints({shrunk.key: shrunk}, known))
    assert "split it" in next(budgets.complaints({count.key: count}, {}))
    assert "remove its line" in next(budgets.complaints({}, known))


@pytest.mark.parametrize(
    "text",
    [
        "f(a, b,\n  c,\n  d,\n  e)  # fmt: skip",
        TABLE.lower(),
        TABLE.replace("(2, 3)", "[x for x in y]"),
        TABLE.replace("(2, 3)", "read(3)"),
        TABLE.replace("(2, 3)", "(2, Row(x.read()))"),
        "TABLE = {1: 2}  # fmt: skip",
        "TABLE = {1: 2}  # fmt:  skip",
        "TABLE = {1: 2}  #  fmt: skip",
        "TABLE = {1: 2}  #fmt:skip",
        "# fmt: off\nx = 1\n# fmt: on",
        "def f():\n    return [\n        1,\n        2,\n    ]  # fmt: skip",
    ],
    ids=label,
)
def test_statements_without_the_formatter_are_seen(text: str) -> None:
    assert list(budgets.unformatted(Source("kv/x.py", text)))


@pytest.mark.parametrize(
    "text",
    [
        TABLE,
        textwrap.indent(TABLE, "    ").join(("class A:\n", "\n")),
        TABLE.replace("(2, 3)", "Row(2, name='x')"),
        TABLE.replace("(2, 3)", "frozenset((2, 3))"),
    ],
    ids=label,
)
def test_tables_may_be_written_without_the_formatter(text: str) -> None:
    assert list(budgets.unformatted(Source("kv/x.py", text))) == []


def test_functions_in_cuda_have_their_names() -> None:
    text = 'extern "C" __global__ void __launch_bounds__(N, 2) f(int a) {\n    x = 1;\n}\n\nextern int g(int);\n'
    found = [count.name for count in budgets.counts([Source("kernels/x.cu", text)]) if count.budget == "function"]
    assert found == ["kernels/x.cu:f"]
