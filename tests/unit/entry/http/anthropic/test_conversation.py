"""Requests to Anthropic's API become prompts and parameters, or are refused by name."""

from typing import Any

import msgspec
import pytest

from .conftest import HELLO, PATH, WEATHER, Api

COUNT = "/v1/messages/count_tokens"


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(call: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **more}


def prompt(api: Api, *messages: Any, **fields: Any) -> str:
    """The lines of the prompt that messages become."""
    reply = api.told("Yes.", messages=list(messages), **fields)
    assert reply.status == 200, reply.body
    return api.prompt


def refusal(api: Api, **fields: Any) -> str:
    """Why a request is refused, which is the same for both routes."""
    replies = [api.ask(path, **fields) for path in (PATH, COUNT)]
    assert [reply.status for reply in replies] == [400, 400], replies[0].body
    messages = {reply.json["error"]["message"] for reply in replies}
    assert {reply.json["error"]["type"] for reply in replies} == {"invalid_request_error"} and len(messages) == 1
    assert not api.engine.prompts
    return messages.pop()


# --- what is taken --------------------------------------------------------------------------------------------------


def test_a_system_prompt_comes_first_in_either_form(api: Api) -> None:
    assert prompt(api, *HELLO, system="Be brief.") == "<|system|>Be brief.\n<|user|>hi\n<|assistant|>"
    cached = {"cache_control": {"type": "ephemeral"}}
    assert prompt(
        api, *HELLO, system=[text("a", **cached), text("b", **cached)], cache_control=cached["cache_control"]
    ).startswith("<|system|>a\nb\n<|user|>")
    assert prompt(api, *HELLO, {"role": "system", "content": "x"}, *HELLO) == (
        "<|user|>hi\n<|system|>x\n<|user|>hi\n<|assistant|>"
    )


def test_messages_of_one_role_are_one(api: Api) -> None:
    assert (
        prompt(
            api,
            user(text("a"), text("b")),
            {"role": "user", "content": "c"},
            assistant(text("d")),
            assistant(text("e")),
            *HELLO,
        )
        == "<|user|>a\nb\nc\n<|assistant|>d\ne\n<|user|>hi\n<|assistant|>"
    )


def test_an_answer_without_blocks_is_an_empty_turn(api: Api) -> None:
    empty = "<|user|>hi\n<|assistant|>\n<|user|>hi\n<|assistant|>"
    assert prompt(api, *HELLO, assistant(), *HELLO) == prompt(api, *HELLO, assistant(text("")), *HELLO) == empty


def test_earlier_turns_with_thinking_calls_and_results(api: Api) -> None:
    call = {"type": "tool_use", "id": "toolu_7", "name": "weather", "input": {"town": "Faro", "days": 2}}
    other = call | {"id": "functions.weather:1", "input": {}}
    shown = prompt(
        api,
        *HELLO,
        assistant(
            {"type": "thinking", "thinking": "Ask.", "signature": ""},
            {"type": "redacted_thinking", "data": "xyz"},
            text("Let me see."),
            call,
            other,
        ),
        user(
            result("toolu_7", "sun"),
            result("functions.weather:1", [text("no"), text("town")], is_error=True),
            {"type": "tool_result", "tool_use_id": "toolu_8"},
            text("And now?"),
        ),
        tools=[WEATHER],
    )
    assert (
        shown.partition("</tool_call>")[2]
        == """
<|user|>hi
<|assistant|><think>
Ask.
</think>
Let me see.<tool_call>
{"id": "7", "name": "weather", "arguments": {"town": "Faro", "days": 2}}
</tool_call><tool_call>
{"id": "functions.weather:1", "name": "weather", "arguments": {}}
</tool_call>
<|tool|>sun(7)
<|tool|>Error: no
town(functions.weather:1)
<|tool|>(8)
<|user|>And now?
<|assistant|>"""
    )


def test_the_id_of_a_call_comes_back_as_the_model_had_it(api: Api) -> None:
    said = '<tool_call>\n{"name": "weather", "arguments": {"town": "Faro"}}\n</tool_call>'
    answer = api.told(said, tools=[WEATHER]).json
    own = answer["content"][0]["id"].removeprefix("toolu_")
    assert own and not own.startswith("toolu_")
    shown = prompt(
        api,
        *HELLO,
        {"role": "assistant", "content": answer["content"]},
        user(result(answer["content"][0]["id"], "sun")),
        tools=[WEATHER],
    )
    assert f'"id": "{own}"' in shown and f"sun({own})" in shown


def test_a_last_message_of_the_assistant_is_continued(api: Api) -> None:
    assert prompt(api, *HELLO, assistant(text("Good"))).endswith("<|assistant|>Good")
    assert prompt(api, *HELLO, {"role": "assistant", "content": "Good d"}).endswith("<|assistant|>Good d")


def test_tools_are_shown_as_a_chat_shows_them(api: Api) -> None:
    shown = prompt(api, *HELLO, tools=[WEATHER | {"type": "custom", "cache_control": {"type": "ephemeral"}}])
    assert '"function": {"name": "weather", "description": "of a town", "parameters": {"type": "object"' in shown
    assert shown.startswith('[{"type": "function"')


def test_sampling_parameters(api: Api) -> None:
    prompt(api, *HELLO, max_tokens=17, temperature=0.5, top_p=0.25, top_k=3, stop_sequences=["x", "\n\n"])
    params = api.engine.params[-1]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (17, 0.5, 0.25, 3)
    assert list(params.stop) == ["x", "\n\n"] and params.logprobs is None and params.n == 1


@pytest.mark.parametrize(
    ("choice", "bound"),
    [
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        (None, False),
        ({"type": "tool", "name": "weather"}, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
    ],
)
def test_a_call_that_must_be_is_held_to_by_a_grammar(api: Api, choice: Any, bound: bool) -> None:
    prompt(api, *HELLO, tools=[WEATHER, WEATHER | {"name": "t" * 128}], tool_choice=choice)
    assert (api.engine.params[-1].structured_outputs is not None) == bound


def test_one_call_at_most(api: Api) -> None:
    said = '<tool_call>\n{"name": "weather", "arguments": {"town": "Faro"}}\n</tool_call>' * 2
    for alone in (False, True):
        choice = {"type": "auto", "disable_parallel_tool_use": alone}
        content = api.told(said, tools=[WEATHER], tool_choice=choice).json["content"]
        assert [block["type"] for block in content].count("tool_use") == (1 if alone else 2)


def test_an_answer_that_fits_a_schema(api: Api) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    prompt(api, *HELLO, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert api.engine.params[-1].structured_outputs.json == schema


def test_what_changes_no_answer_is_taken(api: Api) -> None:
    for edits in ([], [{"type": "clear_thinking_20251015", "keep": "all"}]):
        reply = api.told(
            "Yes.",
            metadata={"user_id": "u"},
            service_tier="auto",
            mcp_servers=[],
            container=None,
            context_management={"edits": edits},
        )
        assert reply.status == 200 and not reply.all("x-quire-warning")
    assert api.told("Yes.", anything=1).all("x-quire-warning") == ["unknown field 'anything'"]
    assert api.told("Yes.", output_config={"effort": "high"}).all("x-quire-warning") == [
        "output_config.effort is ignored: the chat template does not read it"
    ]


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user({"type": "image", "source": {}})], "messages[0].content[0]: 'image' is not implemented"),
        ([*HELLO, user(text("a"), {"type": "document", "source": {}})], "messages[1].content[1]: 'document'"),
        ([user(result("t", [{"type": "image", "source": {}}]))], "the content of a tool_result[0]: 'image'"),
        ([user({"type": "tool_use", "id": "t", "name": "f", "input": {}})], "messages[0].content[0]: 'tool_use'"),
        ([assistant(result("t", "x")), *HELLO], "messages[0].content[0]: 'tool_result'"),
        ([assistant({"type": "server_tool_use", "id": "t", "name": "f", "input": {}}), *HELLO], "server_tool_use"),
        ([user({"type": "text"})], "messages[0].content[0].text is missing"),
        ([user({"type": "tool_result", "content": "x"})], "messages[0].content[0].tool_use_id is missing"),
        ([*HELLO, assistant({"type": "tool_use", "id": "t", "input": {}}), *HELLO], "content[0].name is missing"),
        ([*HELLO, assistant({"type": "tool_use", "id": "t", "name": "f", "input": "{}"})], "input must be an object"),
        ([user()], "messages[0].content is an empty list"),
        ([], "messages must be a list"),
        ([{"role": "tool", "content": "x"}], "messages[0].role must be one of assistant, system, user"),
        ([*HELLO, assistant({"type": "tool_use", "id": "t", "name": "f", "input": {}})], "the answer continues it"),
        ([*HELLO, assistant({"type": "thinking", "thinking": "x", "signature": ""})], "the answer continues it"),
        ([*HELLO, assistant()], "the answer continues it"),
    ],
)
def test_messages_that_cannot_be_read(api: Api, messages: Any, words: str) -> None:
    assert words in refusal(api, messages=messages)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"system": [{"type": "image"}]}, "system[0]: 'image'"),
        ({"temperature": 1.5}, "temperature must be a number in [0"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": "x"}, "stop_sequences must be a list"),
        ({"model": None}, "model must be a string"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: 'web_search_20250305'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]: 'bash_20250124' is not implemented"),
        ({"tools": [WEATHER | {"input_schema": {"type": "string"}}]}, "must be the schema of an object"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name must be a string that matches"),
        ({"tools": [WEATHER, WEATHER]}, "there is another 'weather'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "tides"}}, "'tides', which is not among tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type must be one of any, auto, none, tool"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type must be one of"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
        ({"container": "c"}, "container is not implemented yet: the server runs no code"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not implemented"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management is not impl"),
        ({"output_format": {"type": "json_schema"}}, "send output_config.format"),
        ({"thread": {"id": "t"}}, "thread is not implemented"),
        ({"tools": [WEATHER | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema must be"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name: there is another"),
        (
            {"output_config": {"format": {"type": "text", "schema": {}}}},
            "output_config.format.type must be one of json",
        ),
        ({"output_config": {"task_budget": 1}}, "output_config has an unknown field 'task_budget'"),
        ({"output_config": {"effort": "banana"}}, "output_config.effort must be one of"),
        ({"thinking": {"type": "enabled", "x": 1}}, "thinking has an unknown field 'x'"),
    ],
)
def test_fields_that_cannot_be_had(api: Api, fields: dict[str, Any], words: str) -> None:
    assert words in refusal(api, **fields)


def test_max_tokens_is_needed_for_an_answer_only(api: Api) -> None:
    reply = api.ask(max_tokens=None)
    assert reply.status == 400 and reply.json["error"]["message"].startswith("max_tokens is missing")
    assert api.ask(COUNT, max_tokens=None).status == api.ask(COUNT).status == 200


def test_an_empty_stop_sequence_is_called_what_it_is_here(api: Api) -> None:
    message = api.ask(stop_sequences=[""]).json["error"]["message"]
    assert message.startswith("stop_sequences=['']") and "stop " not in message


@pytest.mark.parametrize("blends", [True, False])
def test_texts_may_be_chunks(api: Api, blends: bool) -> None:
    api.engine.ready = msgspec.structs.replace(api.engine.ready, blends=blends)
    called = assistant({"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}})
    marked = [
        {"system": [text("a", kv_chunk=True)]},
        {"messages": [user(text("b"), text("c", kv_chunk=True))]},
        {"messages": [*HELLO, called, user(result("toolu_1", [text("d", kv_chunk=True), text("e")]))]},
    ]
    for fields in marked:
        reply = api.ask(COUNT, **fields)
        assert reply.status == (200 if blends else 400), reply.body
        assert blends or "--enable-cache-blend" in reply.json["error"]["message"]
