"""Templates and arguments that want too much: they end with an error of their own, here or in a child, and what is
cheap never leaves this process."""

import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from quire.contracts.errors import EngineClosed, InvalidParameter, RequestFailed
from quire.text import sandbox as sandbox_module
from quire.text.chat import ChatTemplate
from quire.text.children import Children
from quire.text.sandbox import Sandbox
from quire.text.sandbox_meter import BUDGET, TooCostly

from ...support.full import full_rows

USER = {"role": "user", "content": "hi"}
DOUBLE = "{%% set ns = namespace(x=%s, s='b') %%}{%% for i in range(%d) %%}{%% set ns.x = %s %%}{%% endfor %%}"
TEXTS = (
    "{% set ns = namespace(l=['a'], s='b') %}{% for i in range(15) %}{% set ns.l = ns.l + ns.l %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
)
HOSTILE = {
    "text times": "{{ 'a' * 500000000 }}",
    "list times": "{{ ([0] * 500000000) | length }}",
    "loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "tree of macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    "callers": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}{% macro g(n) %}{% if n %}{% call f() %}"
    "{{ g(n - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ g(60) }}",
    "blocks": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "width": "{{ '%9999999999d' % 1 }}",
    "starred width": "{{ '%*d' % (999999999, 1) }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "filter format": "{{ '%999999999s' | format(1) }}",
    "join": TEXTS + "{{ ns.s.join(ns.l) }}",
    "filter join": TEXTS + "{{ ns.l | join(ns.s) }}",
    "replace": TEXTS + "{{ ns.s.replace('b', ns.s) }}",
    "filter replace": TEXTS + "{{ ns.s | replace('b', ns.s) }}",
    "center": "{{ 'a' | center(999999999) }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "tabs": "{{ '\t'.expandtabs(999999999) }}",
    "indent": "{{ 'a' | indent(999999999, true) }}",
    "json indent": "{{ [[1]] | tojson(indent=999999999) }}",
    "batch": "{{ 'a' | batch(999999999, 'x') | list | length }}",
    "map": "{{ range(100000) | map('string') | map('center', 100000) | list | length }}",
    "lorem": "{{ lipsum(n=10000000) }}",
    "doubled text": DOUBLE % ("'a'", 60, "ns.x + ns.x"),
    "doubled by tilde": DOUBLE % ("'a'", 60, "ns.x ~ ns.x"),
    "doubled list": DOUBLE % ("[1]", 60, "ns.x + ns.x"),
    "doubled by default": DOUBLE % ("'a'", 60, "none | default(ns.x + ns.x, true)"),
    "doubled in a namespace": "{% set ns = namespace(n=namespace(x='a')) %}{% for i in range(60) %}"
    "{% set ns.n = namespace(x=ns.n.x + ns.n.x) %}{% endfor %}",
    "doubled arguments": "{% macro f(x, n) %}{% if n %}{{ f(x + x, n - 1) }}{% endif %}{% endmacro %}{{ f('a', 60) }}",
    "doubled blocks": "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "printed often": DOUBLE % ("'a'", 20, "ns.x + ns.x") + "{% for i in range(100000) %}{{ ns.x }}{% endfor %}",
    "constants": "{% for i in range(15000) %}" + "x" * 10000 + "{% endfor %}",
    "doubled JSON": "{% set ns = namespace(l=[], s='b') %}{% for i in range(16) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{% set ns.l = [ns.s] %}{% for i in range(14) %}{% set ns.l = ns.l + ns.l %}"
    "{% endfor %}{{ ns.l | tojson }}",
    "doubled messages": DOUBLE % ("messages", 14, "ns.x + ns.x") + "{{ (ns.x | tojson * 1000) | length }}",
    "shared list": DOUBLE % ("[1]", 60, "[ns.x, ns.x]") + "{{ ns.x }}",
    "shared dict": DOUBLE % ("1", 60, "dict(a=ns.x, b=ns.x)") + "{{ ns.x | string }}",
    "shared as JSON": DOUBLE % ("1", 60, "{'a': ns.x, 'b': ns.x}") + "{{ ns.x | tojson }}",
    "shared namespaces": DOUBLE % ("1", 60, "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "shared by tilde": DOUBLE % ("1", 60, "namespace(a=ns.x, b=ns.x)") + "{{ '' ~ ns.x }}",
    "compared dicts": DOUBLE % ("1", 60, "dict(a=ns.x, b=ns.x)")
    + DOUBLE.replace("ns", "it") % ("1", 60, "dict(a=it.x, b=it.x)")
    + "{{ ns.x == it.x }}",
    "compared": "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "huge dict": "{% set ns = namespace(d={}) %}{% for i in range(100000) %}"
    "{% set ns.d = dict(ns.d, **{i | string: 'a' * 10000}) %}{% endfor %}",
    "power": "{{ (9 ** 999999999) > 1 }}",
    "squares": "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "class": "{{ ''.__class__.__mro__ }}",
    "class by filter": "{{ ('' | attr('__class__')).x }}",
    "class by format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "globals": "{{ cycler.__init__.__globals__.os }}",
    "a list that grows": "{{ messages.append(1) }}",
    "other files": "{% include 'x' %}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long": "{{ x }}" * 100_000,
    "no template": "{% if %}",
}
OWN = {name: source for name, source in HOSTILE.items() if name != "no template"}
OFTEN = [name for at, name in enumerate(HOSTILE) if at % 2 == 0 or name in ("loops", "class")]  # each kills a child


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox(seconds=30)
    yield box
    box.close()


@pytest.fixture(scope="module")
def small_sandbox() -> Iterator[Sandbox]:
    """With limits that are met soon."""
    box = Sandbox(seconds=0.25, memory=128 * 2**20)
    yield box
    box.close()


@pytest.fixture
def request_template(sandbox: Sandbox) -> Any:
    """A template that a request brings, by its source."""
    return ChatTemplate({}, {"bos_token": "<s>"}, sandbox=sandbox).replaced


@pytest.mark.parametrize("name", [*OFTEN, *full_rows(name for name in HOSTILE if name not in OFTEN)])
def test_a_strangers_template_ends_as_an_error_of_its_request(
    name: str, request_template: Any, small_sandbox: Sandbox
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        ChatTemplate({}, sandbox=small_sandbox).replaced(HOSTILE[name]).render([USER])
    assert 20 < len(str(caught.value)) < 300
    assert request_template("{{ bos_token }}{{ messages[0].content }}").render([USER]) == "<s>hi"


@pytest.mark.parametrize("name", OWN)
def test_the_models_own_template_stops_here_before_it_harms(name: str, sandbox: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((TooCostly, InvalidParameter)):
        ChatTemplate({"default": HOSTILE[name]}, sandbox=sandbox).render_here([USER])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_limits_name_what_was_met(request_template: Any, small_sandbox: Sandbox) -> None:
    with pytest.raises(InvalidParameter, match=r"more than 0\.25 s"):
        ChatTemplate({}, sandbox=small_sandbox).replaced(HOSTILE["loops"]).render([USER])
    for name, words in (
        ("width", "512 MiB of memory"),
        ("no template", "line 1"),
        ("class", "__class__"),
        ("recursion", "RecursionError"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            request_template(HOSTILE[name]).render([USER])
    with pytest.raises(InvalidParameter, match="16 MiB of text") as caught:
        request_template("{{ 'a' * 17000000 }}").render([USER])
    assert caught.value.param == "chat_template"
    with pytest.raises(InvalidParameter, match="at least one message") as caught:
        request_template("a").render([])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": 10**8},
        {"n": "x" * 100},
        {"n": 10**400},
        {"rows": [[]] * 50_000},
        {"rows": ["x" * 3_000_000]},
    ],
)
def test_arguments_cannot_make_a_tame_template_costly(arguments: dict[str, Any], small_sandbox: Sandbox) -> None:
    source = (
        "{{ messages[0].content * n if n }}{% for row in rows or [] %}{% for other in rows %}{{ row }}"
        "{% endfor %}{% endfor %}"
    )
    template = ChatTemplate({"default": source}, sandbox=small_sandbox)
    with pytest.raises(TooCostly):
        template.render_here([USER], **arguments)
    if arguments != {"rows": ["x" * 3_000_000]}:
        with pytest.raises(InvalidParameter):
            template.render([USER], **arguments)


def test_what_is_too_long_for_here_is_rendered_apart_to_the_same_text(shared: Path, sandbox: Sandbox) -> None:
    for name in ("qwen3", "llama3.1", "deepseek_v3.1", "gpt_oss"):
        source = (shared / "hf" / "templates" / f"{name}.jinja").read_text("utf-8")
        template = ChatTemplate({"default": source}, {"bos_token": "<s>"}, sandbox=sandbox)
        talk = [USER, {"role": "assistant", "content": "ho \ud800 é"}, {"role": "user", "content": "x" * (BUDGET // 8)}]
        options: dict[str, Any] = {"tools": None, "documents": [{"a": float("inf")}], "enable_thinking": False}
        text = template.render_here(talk, **options)
        assert template.render_apart(talk, **options) == text and len(text) > BUDGET // 8
        long = [*talk[:-1], {"role": "user", "content": "x" * BUDGET}]
        with pytest.raises(TooCostly):
            template.render_here(long, **options)
        assert template.render(long, **options) == text.replace("x" * (BUDGET // 8), "x" * BUDGET)


@pytest.mark.parametrize(
    "source, text",
    [
        ("{{ ['a', 1, none] | join(', ') }}{{ [{'x': 1}] | join(attribute='x') }}", "a, 1, None1"),
        ("{{ 'aXbX' | replace('X', '-') }}{{ 'aXbX' | replace('X', '-', 1) }}", "a-b-a-bX"),
        ("{{ '%s/%s' | format('a', [1]) }}{{ '%(x)5d' | format(x=1) }}", "a/[1]    1"),
        ("{{ [1] | tojson(true) }}{{ {'a': [1]} | string }}{{ ('<' | e | string) + '<' }}", "[1]{'a': [1]}&lt;&lt;"),
        (
            "{% for x in range(3) | map('string') %}{{ x }}{{ loop.last }}{% endfor %}{{ 7 % 4 * 2 }}",
            "0False1False2True6",
        ),
        ("{% macro f(a, b='-') %}{{ a }}{{ b }}{% endmacro %}{{ f('x') }}{{ f(b='y', a=1) }}", "x-1y"),
        ("{% for x in 'ab' recursive %}{{ x }}{% if loop.depth == 1 %}{{ loop('c') }}{% endif %}{% endfor %}", "acbc"),
    ],
)
def test_the_dialect_is_one_wherever_it_is_rendered(
    source: str, text: str, request_template: Any, sandbox: Sandbox
) -> None:
    assert (
        ChatTemplate({"default": source}, sandbox=sandbox).render([USER])
        == text
        == request_template(source).render([USER])
    )


def test_one_child_serves_many_and_is_replaced_when_it_died() -> None:
    box = Sandbox(seconds=30)
    template = ChatTemplate({}, sandbox=box).replaced("{{ messages[0].content }}")
    assert [template.render([USER]) for _ in range(3)] == ["hi"] * 3
    (child,) = box._children.idle
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert template.render([USER]) == "hi"
    (second,) = box._children.idle
    assert second.pid != child.pid
    box.close()
    assert second.poll() is not None and not box._children.idle


def test_a_child_that_is_killed_as_it_is_taken_costs_nobody_an_answer() -> None:
    box = Sandbox(seconds=30)
    template = ChatTemplate({}, sandbox=box).replaced("{{ messages[0].content }}")
    template.render([USER])
    (child,) = box._children.idle
    child.kill()
    child.wait()
    child.poll = lambda: None  # type: ignore[method-assign]
    assert template.render([USER]) == "hi"
    box.close()


def test_a_rendering_ends_when_it_is_over() -> None:
    box, over = Sandbox(seconds=600), Future[None]()
    ended = list[InvalidParameter]()

    def run() -> None:
        with pytest.raises(InvalidParameter) as caught:
            ChatTemplate({}, sandbox=box).replaced(HOSTILE["loops"]).render_apart([USER], over)
        ended.append(caught.value)

    (thread := threading.Thread(target=run)).start()
    while not box._children.busy:
        assert thread.is_alive()
    over.set_result(None)
    thread.join(60)
    assert len(ended) == 1 and not box._children.busy and not box._children.idle
    with pytest.raises(InvalidParameter):
        ChatTemplate({}, sandbox=box).replaced("a").render_apart([USER], over)
    assert not box._children.idle  # none is started for what is over


@pytest.mark.parametrize("used", [False, True])
def test_after_its_end_a_sandbox_starts_no_child(used: bool) -> None:
    """Nor for a rendering that loses the child which it has: a used one would otherwise be replaced."""
    box = Sandbox(seconds=600)
    template = ChatTemplate({}, sandbox=box).replaced
    if used:
        template("a").render([USER])
    render = template(HOSTILE["loops"]).render
    (thread := threading.Thread(target=lambda: pytest.raises(EngineClosed, render, [USER]))).start()
    while not box._children.busy:
        assert thread.is_alive()
    (child,) = box._children.busy
    for _ in range(2):
        box.close()
    thread.join(60)
    assert child.poll() is not None and not thread.is_alive()
    with pytest.raises(EngineClosed):
        template("a").render([USER])
    assert not box._children.busy and not box._children.idle


def test_a_child_that_answers_after_the_end_is_not_kept() -> None:
    children = Children()
    child, _ = children.take("-c", "input()")
    children.close()
    children.give(child)
    assert child.poll() is not None and not children.idle and not children.busy


def test_a_child_is_told_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TZ", "UTC")
    box = Sandbox()
    child, _ = box._take()
    told = Path(f"/proc/{child.pid}/environ").read_text()
    assert "TZ=UTC" in told and "secret" not in told
    box.close()


def test_a_variable_may_have_any_name(sandbox: Sandbox) -> None:
    names = ["over", "given", "name", "context", "args", "kwargs", "environment", "options"]
    given: dict[str, Any] = dict.fromkeys([*names, "self"], 1)
    template = ChatTemplate({"default": "".join(f"{{{{ {name} }}}}" for name in names)}, sandbox=sandbox)
    assert template.render([USER], **given) == template.render_apart([USER], None, **given) == "1" * len(names)


def test_children_end_with_who_started_them(sandbox: Sandbox) -> None:
    box = Sandbox()
    ChatTemplate({}, sandbox=box).replaced("a").render([USER])
    (forgotten,) = box._children.idle
    del box
    assert forgotten.poll() is not None
    child, _ = sandbox._take()
    assert child.stdin is not None and child.stdout is not None
    child.stdin.close()  # as when the parent is gone
    assert child.wait(30) == 0
    child.stdout.close()


def test_a_child_that_cannot_start_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "CHILD", "quire.text")
    with pytest.raises(RequestFailed, match="cannot be started"):
        ChatTemplate({}, sandbox=Sandbox()).replaced("a").render([USER])


def test_a_child_holds_no_torch_and_opens_nothing(sandbox: Sandbox) -> None:
    child, _ = sandbox._take()
    limits = Path(f"/proc/{child.pid}/limits").read_text()
    maps = Path(f"/proc/{child.pid}/maps").read_text()
    assert "libtorch" not in maps and "tokenizers" not in maps
    assert [line.split()[3] for line in limits.splitlines() if line.startswith("Max open files")] == ["3"]
    sandbox._children.give(child)
    assert isinstance(child, subprocess.Popen)
