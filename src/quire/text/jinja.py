"""The Jinja environment that chat templates are written for.

It has the features of `transformers`: block trimming, `break`/`continue`, a `generation` tag (which here only shows its
body), `raise_exception`, `strftime_now`, and a `tojson` that does not escape HTML. It runs in Jinja's immutable
sandbox, which limits the objects that a template can use, not its running time.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class GenerationTag(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks text for training. Quire renders its body."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag; return a Jinja node that renders its body by `shown`."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("shown"), [], [], body).set_lineno(lineno)

    def shown(self, caller: Any) -> str:
        """Return the rendered text of the tag's body. `caller`: Jinja's function that renders the body."""
        return str(caller())


class PlainDict:
    """The function `dict(...)` of chat templates. Templates cannot reach the class `dict` and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class PlainNamespace(Namespace):
    """`namespace(...)` for templates; names that begin with an underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # self is positional only: a template may store "self"
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja environment in which chat templates are compiled."""

    def __init__(self, **options: Any) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], **options)
        self.filters["tojson"] = to_json
        self.globals.update(
            raise_exception=_raise_exception,
            dict=PlainDict(),
            namespace=PlainNamespace,
            strftime_now=lambda fmt: datetime.now().strftime(fmt),
        )


def compile_template(source: str) -> jinja2.Template:
    """Compile a template, which any thread may render. Raises `jinja2.TemplateSyntaxError`."""
    return ChatEnvironment().from_string(source)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set the name {name!r}: remove the underscore.")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode a value as JSON: the filter `tojson`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
