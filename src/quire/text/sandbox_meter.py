"""Metered rendering of chat templates: it counts the cost of each operation, and stops when the budget is used up.

Jinja's sandbox limits the objects that a template can use; this limits its time and memory. Calls, iterations and text
are paid for before they happen. Operations whose cost cannot be known before (a text times a number, a width, an
unpriced filter) are refused. `TooCostly` is not an error of the template: `sandbox` renders it in a child process.
"""

from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.visitor import NodeTransformer

from quire.text.jinja import ChatEnvironment, GenerationTag, PlainNamespace, to_json

BUDGET = 2**21  # in characters made; with STEP, at most 16,000 iterations and calls, 0.01 to 0.3 s
STEP = 128  # cost of an iteration or a call, which takes some microseconds
ITEM = 64  # cost of a value in a list
MOST_SOURCE = 2**17  # characters of a template, which take up to 5 s to compile; the longest in use has 17,000
FREE_METHODS = frozenset(
    "split rsplit splitlines strip lstrip rstrip startswith endswith removeprefix removesuffix lower upper title "
    "capitalize find rfind index count partition rpartition isdigit isalpha isspace items keys values get".split()
)
FREE_FILTERS = frozenset(
    "trim length count selectattr rejectattr select reject map first last default d safe items "
    "lower upper capitalize title int float".split()
)
CONSTANT = (nodes.Const, nodes.Pair, nodes.List, nodes.Tuple, nodes.Dict)
DICT_NAMES = frozenset(dir(dict))
HARMLESS = (str, LoopContext, PlainNamespace)  # only their attributes that begin with "_" are unsafe


class TooCostly(Exception):
    """The rendering costs more than its budget."""


class Bill(Context):
    """The Jinja context of one rendering, with its budget. `left`: unspent budget. Most methods are Jinja filters."""

    left = BUDGET

    def pay(self, cost: int) -> None:
        """Subtract a cost from the budget. Raises `TooCostly` when nothing is left."""
        self.left -= cost
        if self.left < 0:
            raise TooCostly

    @pass_context
    def keep(self, value: Any) -> Any:
        """Subtract the cost of a stored string, list or tuple from the budget. Return the value. Raises `TooCostly`."""
        if isinstance(value, (str, list, tuple)):
            self.pay(len(value) if isinstance(value, str) else ITEM * len(value))
        return value

    @pass_context
    def show(self, value: Any) -> Any:
        """Pay from the budget for a value's text; return the value.

        Raises `TooCostly` if the budget is used up, or if the value is a list, dict or object.
        """
        if not (value is None or isinstance(value, (str, int, float, Undefined))):
            raise TooCostly
        return self.keep(value)

    @pass_context
    def build(self, value: Any) -> Any:
        """Pay from the budget for the text of each value in a list or dict; return the list or dict.

        Raises `TooCostly` if the budget is used up, or if a value is itself a list, dict or object.
        """
        for part in value.values() if isinstance(value, dict) else value:
            self.show(part)
        return value

    @pass_context
    def loop(self, values: Any, cost: int) -> Any:
        """Pay from the budget `cost` for each of `values`. Return the values, as a list if they have no length."""
        values = values if hasattr(values, "__len__") else list(values)
        self.pay(cost * len(values))
        return values

    @pass_context
    def json(self, value: Any, *more: Any, **options: Any) -> str:
        """Return JSON: the filter `tojson`, charged to the budget.
        Raises TooCostly for a list with the same object twice, whose JSON could be far larger than the list."""
        parts = value if isinstance(value, list) else ()
        self.pay(sum(len(part) for part in parts if isinstance(part, str)))
        nested = [id(part) for part in parts if isinstance(part, (list, dict))]
        if len(set(nested)) < len(nested) or more or len(str(options)) > 100 or len(str(options.get("indent", ""))) > 2:
            raise TooCostly
        return str(self.keep(to_json(value, **options)))


class MeteredEnvironment(ChatEnvironment):
    """The Jinja environment of templates that count the cost of their rendering; see `compile_metered`."""

    context_class = Bill
    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(finalize=Bill.show)
        self.filters = {name: filter if name in FREE_FILTERS else _unpriced for name, filter in self.filters.items()}
        self.filters |= {
            "tojson": Bill.json,
            "string": _string,
            "list": pass_context(lambda bill, values: list(bill.loop(values, ITEM))),
            "format": _format,
            "quire show": Bill.show,
            "quire keep": Bill.keep,
            "quire loop": Bill.loop,
            "quire build": Bill.build,
        }
        self.known = [self.globals[name] for name in ("range", "namespace", "raise_exception", "strftime_now")]

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Tolls().visit(source), *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Get an attribute or key as Jinja does, with a fast path for keys of messages."""
        if type(obj) is dict and attribute in obj and attribute not in DICT_NAMES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return True if a template may read the attribute, as Jinja decides. A fast path serves `HARMLESS` types."""
        return not attr.startswith("_") if type(obj) in HARMLESS else super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `*` or `%` of numbers of at most 64 bits. Raises `TooCostly` for other values, and for `**`."""
        if operator == "**" or not all(isinstance(side, (int, float)) and abs(side) < 2**63 for side in (left, right)):
            raise TooCostly
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function; pay for its arguments and result. Raises `TooCostly` for functions of unknown cost."""
        kind = type(__obj)
        if kind is BuiltinMethodType:
            known = __obj.__name__ in FREE_METHODS and type(__obj.__self__) in (str, dict, list)
        else:
            known = (
                kind is Macro
                or isinstance(__obj, Undefined)
                or any(__obj is one for one in __self.known)
                or kind is MethodType
                and isinstance(__obj.__self__, GenerationTag)
            )
        if not known:
            raise TooCostly
        __context.pay(STEP)
        for value in (*args, *kwargs.values()):
            __context.keep(value)
        return __context.keep(__context.call(__obj, *args, **kwargs))


class _Tolls(NodeTransformer):
    """Adds filters that pay for loops, for lists and dicts, and for stored values."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _toll(node.iter, "loop", nodes.Const(STEP + text))
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        node.node = _toll(node.node, "keep")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_toll(part, "show") for part in node.nodes]
        return node

    def visit_List(self, node: Any) -> Any:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or all(isinstance(n, CONSTANT) for n in node.find_all(nodes.Node)):
            return node
        return _toll(node, "build")

    visit_Tuple = visit_Dict = visit_List

    def visit_Block(self, node: nodes.Node) -> NoReturn:
        raise TooCostly  # such a node makes another context, without the budget

    visit_With = visit_Include = visit_Import = visit_FromImport = visit_Extends = visit_Block


def compile_metered(source: str) -> jinja2.Template | None:
    """Compile a template whose rendering raises `TooCostly` above a budget; None if its cost cannot be counted or it is
    too long. Raises `jinja2.TemplateSyntaxError`."""
    try:
        return MeteredEnvironment().from_string(source) if len(source) <= MOST_SOURCE else None
    except (TooCostly, RecursionError):
        return None


def _toll(node: Any, name: str, *args: nodes.Expr) -> Any:
    return nodes.Filter(node, f"quire {name}", list(args), [], None, None, lineno=node.lineno)


@pass_context
def _string(bill: Bill, value: Any) -> str:
    return value if isinstance(value, str) else str(bill.show(value))


@pass_context
def _format(bill: Bill, text: Any, *values: Any, **named: Any) -> Any:
    return text % tuple(map(bill.show, values)) if text == "%s" and not named else _unpriced()


def _unpriced(*args: Any, **kwargs: Any) -> NoReturn:
    raise TooCostly
