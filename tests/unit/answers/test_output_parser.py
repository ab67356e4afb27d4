"""Answers taken apart: recorded ones of every family, generated ones printed here and read back, and hostile ones,
all with the same events however the text is cut."""

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.answers.answer_events import CallArguments, CallBegins, Event, Thought, Words
from quire.answers.output_parser import OutputParser
from quire.answers.tool_reader import Reader
from quire.contracts.errors import ConfigError
from quire.text.chat import ChatTemplate
from quire.text.output_styles import OutputStyles, choose_styles, thinking_at_end
from quire.text.tool_formats import MESSAGE_FORMATS, REASONING_FORMATS, TOOL_FORMATS

from ...support.full import FULL

FORMATS = {row.names[0]: row for row in TOOL_FORMATS}
THINK = REASONING_FORMATS[0]
# Recorded cases that streamed arguments contradict, or that lose text. What we make of them, and why:
OURS: dict[str, dict[str, Any]] = {
    # the arguments are whole, and were passed on before the missing brace could be missed
    "hermes-07": {"content": None, "tool_calls": [{"name": "final_answer", "arguments": {"trigger": True}}]},
    # passed on before the fault, so they stay, and are not closed; what follows is content
    "deepseek_v3-08": {
        "content": "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "raw_arguments": '{"city": "Tokyo"\n',
        "tool_calls": [{"name": "get_weather", "arguments": None}],
    },
    # the marker was written, so it is shown, as that of any other malformed call
    "mistral-08": {"content": "[TOOL_CALLS] not json at all", "tool_calls": []},
}
UNRECORDED = {"glm47", "seed_oss", "minimax_m2", "gemma4", "cohere_command3", "kimi_k2"}
PARSERS = {"qwen3": "hermes", "deepseek_r1": "deepseek_v3"}  # families of reasoning: how their models call


def parse(styles: OutputStyles, pieces: Iterable[str], **options: Any) -> list[Event]:
    """The events of a text in pieces: adjacent ones of a kind joined, ids left out."""
    parser = OutputParser(styles, **options)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, CallBegins):
            merged.append(msgspec.structs.replace(event, call_id=""))
        elif isinstance(last, type(event)) and not isinstance(last, CallBegins):
            assert event.text
            merged[-1] = msgspec.structs.replace(last, text=last.text + event.text)
        else:
            assert event.text
            merged.append(event)
    assert parser.num_calls == sum(isinstance(event, CallBegins) for event in events)
    return merged


def joined(events: list[Event], kind: type[Thought] | type[Words]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def calls_of(events: list[Event]) -> list[tuple[str, str]]:
    """(name, text of the arguments) of each call; begun in order, its arguments after it."""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallBegins):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return calls


def style(name: str, reasoning: str | None = "deepseek_r1") -> OutputStyles:
    return choose_styles(None, name, reasoning)


def function(name: str, properties: dict[str, Any] | None = None) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def recorded(family: str, shared: Path) -> list[dict[str, Any]]:
    lines = (shared / "hf" / "tool_outputs.jsonl").read_text("utf-8").splitlines()
    return [case for case in map(json.loads, lines) if case["family"] == family]


def test_every_recorded_family_is_tested(shared: Path) -> None:
    lines = (shared / "hf" / "tool_outputs.jsonl").read_text("utf-8").splitlines()
    # gpt_oss: in test_message_parser.py
    assert {json.loads(line)["family"] for line in lines} == {*FORMATS, "qwen3", "deepseek_r1", "gpt_oss"} - UNRECORDED


@pytest.mark.parametrize("family", [*FORMATS, "qwen3", "deepseek_r1"])
def test_recorded_answers(shared: Path, family: str) -> None:
    for case in recorded(family, shared):
        styles = style(PARSERS.get(family, family), "mistral" if family == "mistral" else "deepseek_r1")
        options = {
            "tools": [function(tool) if isinstance(tool, str) else tool for tool in case["tools"]],
            "thinking": case.get("think_in_prompt", False),
        }
        text, expect = case["text"], {**case["expect"], **OURS.get(case["id"], {})}
        events = parse(styles, [text], **options)
        calls = calls_of(events)
        assert (joined(events, Thought).strip() or None) == ((expect["reasoning"] or "").strip() or None), case["id"]
        if "content" in OURS.get(case["id"], {}) or not case.get("content_free"):
            assert (joined(events, Words).strip() or None) == ((expect["content"] or "").strip() or None), case["id"]
        if not case.get("calls_free"):
            assert [name for name, _ in calls] == [call["name"] for call in expect["tool_calls"]], case["id"]
            for (_, arguments), call in zip(calls, expect["tool_calls"], strict=True):
                if call["arguments"] is None:
                    assert arguments == OURS.get(case["id"], case)["raw_arguments"]
                else:
                    assert json.loads(arguments) == call["arguments"], case["id"]
        for at in range(1, len(text), 1 if FULL else 3):
            assert parse(styles, [text[:at], text[at:]], **options) == events, (case["id"], at)
        assert parse(styles, text, **options) == events, case["id"]
        assert parse(styles, case.get("chunks", []) or [text], **options) == events, case["id"]


# -- round trips -----------------------------------------------------------------------------------

Call = tuple[str, dict[str, Any]]
FRAGMENTS = [
    "a",
    "b",
    " ",
    "\n",
    '"',
    "'",
    "\\",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ",",
    ":",
    "<",
    ">",
    "/",
    "é",
    "中",
    "😀",
    "</",
    "<tool_call>",
    "</tool_call>",
    "</think>",
    "null",
    "1",
    "\t",
    "\x7f",
    ";",
    "```",
    "[TOOL_CALLS]",
]
KEYS = ["a", "b", "city", "is_ok", "größe"]
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def words(rng: Random) -> str:
    return "".join(rng.choices(FRAGMENTS, k=rng.randrange(7)))


def value_of(rng: Random, kind: str, depth: int = 0) -> Any:
    """A random value of a JSON type."""
    match kind:
        case "integer":
            return rng.choice([0, -1, 7, 10**20, rng.randrange(-(10**6), 10**6)])
        case "number":
            return rng.choice([0.5, -1e300, 1e-7, rng.uniform(-9, 9)])
        case "array" | "object":
            kinds = [*TYPES.values(), "null"][: None if depth < 2 else 4]
            items = [value_of(rng, rng.choice(kinds), depth + 1) for _ in range(rng.randrange(4))]
            return items if kind == "array" else {words(rng): item for item in items}
    return words(rng) if kind == "string" else {"boolean": rng.random() < 0.5, "null": None}[kind]


def cut(rng: Random, text: str) -> list[str]:
    """The text in up to nine pieces."""
    edges = [0, *sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(9))), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def dumps(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def bare(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def odd(key: str) -> bool:
    return not key.isidentifier()


def quoted(value: Any) -> str:
    """A value as Gemma 4's chat template writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{quoted(key) if odd(key) else key}:{quoted(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(map(quoted, value)) + "]" if isinstance(value, list) else dumps(value)


def printed(name: str, calls: list[Call]) -> str:
    """Calls as the models of a family write them."""
    objects = [dumps({"name": call, "arguments": arguments}) for call, arguments in calls]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
        case "llama3_json":
            plain = [{"name": call, "parameters": arguments} for call, arguments in calls]
            return "<|python_tag|>" + "; ".join(  # every second one as the template shows tools
                dumps({"type": "function", "function": one} if at % 2 else one, indent=1)
                for at, one in enumerate(plain)
            )
        case "plain":
            return ";".join(dumps({"arguments": arguments, "name": call}) for call, arguments in calls)
        case "mistral":
            return "[TOOL_CALLS] [" + ", ".join(objects) + "]"
        case "deepseek_v3":
            return (
                "<｜tool▁calls▁begin｜>"
                + "\n".join(
                    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call}\n```json\n{dumps(arguments)}\n```<｜tool▁call▁end｜>"
                    for call, arguments in calls
                )
                + "<｜tool▁calls▁end｜>"
            )
        case "deepseek_v31":
            return (
                "<｜tool▁calls▁begin｜>"
                + "".join(
                    f"<｜tool▁call▁begin｜>{call}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"
                    for call, arguments in calls
                )
                + "<｜tool▁calls▁end｜>"
            )
        case "pythonic":
            return (
                "["
                + ", ".join(
                    f"{call}(" + ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")"
                    for call, arguments in calls
                )
                + "]"
            )
        case "qwen3_coder":
            return "\n".join(
                f"<tool_call>\n<function={call}>\n"
                + "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items())
                + "</function>\n</tool_call>"
                for call, arguments in calls
            )
        case "seed_oss":
            return "\n".join(
                f"<seed:tool_call>\n<function={call}>\n"
                + "".join(f"<parameter={key}>{bare(value)}</parameter>\n" for key, value in arguments.items())
                + "</function>\n</seed:tool_call>"
                for call, arguments in calls
            )
        case "minimax_m2":
            return (
                "<minimax:tool_call>\n"
                + "".join(
                    f'<invoke name="{call}">\n'
                    + "".join(
                        f'<parameter name="{key}">{bare(value)}</parameter>\n' for key, value in arguments.items()
                    )
                    + "</invoke>\n"
                    for call, arguments in calls
                )
                + "</minimax:tool_call>"
            )
        case "gemma4":
            return "".join(f"<|tool_call>call:{call}{quoted(arguments)}<tool_call|>" for call, arguments in calls)
        case "cohere_command3":
            listed = [
                {"tool_call_id": str(at), "tool_name": call, "parameters": arguments}
                for at, (call, arguments) in enumerate(calls)
            ]
            return "<|START_ACTION|>[\n    " + ",\n    ".join(map(dumps, listed)) + "\n]<|END_ACTION|>"
        case "kimi_k2":
            return (
                "<|tool_calls_section_begin|>"
                + "".join(
                    f"<|tool_call_begin|>functions.{call}:{at}<|tool_call_argument_begin|>{dumps(arguments)}"
                    "<|tool_call_end|>"
                    for at, (call, arguments) in enumerate(calls)
                )
                + "<|tool_calls_section_end|>"
            )
        case "glm45":
            return "\n".join(
                f"<tool_call>{call}\n"
                + "".join(
                    f"<arg_key>{key}</arg_key>\n<arg_value>{bare(value)}</arg_value>\n"
                    for key, value in arguments.items()
                )
                + "</tool_call>"
                for call, arguments in calls
            )
        case "glm47":
            return "".join(
                f"<tool_call>{call}"
                + "".join(
                    f"<arg_key>{key}</arg_key><arg_value>{bare(value)}</arg_value>" for key, value in arguments.items()
                )
                + "</tool_call>"
                for call, arguments in calls
            )
        case "deepseek_v32":
            return (
                "<｜DSML｜function_calls>\n"
                + "".join(
                    f'<｜DSML｜invoke name="{call}">\n'
                    + "".join(
                        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{bare(value)}'
                        "</｜DSML｜parameter>\n"
                        for key, value in arguments.items()
                    )
                    + "</｜DSML｜invoke>\n"
                    for call, arguments in calls
                )
                + "</｜DSML｜function_calls>"
            )
    raise AssertionError(name)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_printed_calls_come_back(name: str, seed: int) -> None:
    rng = Random(seed)
    tools = {
        tool: {key: {"type": rng.choice([*TYPES.values(), "null"])} for key in KEYS}
        for tool in ("get", "get.weather", "mcp/f-2:a.b")
    }
    calls = [
        (tool, {key: value_of(rng, tools[tool][key]["type"]) for key in rng.sample(KEYS, rng.randrange(4))})
        for tool in rng.choices(list(tools), k=rng.randrange(1, 4))
    ]
    text = printed(name, calls)
    options = {"tools": [function(tool, properties) for tool, properties in tools.items()]}
    events = parse(style(name), ["Well. ", text], **options)
    assert joined(events, Words) == "Well."
    assert [(tool, json.loads(arguments)) for tool, arguments in calls_of(events)] == calls
    assert parse(style(name), ["Well. ", *cut(rng, text)], **options) == events


@pytest.mark.parametrize("name", FORMATS)
def test_calls_without_tools_are_content_and_others_names_too(name: str) -> None:
    text = f"Well. {printed(name, [('get', {'a': 1})])} "
    assert parse(style(name), text) == [Words(text)]
    assert parse(style(name), text, tools=[function("set")]) == [Words(text)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{}", {}),
        ("{ }", {}),
        ('{a:<|"|>x "y" {z}, [1]<|"|>}', {"a": 'x "y" {z}, [1]'}),
        ('{a : <|"|>x<|"|> , b : 1.5}', {"a": "x", "b": 1.5}),
        ("{a:true,b:null,c:None,d:-2}", {"a": True, "b": None, "c": None, "d": -2}),
        ('{a:[<|"|>x<|"|>,[],{b:<|"|><|"|>}]}', {"a": ["x", [], {"b": ""}]}),
        ('{<|"|>a b<|"|>:1,"c":2}', {"a b": 1, "c": 2}),
        ('{a:"x\\ny"}', {"a": "x\ny"}),
        ("{a:some words}", {"a": "some words"}),
        ('{a:<|"|>line\nbreak\\<|"|>}', {"a": "line\nbreak\\"}),
    ],
)
def test_arguments_in_gemmas_quotes(arguments: str, expected: dict[str, Any]) -> None:
    text = f"Well. <|tool_call>call:get{arguments}<tool_call|> So."
    events = parse(style("gemma4"), [text], tools=[function("get")])
    [(name, found)] = calls_of(events)
    assert (name, json.loads(found), joined(events, Words)) == ("get", expected, "Well.  So.")
    for at in range(1, len(text)):
        assert parse(style("gemma4"), [text[:at], text[at:]], tools=[function("get")]) == events, at


@pytest.mark.parametrize(
    ("arguments", "found", "words"),
    [
        ("{a:}", '{"a": ', "}<tool_call|>"),
        ("{a}", "{", "a}<tool_call|>"),
        ("{,a:1}", "{", ",a:1}<tool_call|>"),
        ("{a:1 b:2}", '{"a": "1 b"', ":2}<tool_call|>"),
        ("{a:" + "[" * 300, '{"a": ' + "[" * 200, "[" * 100 + "<tool_call|>"),
    ],
)
def test_faults_in_arguments_in_gemmas_quotes(arguments: str, found: str, words: str) -> None:
    events = parse(style("gemma4"), [f"<|tool_call>call:get{arguments}<tool_call|>"], tools=[function("get")])
    assert (calls_of(events), joined(events, Words)) == ([("get", found)], words)


def test_what_surrounds_the_content_of_coheres_models_is_dropped() -> None:
    styles = style("cohere_command3", "cohere_command3")
    text = "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b <c><|END_RESPONSE|>"
    for pieces in ([text], text):
        assert parse(styles, pieces) == [Thought("a"), Words("b <c>")]
    assert parse(styles, "<|START_TEXT|>b<|END_TEXT|>") == [Words("b")]
    called = "<|START_THINKING|>a<|END_THINKING|>" + printed("cohere_command3", [("get", {"a": 1})])
    parser = OutputParser(styles, tools=[function("get")])
    (begins,) = [event for event in parser.feed(called) if isinstance(event, CallBegins)]
    assert begins.call_id.startswith("call_")  # not "0", which the next turn has, too


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gemma4", "<|channel>thought\na\n<channel|>b", [Thought("a"), Words("b")]),
        ("gemma4", "<|channel>thought\n<channel|>b", [Words("b")]),
        ("seed_oss", "<seed:think>a</seed:think>b", [Thought("a"), Words("b")]),
        ("minimax_m2", "a\n</think>\n\nb", [Words("a\n</think>\n\nb")]),
    ],
)
def test_reasoning_of_further_families(name: str, text: str, expected: list[Event]) -> None:
    assert parse(style(name, name), [text]) == parse(style(name, name), text) == expected


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("'<seed:tool_call>' '</seed:think>' <function=x> <parameter=y>", "seed_oss", "seed_oss"),
        ("'<minimax:tool_call>' <invoke name= <think> '</think>'", "minimax_m2", "deepseek_r1"),
        ("'<|tool_call>call:' + function['name'] '<|channel>thought\\n<channel|>'", "gemma4", "gemma4"),
        ("<|START_THINKING|><|END_THINKING|><|START_ACTION|>[", "cohere_command3", "cohere_command3"),
        ("<tool_call> xml_tools </think>", "hermes", "deepseek_r1"),
        ("[THINK][/THINK][TOOL_CALLS]", "mistral", "mistral"),
        ("<|tool_calls_section_begin|> </think>", "kimi_k2", "deepseek_r1"),
        ("<start_of_turn>user", "-", "-"),
    ],
)
def test_marks_of_further_families(template: str, tools: str, reasoning: str) -> None:
    assert names(choose_styles(ChatTemplate({"default": template}))) == [tools, reasoning]


@pytest.mark.parametrize("name", FORMATS)
def test_without_parallel_the_first_call_is_all(name: str) -> None:
    text = printed(name, [("get", {"a": "x"}), ("get", {"a": "y"})])
    tools = [function("get", {"a": {"type": "string"}})]
    [(call, arguments)] = calls_of(parse(style(name), [text], tools=tools, parallel=False))
    assert (call, json.loads(arguments)) == ("get", {"a": "x"})


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "function", "function": {"name": "f", "parameters": {"a": "x"}}}',
        '{"function": {"parameters": {"a": "x"}, "name": "f"}, "type": "function"}',
        '{"type" : "function" , "function" : { "type": "function", "name": "f", "arguments": {"a": "x"} } , "id": "1"}',
    ],
)
@pytest.mark.parametrize("name", ["llama3_json", "hermes", "plain"])
def test_a_call_wrapped_as_tools_are_shown_is_one(name: str, text: str) -> None:
    start, end = ("<tool_call>", "</tool_call>") if name == "hermes" else ("", "")
    whole = f"a {start}{text}{end}"
    events = [Words("a"), CallBegins(0, "", "f"), CallArguments(0, '{"a": "x"}')]
    for at in range(len(whole)):
        assert parse(style(name), [whole[:at], whole[at:]], tools=TOOLS) == events, at
    assert parse(style(name), whole, tools=TOOLS) == events
    [begins] = [
        event
        for event in OutputParser(style(name), tools=TOOLS).feed(
            start + text.replace('"type"', '"id": "mine", "type"', 1)
        )
        if isinstance(event, CallBegins)
    ]
    assert (begins.call_id == "mine") == text.startswith('{"type"')  # one that comes late is not waited for


# -- streams ---------------------------------------------------------------------------------------

TOOLS = [function("f", {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": ["string", "null"]}})]


def test_a_model_without_a_format_is_read_in_the_plain_one() -> None:
    styles = OutputStyles(None, None, "")
    assert calls_of(parse(styles, ['{"name": "f", "arguments": {}}'], tools=TOOLS)) == [("f", "{}")]


def test_content_and_arguments_come_as_soon_as_they_are_known() -> None:
    parser = OutputParser(style("hermes", "none"), tools=TOOLS)
    steps: list[tuple[str, list[str]]] = [
        ("Hello", ["Hello"]),
        (" <", []),
        ("b> <tool", [" <b>"]),
        ('_call>{"name": "f", "arguments": {', []),
        ('"a": "x', ["f", '{"a": "x']),
        ("yz\\", ["yz"]),
        ('n", "b": 12', ['\\n", "b": ']),
        ("3}", ["123}"]),
        ("}", []),
        ("</tool_call>\nand", []),
    ]
    for text, told in steps[:-1]:
        events = parser.feed(text)
        assert [event.name if isinstance(event, CallBegins) else event.text for event in events] == told, text
    parser = OutputParser(style("qwen3_coder", "none"), tools=TOOLS)
    for text, told in [
        ("<function=f><parameter=a>", ["f"]),
        ("\nx<", ['{"a": "x']),
        ('/p"\n', ['</p\\"']),
        ("y", ["\\ny"]),
        ("\n</parameter>", ['"']),
        ("<parameter=b>1", [', "b": ']),
        ("2", []),
    ]:
        events = parser.feed(text)
        assert [event.name if isinstance(event, CallBegins) else event.text for event in events] == told, text


def test_reasoning_is_told_from_content() -> None:
    styles = style("hermes")
    assert parse(styles, "<think>\na <b> \n</think>\n\n c\n") == [Thought("a <b>"), Words("c\n")]
    assert parse(styles, " a\n\n</think>b", thinking=True) == [Thought("a"), Words("b")]
    assert parse(styles, "x <think>a</think>") == [Words("x <think>a</think>")]  # only an answer begins with it
    assert parse(styles, " \n") == [Words(" \n")]
    assert parse(OutputStyles(None, None, ""), "<think>a</think>", thinking=True) == [Words("<think>a</think>")]
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(styles, f"a <tool_call>{{ {call} b", thinking=True, tools=TOOLS) == [
        Thought("a <tool_call>{"),
        CallBegins(0, "", "f"),
        CallArguments(0, "{}"),
        Words("b"),
    ]
    assert parse(style("llama3_json"), 'a {"name": "f", "parameters": {}}</think>b', thinking=True, tools=TOOLS) == [
        Thought('a {"name": "f", "parameters": {}}'),
        Words("b"),
    ]


def test_ids_are_ours_or_the_models() -> None:
    def ids(name: str, text: str) -> list[str]:
        parser = OutputParser(style(name), tools=TOOLS)
        return [event.call_id for event in parser.feed(text) if isinstance(event, CallBegins)]

    first, second = ids("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2)
    assert first != second and first.startswith("call_")
    text = printed("kimi_k2", [("f", {}), ("f", {})])
    assert ids("kimi_k2", text) == ["functions.f:0", "functions.f:1"]
    first, second = ids("kimi_k2", text.replace("f:1", "f:0"))
    assert first == "functions.f:0" and second.startswith("call_")  # no id comes twice
    for bad in (r"\ud800", "ü", "x" * 65):  # which no client could send back
        [one] = ids("hermes", f'<tool_call>{{"id": "{bad}", "name": "f", "arguments": {{}}}}</tool_call>')
        assert one.startswith("call_")
    [drawn] = ids("mistral", '[TOOL_CALLS]f{"a": "x"}')
    assert len(drawn) == 9 and drawn.isalnum()  # other ids its templates refuse
    assert ids("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": "x"}') == ["abcdefghi"]
    assert ids("mistral", '[TOOL_CALLS][{"id": "123456789", "name": "f", "arguments": {}}]') == ["123456789"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": "x\ny\t"}', {"a": "x\ny\t"}),
        (r'{"a": "\d\"\u00e9\u12"}', {"a": '\\d"é\\u12'}),
        ('{"b": 1e999}', {"b": 1e999}),
        ('{"b": 1, "b": 2}', {"b": 2}),
        ('{"a": "\\ud800"}', {"a": "\ud800"}),
        ("{ }", {}),
    ],
)
def test_json_that_models_write(written: str, read: dict[str, Any]) -> None:
    events = parse(style("hermes"), f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>', tools=TOOLS)
    assert [json.loads(arguments) for _, arguments in calls_of(events)] == [read] and not joined(events, Words)


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ('{"a": nope}', '{"a": '),
        ('{"a": 01}', '{"a": '),
        ('{"a": 1,}', '{"a": 1,'),
        ('{"a" 1}', '{"a" '),
        ('{"a": [1}', '{"a": [1'),
        ('{"a": NaN}', '{"a": '),
        ('{"a": 1]', '{"a": 1'),
        ('{"a": [,]}', '{"a": ['),
        ('{"a": ' + "[" * 300, '{"a": ' + "[" * 200),
    ],
)
def test_a_fault_within_arguments_ends_them_unclosed(arguments: str, sent: str) -> None:
    events = parse(style("hermes"), f'<tool_call>{{"name": "f", "arguments": {arguments}', tools=TOOLS)
    assert calls_of(events) == [("f", sent)]
    assert joined(events, Words) == arguments[len(sent) :]


@pytest.mark.parametrize(
    ("name", "text", "sent"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 12', '{"a": 12'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x', '{"a": "x'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tr', '{"a": tr'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
        ("qwen3_coder", "<function=f><parameter=a>\nx</para", '{"a": "x</para'),
        ("mistral", '[TOOL_CALLS]f{"a" ', '{"a" '),
        ("qwen3_coder", "<function=f><parameter=b>1", '{"b": 1'),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_v", ""),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value> </tool_", '{"a": "x"'),
    ],
)
def test_a_text_that_ends_within_arguments_ends_them(name: str, text: str, sent: str) -> None:
    assert parse(style(name), text, tools=TOOLS) == [
        CallBegins(0, "", "f"),
        *([CallArguments(0, sent)] if sent else []),
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_had_to_come_and_was_cut_is_no_content(name: str) -> None:
    fmt, tools = FORMATS[name], [function("get", {"a": {"type": "string"}})]
    opening, before, between, _, _, _ = fmt.printed
    shown = '"get"' if before.endswith(": ") else "get"
    for call in (printed(name, [("get", {"a": "x"}), ("get", {"a": "y"})]), opening + before + shown + between):
        for text in (call, f"<think>hm</think>\n\n{call}"):
            for at in range(len(text) + 1):
                for pieces in ([text[:at]], text[:at]) if FULL or at % 3 == 0 else ([text[:at]],):
                    parser = OutputParser(style(name), tools=tools, must=True)
                    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish(cut=True)
                    assert not joined(events, Words), (text[:at], events)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_cut_behind_a_tag_is_no_content(name: str) -> None:
    """If the model was free to call, the text before the call stays."""
    tools, call = [function("get", {"a": {"type": "string"}})], printed(name, [("get", {"a": "Q"})])
    tag = next((tag for tag in FORMATS[name].starts if call.startswith(tag)), None)
    if tag is None:
        return  # a mere bracket may begin any text
    for at in range(len(tag), call.rindex("Q") + 1):
        parser = OutputParser(style(name), tools=tools)
        events = parser.feed("Well. " + call[:at]) + parser.finish(cut=True)
        assert joined(events, Words).rstrip() == "Well.", (call[:at], events)
        parser = OutputParser(style(name), tools=tools)
        events = parser.feed(f"a {tag} and so on") + parser.finish(cut=True)
        assert joined(events, Words) == f"a {tag} and so on"


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        '{"name": "g", "arguments": {"a": 1}}',
        '{"name": "f"}',
        '{"name": "f", "arguments": 1}',
        '{"name": "f", "arguments": {a: 1}}',
        '{"name": "f", "size": 1, "arguments": {}}',
        '{"arguments": {"a": 1}}',
        '{"arguments": {"a": 1}, "name": "g"}',
        '{"type": "function", "function": {"name": "g", "parameters": {}}}',
        '{"function": "f", "arguments": {}}',
        '{"function": {"function": {"name": "f", "arguments": {}}}}',
        '{"name": 1, "arguments": {}}',
        '["f"]',
        '{"name": "f", "arguments',
    ],
)
def test_what_never_was_a_call_is_content(text: str) -> None:
    for name in ("hermes", "qwen3_coder", "glm45", "mistral", "deepseek_v31", "pythonic"):
        whole = f"a {(FORMATS[name].starts or ('',))[0]}{text}</tool_call> b"
        assert parse(style(name), whole, tools=TOOLS) == [Words(whole)], name


@pytest.mark.parametrize(
    ("value", "schema", "read"),
    [
        ("1", {"type": "integer"}, 1),
        ("1", {"type": "string"}, "1"),
        ("x", {"type": "integer"}, "x"),
        ("True", {"type": "boolean"}, True),
        ("{'a': (1,)}", {"type": "object"}, {"a": [1]}),
        ("null", {}, None),
        ("null", {"type": ["string", "null"]}, None),
        ("5", {"type": ["string", "null"]}, "5"),
        ('"5"', {}, "5"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "number"}]}, 5),
        ("[5]", {"$ref": "#/$defs/x"}, [5]),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"const": 1}, 1),
        ("1e999", {"type": "number"}, float("inf")),
        ("NaN", {"type": "number"}, "NaN"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("", {"type": "object"}, ""),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("__import__('os')", {}, "__import__('os')"),
        ("x", True, "x"),
        ("{", {"anyOf": [None]}, "{"),
        ("\x00", {"type": "integer"}, "\x00"),
        ("0", {"enum": 1, "type": {}}, 0),
    ],
)
def test_bare_values_take_the_type_of_their_schema(value: str, schema: Any, read: Any) -> None:
    text = f"<tool_call>f<arg_key>k</arg_key><arg_value>{value}</arg_value></tool_call>"
    [(_, arguments)] = calls_of(parse(style("glm45"), [text], tools=[function("f", {"k": schema})]))
    assert json.loads(arguments) == {"k": read}


def test_a_tag_that_says_the_type_wins() -> None:
    text = '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'
    text += '<｜DSML｜parameter name="b" string="true">1</｜DSML｜parameter></｜DSML｜invoke>'
    assert calls_of(parse(style("deepseek_v32"), text, tools=TOOLS)) == [("f", '{"a": 1, "b": "1"}')]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("[f(a='x', b=-1)]", {"a": "x", "b": -1}),
        ("[f(**{'a-b': true, 'c': [null, 1.5]})]", {"a-b": True, "c": [None, 1.5]}),
        (r"[f(a='\d\'\x41\ud83d\ude00')]", {"a": "\\d'A😀"}),
        ('[f(a="]) }")]', {"a": "]) }"}),
        ("[ f ( ) ]", {}),
        ("[f('x')]", None),
        ("[f(a=g())]", None),
        ("[f(a=1e999)]", None),
        ("[f(a=b'')]", None),
        ("[f(**1)]", None),
        ("[f(a={1, 2})]", None),
        ("[f(a='\x00')]", None),
        ("[f(a=" + "9" * 5000 + ")]", None),
        ("[f(a=1)(b=2)]", {"a": 1}),
        ("[f(a=" + "[" * 300 + "]" * 300 + ")]", None),
        ("[f(a=" + "-" * 9000 + "1)]", None),
        ("[f(a=f'{1}')]", None),
        ("[f(a=" + "1+" * 9000 + "1)]", None),
        (r"[f(a='\N{no}')]", None),
        ("[f(a=1", None),
        ("[f(a='", None),
    ],
)
def test_python_is_parsed_and_never_evaluated(text: str, read: dict[str, Any] | None) -> None:
    events = parse(style("pythonic"), text, tools=TOOLS)
    if read is None:
        assert events == [Words(text)]
    else:
        assert [json.loads(arguments) for _, arguments in calls_of(events)] == [read]


PARTS = [
    *FRAGMENTS,
    '{"type": "function", "function": ',
    "f",
    "a",
    '"name"',
    '"arguments"',
    '"parameters"',
    '{"name": "f", "arguments": {',
    '"a": "',
    '"}}',
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "function",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "json",
    "<function=f>",
    "<parameter=a>",
    "<parameter=b>",
    "</parameter>",
    "</function>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<｜DSML｜function_calls>",
    '<｜DSML｜invoke name="f">',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="a" string="true">',
    "</｜DSML｜parameter>",
    "[f(",
    "a='",
    "b=1",
    "')]",
    "<|python_start|>",
    "<|python_tag|>",
    "[ARGS]",
    "[CALL_ID]",
    "<think>",
    "</think>",
    "1e999",
    "-",
    "\\u",
    "\ud800",
    "\x00",
]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), thinking=st.booleans())
def test_hostile_text_is_cut_anywhere_and_not_lost(name: str, seed: int, thinking: bool) -> None:
    rng = Random(seed)
    text = "".join(rng.choices(PARTS, k=rng.randrange(20)))
    options: dict[str, Any] = {"tools": TOOLS, "thinking": thinking}
    events = parse(style(name), [text], **options)
    assert parse(style(name), cut(rng, text), **options) == events
    assert parse(style(name), text, **options) == events
    plain = parse(style(name, "none"), [text], tools=TOOLS)
    if not calls_of(plain):
        assert joined(plain, Words) == text


@pytest.mark.parametrize(
    "unit",
    [
        "<",
        "{",
        "[",
        " ",
        "<tool_call>",
        '{"a":',
        '{"arguments":',
        '{"function":',
        "[f(",
        "[TOOL_CALLS]f",
        "\n<parameter=",
        "<function=f><parameter=b>",
        "<tool_call>f<arg_key>",
        "a ",
        '"',
    ],
)
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "mistral", "pythonic", "llama3_json"])
def test_work_grows_with_the_text(unit: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of functions while a text is read, and characters that a piece finds waiting, for one text and a double."""
    waiting: list[int] = []
    push = Reader.push
    monkeypatch.setattr(
        Reader,
        "push",
        lambda reader, text, over=False: (push(reader, text, over=over), waiting.append(len(reader._text) - len(text))),
    )

    def work(text: str, size: int) -> int:
        count = 0

        def look(*_: Any) -> None:
            nonlocal count
            count += 1

        parser = OutputParser(style(name), tools=TOOLS)
        sys.setprofile(look)
        for at in range(0, len(text), size):
            parser.feed(text[at : at + size])
        parser.finish()
        sys.setprofile(None)
        return count

    opened = '<tool_call>{"name": "f", "arguments": {"a": "' if unit == '"' else ""
    for size in (1, 10**6):
        waiting.clear()
        once, twice = (work(opened + unit * count, size) for count in (100, 200))
        assert twice < 2.2 * once + 200 and max(waiting) < 80


def test_arguments_of_any_length() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + r"x\"\\\u0041" * 9
    text += "y" * 60_000 + '"}}</tool_call>'
    assert len(calls_of(parse(style("hermes"), text, tools=TOOLS))[0][1]) > 60_000


# -- the choice ------------------------------------------------------------------------------------

CHOSEN = """chatml - -; deepseek_r1 deepseek_v3 deepseek_r1; deepseek_r1_0528 deepseek_v3 deepseek_r1;
deepseek_r1_distill_llama deepseek_v3 deepseek_r1; deepseek_r1_distill_qwen deepseek_v3 deepseek_r1;
deepseek_r1_llamacpp deepseek_v3 deepseek_r1; deepseek_r1_tools_vllm deepseek_v3 deepseek_r1; deepseek_v2_chat - -;
deepseek_v3 deepseek_v3 -; deepseek_v3.1 deepseek_v31 deepseek_r1; deepseek_v3.1_tools_vllm deepseek_v31 deepseek_r1;
deepseek_v3.2 deepseek_v32 deepseek_r1; deepseek_v3.2_exp deepseek_v31 deepseek_r1;
deepseek_v3_tools_vllm deepseek_v3 -;
glm4.5 glm45 deepseek_r1; glm4.6 glm45 deepseek_r1; glm4.7_flash glm47 deepseek_r1; glm5 glm47 deepseek_r1;
glm5.2 glm47 deepseek_r1; gpt_oss harmony harmony; hermes2_pro_tool_use hermes -;
hermes3_tool_use hermes -; hermes_vllm hermes -;
llama3.1 llama3_json -; llama3.1_json_vllm llama3_json -; llama3.2 llama3_json -; llama3.2_json_vllm llama3_json -;
llama3.2_pythonic pythonic -; llama3.3 llama3_json -; llama4_pythonic pythonic -; mistral_7b_v0.3 mistral -;
mistral_nemo mistral -; mistral_parallel_vllm mistral -; mistral_vllm mistral -; mixtral_8x7b_v0.1 - -;
qwen2.5 hermes -; qwen3 hermes deepseek_r1; qwen3_coder qwen3_coder -; qwen3_coder_vllm qwen3_coder -;
qwen3_hub_rev2 hermes deepseek_r1; qwen3_instruct_2507 hermes deepseek_r1; qwen3_thinking_2507 hermes deepseek_r1"""
MODELS = """DeepSeek-R1 deepseek_v3 deepseek_r1; DeepSeek-V2-Lite - -; DeepSeek-V3 deepseek_v3 -;
GLM-4.5 glm45 deepseek_r1;
Llama-3.1-8B-Instruct llama3_json -; Mistral-7B-Instruct-v0.3 mistral -; Mixtral-8x7B-Instruct-v0.1 - -;
Qwen2.5-7B-Instruct hermes -; Qwen3-8B hermes deepseek_r1; gpt-oss-20b - -"""


def table(text: str) -> list[list[str]]:
    return [row.split() for row in text.split(";")]


def names(styles: OutputStyles) -> list[str]:
    return [
        row.names[0] if row else "-" for row in (styles.messages or styles.tools, styles.messages or styles.reasoning)
    ]


def test_every_template_chooses_its_styles(shared: Path) -> None:
    sources = {path.stem: path.read_text("utf-8") for path in (shared / "hf" / "templates").glob("*.jinja")}
    chosen = {name: choose_styles(ChatTemplate({"default": source})) for name, source in sources.items()}
    assert [[name, *names(chosen[name])] for name in sorted(chosen)] == sorted(table(CHOSEN))
    both = ChatTemplate({"default": "", "tool_use": sources["hermes3_tool_use"]})
    assert names(choose_styles(both)) == ["hermes", "-"]


def test_every_model_chooses_its_styles(shared: Path) -> None:
    chosen = {row[0]: choose_styles(ChatTemplate.load(shared / "hf" / row[0])) for row in table(MODELS)}
    assert [[name, *names(styles)] for name, styles in chosen.items()] == table(MODELS)


def test_names_win_and_unknown_ones_are_refused() -> None:
    template = ChatTemplate({"default": "<tool_call></think>"})
    chosen = choose_styles(template)
    assert names(chosen) == ["hermes", "deepseek_r1"]
    assert chosen.why == (
        "tool calls: hermes, for '<tool_call>' in the chat template; "
        "reasoning: deepseek_r1, for '</think>' in the chat template"
    )
    assert names(choose_styles(template, "qwen3_xml", "mistral")) == ["qwen3_coder", "mistral"]
    assert names(choose_styles(template, "none", "none")) == ["-", "-"]
    assert names(choose_styles(None)) == ["-", "-"]
    for name in (name for row in TOOL_FORMATS for name in row.names):
        assert choose_styles(None, name).tools
    for name in (name for row in REASONING_FORMATS for name in row.names):
        assert choose_styles(None, None, name).reasoning
    with pytest.raises(ConfigError, match="--tool-call-parser 'hremes' is not known, .* one of .*hermes.*, or none"):
        choose_styles(template, "hremes")
    with pytest.raises(ConfigError, match="--reasoning-parser 'gpt' is not known, .* give one of deepseek_r1"):
        choose_styles(template, None, "gpt")


def test_messages_hold_calls_and_reasoning_so_that_one_name_means_both() -> None:
    template = ChatTemplate({"default": "<|start|>assistant<|channel|>analysis<|message|><tool_call></think>"})
    for chosen in (choose_styles(template), choose_styles(template, "none")):
        assert names(chosen) == ["harmony", "harmony"]
        assert chosen.why == "tool calls and reasoning: harmony, for '<|start|>assistant' in the chat template"
    for name in MESSAGE_FORMATS[0].names:
        for asked in ((name,), (None, name), (name, "harmony"), ("none", name)):
            assert names(choose_styles(None, *asked)) == ["harmony", "harmony"]
    assert choose_styles(None, "openai").why == "tool calls and reasoning: harmony, as asked"
    assert names(choose_styles(template, "none", "none")) == ["-", "-"]
    assert names(choose_styles(template, "hermes")) == ["hermes", "deepseek_r1"]
    assert names(choose_styles(template, None, "mistral")) == ["hermes", "mistral"]
    for pair in (("openai", "deepseek_r1"), ("hermes", "openai_gptoss"), ("openai", "none"), (None, "none")):
        with pytest.raises(ConfigError, match="do not go together.* Give harmony, or none for both"):
            choose_styles(template, *pair)
    assert names(choose_styles(template, token_id=lambda token: None)) == ["hermes", "deepseek_r1"]
    with pytest.raises(ConfigError, match="has no token <|start|>"):
        choose_styles(template, "openai", token_id=lambda token: None)


def test_whether_a_prompt_ends_within_reasoning(shared: Path) -> None:
    def ends(name: str, content: str = "Hi <think> hi", **options: Any) -> bool:
        template = ChatTemplate({"default": (shared / "hf" / "templates" / f"{name}.jinja").read_text("utf-8")})
        prompt = template.render([{"role": "user", "content": content}], **options)
        return thinking_at_end(prompt, choose_styles(template))

    assert [ends(name) for name in ("qwen3_thinking_2507", "deepseek_r1", "glm4.7_flash", "glm5.2")] == [True] * 4
    assert [ends(name) for name in ("qwen3", "glm4.5", "deepseek_v3.1", "mistral_nemo", "llama3.1")] == [False] * 5
    assert not ends("qwen3", enable_thinking=False) and not ends("glm4.7_flash", enable_thinking=False)
    assert ends("deepseek_v3.1", thinking=True)
    assert thinking_at_end("<|im_start|>assistant\n<think>\nSo far", style("hermes"))
    assert not thinking_at_end("<|im_start|>assistant\n<think>", style("hermes", "none"))
