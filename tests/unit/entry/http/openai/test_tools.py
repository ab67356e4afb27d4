"""Tools and structured output of a request, and their refusals by name."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from quire.answers.grammar import GrammarCompiler
from quire.contracts.errors import InvalidParameter, QuireError, RequestFailed
from quire.text.chat import ChatTemplate
from quire.text.load import TextSide

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


@pytest.fixture(autouse=True)
def long_context(scripted: Any) -> None:
    scripted.ready = msgspec.structs.replace(scripted.ready, max_model_len=2**17)
    scripted.text = replace(scripted.text, parsers=(None, "deepseek_r1"))


@pytest.fixture
def send_request(begin: Any, scripted: Any, make_client: Callable[..., Any], output: Any) -> Callable[..., Any]:
    """Send a request and return (the prompt's text, parameters) as the engine gets them."""

    def call(serve: Any = None, path: str = PATH, **fields: Any) -> Any:
        async def main() -> Any:
            body = fields if path != PATH else {"messages": USER, **fields}
            task, reply, _, stream = await begin(make_client(scripted, **(serve or {})), path, body)
            stream.put(output("a", finish="stop"))
            stream.put(None)
            await task
            assert reply.status == 200, reply.body
            return str(scripted.prompts[-1][0].text), scripted.params[-1]

        return asyncio.run(main())

    return call


def test_tools_are_shown_in_the_order_models_know(send_request: Callable[..., Any]) -> None:
    bare = {"function": {"description": "d", "strict": False, "name": "f"}, "type": "function"}
    prompt, params = send_request(tools=[bare])
    assert (
        '{"type": "function", "function": {"name": "f", "description": "d", "parameters": '
        '{"type": "object", "properties": {}, "additionalProperties": false}}}'
    ) in prompt
    assert params.structured_outputs is None


def test_idle_tools_are_shown_unless_the_server_hides_them(send_request: Callable[..., Any]) -> None:
    fields = {"tools": [tool("lookup")], "tool_choice": "none"}
    assert "lookup" in send_request(**fields)[0]
    assert "lookup" not in send_request({"exclude_tools_when_tool_choice_none": True}, **fields)[0]
    assert "lookup" in send_request({"exclude_tools_when_tool_choice_none": True}, tools=[tool("lookup")])[0]


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": named("f")}, True),
        ({"tool_choice": allowed("auto", "f", "g")}, False),
        ({"tool_choice": allowed("auto", "g")}, True),
        ({"tool_choice": allowed("required", "f", "g")}, True),
        ({"tools": [tool("f", strict=True)]}, True),
    ],
    ids=str,
)
def test_a_grammar_binds_only_where_it_is_asked_for(
    send_request: Callable[..., Any], fields: dict[str, Any], bound: bool
) -> None:
    _, params = send_request(**{"tools": [tool("f"), tool("g")], **fields})
    assert (params.structured_outputs is not None) == bound
    assert not bound or params.structured_outputs.grammar


def test_the_grammar_holds_what_may_be_called(send_request: Callable[..., Any]) -> None:
    tools = [tool("first"), tool("second"), tool("third")]
    for choice, names in (
        (named("second"), {"second"}),
        (allowed("required", "third", "first"), {"first", "third"}),
        ("required", {"first", "second", "third"}),
    ):
        grammar = send_request(tools=tools, tool_choice=choice)[1].structured_outputs.grammar
        assert {t["function"]["name"] for t in tools if t["function"]["name"] in grammar} == names


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [tool("a b")]}, "tools", "A-Za-z0-9_./:-"),
        ({"tools": [tool("a" * 129)]}, "tools", "A-Za-z0-9_./:-"),
        ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools", "tools[2].function.name"),
        ({"tools": [tool("f", parameters={"type": "array"})]}, "tools", "tools[0].function.parameters"),
        ({"tools": [tool("f", parameters="{}")]}, "tools", "an object"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "one of function"),
        ({"tools": [tool(f"f{i}") for i in range(513)]}, "tools", "at most 512"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": "any", "tools": [tool()]}, "tool_choice", "auto, none, required"),
        ({"tool_choice": named("g"), "tools": [tool()]}, "tool_choice", "'g'"),
        ({"tool_choice": named("g")}, "tool_choice", "'g'"),
        ({"tool_choice": allowed("auto", "g"), "tools": [tool()]}, "tool_choice", "'g'"),
        (
            {"tool_choice": {"type": "allowed_tools"}, "tools": [tool()]},
            "tool_choice",
            "needs the field 'allowed_tools'",
        ),
        ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice", "needs the field 'function'"),
        ({"functions": [{"name": "f"}]}, "functions", "send tools"),
        ({"function_call": {"name": "f"}}, "function_call", "send tool_choice"),
        (
            {"messages": [{"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": ""}}]},
            "messages",
            "send tool_calls",
        ),
    ],
    ids=str,
)
def test_bad_tools(refusal_of: Callable[..., Any], fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal_of(**fields)
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize("choice", ["auto", "required", named("f")], ids=str)
def test_beside_tools_only_json_is_taken(
    refusal_of: Callable[..., Any], send_request: Callable[..., Any], choice: Any
) -> None:
    fields = {"tools": [tool("f")], "tool_choice": choice}
    for structured in ({"regex": "a"}, {"choice": ["a"]}, {"grammar": 'start: "a"'}, {"json": False}):
        error = refusal_of(**fields, structured_outputs=structured)
        assert error["param"] == "tools" and 'tool_choice="none"' in error["message"], structured
    for structured in ({"json": CITY}, {"json": True}, {"json_object": True}):
        assert send_request(**fields, structured_outputs=structured)[1].structured_outputs.grammar


def test_a_template_without_tools_says_so(
    refusal_of: Callable[..., Any], send_request: Callable[..., Any], scripted: Any
) -> None:
    scripted.text = replace(scripted.text, chat_template=ChatTemplate({"default": "{{ messages[0].content }}"}))
    error = refusal_of(tools=[tool()])
    assert error["param"] == "tools" and "--chat-template" in error["message"] and '"none"' in error["message"]
    assert send_request(tools=[tool()], tool_choice="none")[0] == "hi"


def test_a_reasoning_effort_of_none_switches_thinking_off(send_request: Callable[..., Any], scripted: Any) -> None:
    source = "{{ messages[0].content }} {{ enable_thinking }}"
    scripted.text = replace(scripted.text, chat_template=ChatTemplate({"default": source}))
    assert send_request(reasoning_effort="none")[0] == "hi False"
    assert send_request(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})[0] == "hi True"
    assert send_request({"default_chat_template_kwargs": {"enable_thinking": 1}})[0] == "hi 1"
    assert (
        send_request(
            {"default_chat_template_kwargs": {"enable_thinking": 1}}, chat_template_kwargs={"enable_thinking": 2}
        )[0]
        == "hi 2"
    )


def test_an_effort_replaces_the_servers_default(send_request: Callable[..., Any], scripted: Any) -> None:
    source = "{{ messages[0].content }} {{ reasoning_effort | default('unset') }} {{ enable_thinking }}"
    scripted.text = replace(scripted.text, chat_template=ChatTemplate({"default": source}))
    high = {"default_chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": 1}}
    assert send_request(high)[0] == "hi high 1"
    assert send_request(high, reasoning_effort="low")[0] == "hi low 1"
    own = {"reasoning_effort": "medium"}
    assert send_request(high, reasoning_effort="low", chat_template_kwargs=own)[0] == "hi medium 1"
    assert send_request(high, chat_template_kwargs={"reasoning_effort": None})[0] == "hi unset 1"
    scripted.text = replace(scripted.text, chat_template=ChatTemplate({"default": "{{ enable_thinking }}"}))
    assert send_request(high, reasoning_effort="none")[0] == "False"


# --- structured output ----------------------------------------------------------------------------------------------

JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": CITY}}


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": JSON_SCHEMA}, "json", CITY),
        ({"structured_outputs": {"json": CITY}}, "json", CITY),
        ({"structured_outputs": {"json": "{}"}}, "json", "{}"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "grammar", "start: /a/"),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_object", True),
        ({"structured_outputs": {"json_object": False, "regex": "a"}}, "regex", "a"),
        (
            {"structured_outputs": {"json_object": False}, "response_format": {"type": "json_object"}},
            "json_object",
            True,
        ),
    ],
    ids=str,
)
def test_a_form_reaches_the_engine(
    send_request: Callable[..., Any], path: str, fields: dict[str, Any], kind: str, value: Any
) -> None:
    body = fields if path == PATH else {"prompt": "a", **fields}
    structured = send_request(path=path, **body)[1].structured_outputs
    assert getattr(structured, kind) == value and not structured.disable_any_whitespace


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None}},
    ],
    ids=str,
)
def test_free_text_stays_free(send_request: Callable[..., Any], fields: dict[str, Any]) -> None:
    assert send_request(**fields)[1].structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_object, json_schema, text"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format", "is missing"),
        ({"structured_outputs": {"json": CITY, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "not json_object=False alone"),
        (
            {"structured_outputs": {"json_object": False}, "response_format": {"type": "text"}},
            "structured_outputs",
            "not json_object=False alone",
        ),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", "yaml"),
        (
            {"structured_outputs": {"structural_tag": "a"}},
            "structured_outputs",
            'structural_tag is not implemented yet: send tools with "strict": true, '
            "or structured_outputs with a grammar.",
        ),
        *(
            ({"response_format": structured}, "response_format", "structural_tag is not implemented yet")
            for structured in ({"type": "structural_tag", "format": {}}, {"structures": [], "type": "structural_tag"})
        ),
        ({"structured_outputs": {"regex": "a"}, "response_format": JSON_SCHEMA}, "structured_outputs", "one of"),
        ({"guided_json": CITY}, "guided_json", 'structured_outputs instead: {"json"'),
    ],
    ids=str,
)
def test_bad_structured_outputs(refusal_of: Callable[..., Any], fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal_of(**fields)
    assert error["param"] == param and words in error["message"], error


def test_a_form_holds_after_the_reasoning(send_request: Callable[..., Any]) -> None:
    structured = {"response_format": JSON_SCHEMA}
    assert send_request(**structured)[1].structured_outputs.after is None
    thinking = send_request(**structured, chat_template_kwargs={"enable_thinking": True})[1].structured_outputs
    assert thinking.after == "</think>" and thinking.json == CITY


SMALL = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"answer": {}}}}}


def test_beside_tools_an_answer_is_calls_or_json(
    send_request: Callable[..., Any], refusal_of: Callable[..., Any]
) -> None:
    both = {"tools": [tool("lookup")], "response_format": SMALL}
    structured = send_request(**both)[1].structured_outputs
    grammar = structured.grammar
    assert "start: answer | calls" in grammar and '"answer"' in grammar and "lookup" in grammar
    assert structured.after is None
    assert (
        send_request(**both, chat_template_kwargs={"enable_thinking": True})[1].structured_outputs.after == "</think>"
    )
    assert "answer" not in send_request(**both, tool_choice="required")[1].structured_outputs.grammar
    assert send_request(**both, tool_choice="none")[1].structured_outputs.json
    error = refusal_of(tools=[tool()], structured_outputs={"regex": "a"})
    assert error["param"] == "tools" and '"none"' in error["message"]


@pytest.mark.parametrize(
    "texts",
    [('{"answer": 1}',), ('<tool_call>\n{"name": "lookup", "arguments": {"city": "Rome"}}\n</tool_call>',)],
    ids=["structured", "call"],
)
def test_the_grammar_of_both_takes_both(
    send_request: Callable[..., Any], text_side: TextSide, texts: tuple[str, ...]
) -> None:
    spec = send_request(tools=[tool("lookup")], response_format=SMALL)[1].structured_outputs.spec()
    tokenizer = text_side.tokenizer
    assert tokenizer is not None
    matcher = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size).compile(spec).fork()
    # By characters: as one token a tag may be none that a grammar speaks of.
    assert all(matcher.consume_token(i) for text in texts for char in text for i in tokenizer.encode(char, False))
    assert matcher.is_accepting()


def test_reasoning_that_a_model_begins_by_itself_is_begun_for_it(
    send_request: Callable[..., Any], scripted: Any
) -> None:
    """Its template shows how, where it switches it off; else nobody would know if the grammar holds from the start."""
    source = "{{ messages[0].content }}:{% if enable_thinking is false %}{{ '\\n<think>\\n\\n</think>' }}{% endif %}"
    scripted.text = replace(scripted.text, chat_template=ChatTemplate({"default": source}))
    structured = {"response_format": SMALL}
    prompt, params = send_request(**structured)
    assert prompt == "hi:\n<think>" and params.structured_outputs.after == "</think>"
    assert send_request()[0] == "hi:"
    prompt, params = send_request(**structured, chat_template_kwargs={"enable_thinking": False})
    assert prompt.endswith("</think>") and params.structured_outputs.after is None


def test_a_budget_of_reasoning(send_request: Callable[..., Any], scripted: Any, refusal_of: Callable[..., Any]) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 100}
    for fields, inside in (
        ({}, False),
        ({"response_format": SMALL}, False),
        ({"tools": [tool()], "tool_choice": "required"}, True),
    ):
        structured = send_request(**thinking, **fields)[1].structured_outputs
        assert (structured.after, structured.budget, structured.inside) == ("</think>", 100, inside)
        assert bool(structured.given) == bool(fields)
    assert send_request(**thinking | {"thinking_token_budget": -1})[1].structured_outputs is None
    # Told in a header: there is no reasoning.
    assert send_request(thinking_token_budget=100)[1].structured_outputs is None
    assert refusal_of(thinking_token_budget=-2)["param"] == "thinking_token_budget"
    source = "{{ messages[0].content }}:{% if enable_thinking is false %}{{ '\\n<think>\\n\\n</think>' }}{% endif %}"
    scripted.text = replace(scripted.text, chat_template=ChatTemplate({"default": source}))
    prompt, params = send_request(thinking_token_budget=0)
    assert prompt == "hi:\n<think>" and params.structured_outputs.budget == 0


def test_tags_that_are_special_tokens_are_shown(send_request: Callable[..., Any], scripted: Any) -> None:
    tokenizer = scripted.text.tokenizer

    def shown(**fields: Any) -> set[str]:
        params = send_request(**fields)[1]
        assert params.skip_special_tokens
        return {tokenizer.token_text(i) for i in params.shown_special_ids or ()}

    thoughts = {"<think>", "</think>"}  # in this vocabulary they are
    assert shown() == thoughts and thoughts <= shown(tools=[tool()]) <= thoughts | {"<tool_call>", "</tool_call>"}
    assert not send_request(tools=[tool()], skip_special_tokens=False)[1].skip_special_tokens
    scripted.text = replace(scripted.text, parsers=(None, "none"))
    assert not shown() and shown(tools=[tool()]) <= {"<tool_call>", "</tool_call>"}


BANANA = {"type": "object", "properties": {"a": {"type": "banana"}}, "required": ["a"]}
AS_FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": BANANA}}}


@pytest.fixture
def failure_of(begin: Any, scripted: Any, make_client: Callable[..., Any]) -> Callable[..., Any]:
    """The error of a request whose grammar the engine finds wrong, as it says it, or with another error of it."""

    def call(path: str = PATH, error: QuireError | None = None, **fields: Any) -> Any:
        async def main() -> Any:
            task, reply, _, stream = await begin(make_client(scripted), path, fields)
            tokenizer = scripted.text.tokenizer
            if error is None:
                with pytest.raises(InvalidParameter) as caught:
                    GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size).compile(
                        scripted.params[-1].structured_outputs.spec()
                    )
            stream.put(error or RequestFailed(str(caught.value), code="invalid_grammar"))
            await task
            assert reply.status == 400, reply.body
            return reply.error

        return asyncio.run(main())

    return call


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [tool(parameters=BANANA, strict=True)]}, "tools", "Invalid type: banana"),
        ({"tools": [tool(parameters=BANANA)], "tool_choice": "required"}, "tools", "Invalid type: banana"),
        (AS_FORM, "response_format", "Invalid type: banana"),
        (AS_FORM | {"tools": [tool()]}, "tools", "tools or response_format: the schema cannot be used: Invalid"),
        ({"structured_outputs": {"json": BANANA}}, "structured_outputs", "Invalid type: banana"),
        ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs", "start: foo"),
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_used_is_the_fault_of_the_field_it_came_in(
    failure_of: Callable[..., Any], fields: dict[str, Any], param: str, words: str
) -> None:
    error = failure_of(messages=USER, **fields)
    assert (error["code"], error["param"]) == ("invalid_grammar", param)
    assert words in error["message"] and "%json" not in error["message"] and "tail0" not in error["message"]


def test_routes_with_other_names_for_a_form_say_those(failure_of: Callable[..., Any]) -> None:
    structured = {"type": "json_schema", "name": "n", "schema": BANANA}
    error = failure_of("/v1/responses", input="hi", text={"format": structured})
    assert error["param"] == "text" and error["message"].startswith("text.format: the schema cannot be used: Invalid")


def test_a_form_that_the_allowed_tokens_cannot_meet(failure_of: Callable[..., Any]) -> None:
    for fields, name in (
        (AS_FORM, "response_format"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"tools": [tool()], "tool_choice": "required"}, "tools"),
    ):
        nothing = RequestFailed("request r failed: no_token.", code="no_token")
        error = failure_of(messages=USER, error=nothing, allowed_token_ids=[5], **fields)
        assert error["param"] == "allowed_token_ids"
        assert f"allowed_token_ids and {name}: no token is left" in error["message"]


def test_logprobs_of_given_tokens_need_logprobs(refusal_of: Callable[..., Any]) -> None:
    for path, fields in ((PATH, {}), ("/v1/completions", {"prompt": "a"})):
        assert refusal_of(path, logprob_token_ids=[1], **fields)["param"] == "logprob_token_ids"
