"""/v1/responses: requests to prompts, answers, what is kept and for whom, background, what is refused."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette

from quire.config.engine import EngineConfig
from quire.config.serve import AccessConfig, ServerConfig
from quire.contracts.errors import EngineDead, InvalidParameter, QueueFull
from quire.entry.http.access.auth import ApiKeys, Guard
from quire.entry.http.context import ServerContext
from quire.entry.http.openai.responses_schema import ResponseAnswer
from quire.entry.http.openai.routes import routes
from quire.observe.metrics import Metrics
from quire.text.chat import ChatTemplate
from quire.text.load import TextSide

from .conftest import Client, output

PATH = "/v1/responses"
ALWAYS = {"max_output_tokens": 4, "seed": 1}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}


@pytest.fixture
def client(mock_engine: Any, make_client: Callable[..., Client]) -> Client:
    return make_client(mock_engine)


@pytest.fixture
def ask(client: Client) -> Callable[..., Any]:
    def call(given: Any = "hi", **fields: Any) -> Any:
        return asyncio.run(client.post(PATH, {"input": given, **ALWAYS, **fields}))

    return call


@pytest.fixture
def template_messages(mock_engine: Any, text_side: TextSide, ask: Callable[..., Any]) -> Callable[..., Any]:
    """The messages that a template is given for a request."""
    mock_engine.text = replace(text_side, chat_template=ChatTemplate({"default": "{{ messages | tojson }}"}))

    def call(given: Any, **fields: Any) -> Any:
        reply = ask(given, **fields)
        assert reply.status == 200, reply.body
        return json.loads(mock_engine.seen[-1][0][0].text)

    return call


def events_of(reply: Any) -> list[Any]:
    """The events of a stream, whose names and numbers must be right."""
    frames = reply.body.decode().split("\n\n")
    assert frames.pop() == ""
    found = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"] and found[-1]["sequence_number"] == number
    return found


def timeless(response: Any) -> Any:
    """A response without what differs between two of the same request."""
    text = json.dumps(response | {"created_at": 0, "completed_at": 0})
    return json.loads(text.replace(response["id"].removeprefix("resp_"), "ID"))


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def test_an_answer_is_what_a_chat_says(client: Client, ask: Callable[..., Any]) -> None:
    answer = ask(instructions="be brief", metadata={"k": "v"}, store=False).json
    assert answer | msgspec.to_builtins(msgspec.convert(answer, ResponseAnswer)) == answer
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    chat = asyncio.run(client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "seed": 1})).json
    assert text_of(answer) == chat["choices"][0]["message"]["content"] != ""
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == 4 and answer["usage"]["total_tokens"] == chat["usage"]["total_tokens"]
    assert answer["metadata"] == {"k": "v"} and answer["instructions"] == "be brief" and answer["store"] is False
    assert answer["id"].startswith("resp_") and answer["output"][0]["id"].startswith("msg_")


def test_a_stream_adds_up_to_the_answer(ask: Callable[..., Any]) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole, events = ask(**fields).json, events_of(ask(stream=True, **fields))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 4,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert timeless(events[-1]["response"]) == timeless(whole)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    (part,) = whole["output"][0]["content"]
    assert "".join(delta["delta"] for delta in deltas) == part["text"]
    assert [entry for delta in deltas for entry in delta["logprobs"]] == part["logprobs"]
    assert next(event for event in events if event["type"].endswith("text.done"))["logprobs"] == part["logprobs"]
    assert len(part["logprobs"]) == 4 and all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"


def test_items_become_messages(template_messages: Callable[..., Any]) -> None:
    history = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "1+1"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "wait", "annotations": [], "logprobs": []}],
        },
        CALL,
        {**CALL, "call_id": "c2"},
        RESULT,
        {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "k"},
    ]
    system, user, called, one, two, said, last = template_messages(history, instructions="be brief")
    assert system["role"] == "system" and system["content"].split() == ["be", "brief", "be", "kind"]
    assert (user["content"], said["content"], last["content"]) == ("1+1", "2", "k")
    assert called["content"] == "wait" and called["reasoning"] == called["reasoning_content"] == "hm"
    assert [(call["id"], call["function"]["name"]) for call in called["tool_calls"]] == [("c1", "add"), ("c2", "add")]
    assert [(m["role"], m["tool_call_id"], m["content"]) for m in (one, two)] == [
        ("tool", "c1", "2"),
        ("tool", "c2", "3"),
    ]


def test_tools_and_forms_reach_the_engine(
    scripted: Any, make_client: Callable[..., Client], begin: Callable[..., Any]
) -> None:
    async def asked(**fields: Any) -> Any:
        task, reply, *_ = await begin(make_client(scripted), PATH, {"input": "a", **fields})
        assert not task.done(), reply.body
        task.cancel()
        await asyncio.wait({task})
        return scripted.params[-1].structured_outputs, scripted.prompts[-1][0].text

    scripted.ready = msgspec.structs.replace(scripted.ready, max_model_len=1000)

    async def scenario() -> None:
        structured, text = await asked(tools=[TOOL, {**TOOL, "name": "sub"}])
        assert structured is None and '"add"' in text and '"sub"' in text
        for choice in (
            {"type": "function", "name": "sub"},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sub"}]},
        ):
            structured, text = await asked(tools=[TOOL, {**TOOL, "name": "sub"}], tool_choice=choice)
            assert "sub" in structured.grammar and "add" not in structured.grammar
        schema = {"type": "object", "properties": {"a": {"type": "number"}}}
        wanted = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
        structured, _ = await asked(text={"format": wanted})
        assert structured.json == schema
        assert (await asked(text={"format": {"type": "json_object"}}))[0].json_object is True
        assert (await asked(text={"format": {"type": "text"}}))[0] is None

    asyncio.run(scenario())


def test_a_summary_is_read_as_the_reasoning(template_messages: Callable[..., Any]) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert template_messages([thought, {"role": "user", "content": "go"}])[0]["reasoning"] == "hm"


def test_a_chain_goes_on(mock_engine: Any, template_messages: Callable[..., Any], client: Client) -> None:
    def go_on(given: str, previous: str | None, **fields: Any) -> Any:
        reply = asyncio.run(client.post(PATH, {"input": given, "previous_response_id": previous, **ALWAYS, **fields}))
        return reply.json, json.loads(mock_engine.seen[-1][0][0].text)

    first, _ = go_on("a", None, instructions="once")
    second, messages = go_on("b", first["id"])
    assert [m["content"] for m in messages] == ["a", text_of(first), "b"]
    third, messages = go_on("c", second["id"], instructions="new", stream=False)
    assert [m["content"] for m in messages] == ["new", "a", text_of(first), "b", text_of(second), "c"]
    assert third["previous_response_id"] == second["id"]
    assert asyncio.run(client.call("DELETE", f"{PATH}/{first['id']}", b"")).json["deleted"] is True
    reply = asyncio.run(client.post(PATH, {"input": "d", "previous_response_id": third["id"]}))
    assert reply.status == 404 and first["id"] in reply.error["message"]


def test_a_reference_is_read_as_the_item(template_messages: Callable[..., Any], ask: Callable[..., Any]) -> None:
    first = ask("a").json
    (item,) = first["output"]
    messages = template_messages([{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "b"}])
    assert [m["content"] for m in messages] == [text_of(first), "b"]
    for wrong in (item["id"] + "0", "msg_1", ""):
        reply = ask([{"type": "item_reference", "id": wrong}])
        assert reply.status == 404 and reply.error["param"] == "input" and repr(wrong) in reply.error["message"]


def test_what_is_kept_can_be_read(client: Client, ask: Callable[..., Any]) -> None:
    made = ask()
    assert asyncio.run(client.get(f"{PATH}/{made.json['id']}")).body == made.body
    reply = ask(store=False)
    assert asyncio.run(client.get(f"{PATH}/{reply.json['id']}")).status == 404

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await client.app({**scope, "query_string": b"stream=true"}, receive, send)

    assert asyncio.run(Client(app).get(f"{PATH}/{made.json['id']}")).error["param"] == "stream"


def test_a_response_is_of_the_key_that_made_it(mock_engine: Any) -> None:
    config = ServerConfig(engine=EngineConfig(), access=AccessConfig(api_key=("one", "two")))
    context = ServerContext(engine=mock_engine, config=config, metrics=Metrics(), model_names=("tiny",), created=0)
    client = Client(Guard(Starlette(routes=routes(context)), ApiKeys(context.keyring)))

    def call(key: str, method: str, path: str, **body: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return asyncio.run(client.call(method, PATH + path, json.dumps(body).encode(), headers=headers))

    made = call("one", "POST", "", input="a", **ALWAYS).json
    name = "/" + made["id"]
    for key, right in (("two", 404), ("one", 200)):
        assert call(key, "GET", name).status == right
        assert call(key, "POST", f"{name}/cancel").status == (404 if right == 404 else 400)  # 400: it ended long ago
        assert call(key, "POST", "", input="b", previous_response_id=made["id"], **ALWAYS).status == right
        assert (
            call(key, "POST", "", input=[{"type": "item_reference", "id": made["output"][0]["id"]}], **ALWAYS).status
            == right
        )
        assert call(key, "DELETE", name).status == right
    assert call("one", "GET", name).error["message"] == call("two", "GET", name).error["message"]


def wait(client: Client, name: str, status: str) -> Any:
    async def poll() -> Any:
        while (found := (await client.get(f"{PATH}/{name}")).json)["status"] != status:
            assert found["status"] == "in_progress", found
            await asyncio.sleep(0)
        return found

    return poll()


def test_in_the_background(scripted: Any, make_client: Callable[..., Client]) -> None:
    async def scenario() -> None:
        client = make_client(scripted)
        begun = await client.post(PATH, {"input": "a", "background": True}, x_request_id="mine")
        name = begun.json["id"]
        assert begun.json["status"] == "in_progress" and begun.json["background"] is True and begun.json["output"] == []
        assert (await client.get(f"{PATH}/{name}")).json == begun.json
        reply = await client.post(PATH, {"input": "b", "previous_response_id": name})
        assert reply.status == 400 and "in progress" in reply.error["message"]
        again = await client.post(PATH, {"input": "a", "background": True}, x_request_id="mine")
        assert again.status == 200  # the caller's id is free again
        scripted.streams[0].put(output("hello", finish="stop"))
        scripted.streams[0].put(None)
        done = await wait(client, name, "completed")
        assert text_of(done) == "hello" and done["usage"]["output_tokens"] == 1 and scripted.streams[0].closed
        assert (await client.post(f"{PATH}/{name}/cancel", {})).json == done  # it stays as it is

    asyncio.run(scenario())


def test_cancelling_frees_the_engine(scripted: Any, make_client: Callable[..., Client]) -> None:
    async def scenario() -> None:
        client = make_client(scripted)
        name = (await client.post(PATH, {"input": "a", "background": True})).json["id"]
        scripted.streams[0].put(output("hel"))
        cancelled = await client.post(f"{PATH}/{name}/cancel", {})
        assert cancelled.json["status"] == "cancelled" and scripted.streams[0].closed
        assert (await client.get(f"{PATH}/{name}")).json == cancelled.json
        assert (await client.post(f"{PATH}/{name}/cancel", {})).json == cancelled.json
        name = (await client.post(PATH, {"input": "a", "background": True})).json["id"]
        assert (await client.call("DELETE", f"{PATH}/{name}", b"")).json["deleted"] and scripted.streams[1].closed
        assert (await client.get(f"{PATH}/{name}")).status == 404
        assert len(asyncio.all_tasks()) == 1  # this one: nothing is left behind

    asyncio.run(scenario())


def test_a_background_response_that_fails(scripted: Any, make_client: Callable[..., Client]) -> None:
    async def scenario() -> None:
        client = make_client(scripted)
        name = (await client.post(PATH, {"input": "a", "background": True})).json["id"]
        scripted.streams[0].put(EngineDead("it died."))
        failed = await wait(client, name, "failed")
        assert failed["error"] == {"code": "server_error", "message": "it died."}
        name = (await client.post(PATH, {"input": "a", "background": True})).json["id"]
        scripted.streams[1].put(InvalidParameter("top_k is too high."))
        failed = await wait(client, name, "failed")
        assert failed["error"] == {"code": "invalid_prompt", "message": "top_k is too high."}
        scripted.refusal = QueueFull("no room.")
        reply = await client.post(PATH, {"input": "a", "background": True})
        assert reply.status == 429 and reply.header("retry-after")
        reply = await client.post(PATH, {"input": "a " * 100, "background": True})
        assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_a_stream_that_fails(scripted: Any, make_client: Callable[..., Client], begin: Callable[..., Any]) -> None:
    async def scenario() -> None:
        client = make_client(scripted)
        task, reply, _, stream = await begin(client, PATH, {"input": "a", "stream": True})
        stream.put(output("hel"))
        while not reply.parts:
            await asyncio.sleep(0)
        stream.put(EngineDead("it died."))
        await task
        events = events_of(reply)
        assert reply.complete and [event["type"] for event in events[-3:]] == [
            "response.output_item.done",
            "response.failed",
            "error",
        ]
        failed, error = events[-2]["response"], events[-1]
        assert failed["status"] == "failed" and failed["error"]["message"] == error["message"] == "it died."
        assert failed["output"][0]["status"] == "incomplete" and text_of(failed) == "hel"
        assert error["code"] == "engine_dead" and set(error["error"]) == {"message", "type", "param", "code"}
        assert (await client.get(f"{PATH}/{failed['id']}")).json == failed

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_ends_the_request(
    scripted: Any, make_client: Callable[..., Client], begin: Callable[..., Any], stream: bool
) -> None:
    async def scenario() -> None:
        client = make_client(scripted)
        task, _, gone, pipe = await begin(client, PATH, {"input": "a", "stream": stream})
        pipe.put(output("hel"))
        gone.set()
        await task
        assert pipe.closed and len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_of_a_conversation_that_is_too_long_the_oldest_turns_go(
    mock_engine: Any, template_messages: Callable[..., Any], ask: Callable[..., Any]
) -> None:
    longest = mock_engine.ready.max_model_len
    turn = [{"role": "user", "content": "word " * (longest // 4)}, {"role": "assistant", "content": "ok"}]
    history = [*turn * 5, {"role": "user", "content": "last"}]
    assert ask(history).error["code"] == "context_length_exceeded" and ask(history).error["param"] == "input"
    too_much = ask("a", max_output_tokens=2 * longest).error
    assert too_much["param"] == "max_output_tokens" and "lower max_output_tokens to " in too_much["message"]
    messages = template_messages(history, truncation="auto", instructions="first")
    longest_that_fits = next(
        left for at in range(0, 12, 2) if ask(left := history[at:], instructions="first").status == 200
    )
    assert messages == [{"role": "system", "content": "first"}, *longest_that_fits] and len(messages) > 2
    assert [m["content"] for m in template_messages("a", truncation="auto")] == ["a"]
    assert ask("word " * longest, truncation="auto").status == 400


LONGER = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
SCHEMA = {"type": "json_schema", "name": "n"}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("tools", {"tools": [{"type": "function", "name": "no name"}]}),
        ("tools", {"tools": [{**TOOL, "parameters": 1}]}),
        ("tools", {"tools": [{}]}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "file_search"}}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": "all"}),
        *(
            ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": tools}})
            for tools in (None, [], [1], [{"type": "mcp"}], [{"type": "function", "name": "sub"}])
        ),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [TOOL]}}),
        ("include", {"include": ["file_search_call.results"]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("background", {"store": False, "background": True}),
        ("text", {"text": {"format": SCHEMA}}),
        ("text", {"text": {"format": {"type": "xml"}}}),
        ("reasoning", {"reasoning": {"summary": "concise"}}),
        ("metadata", {"metadata": {"k": 1}}),
        ("metadata", {"metadata": {str(n): "" for n in range(17)}}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("input", {"input": []}),
        ("input", {"input": ""}),
        ("input", {"input": [LONGER]}),
        ("input", {"input": [{"type": "computer_call", "call_id": "x"}]}),
        ("input", {"input": [RESULT]}),
        ("input", {"input": [CALL, {"type": "function_call_output", "call_id": "c1"}]}),
        ("input", {"input": [{"type": "function_call", "name": "f"}]}),
        ("input", {"input": [{"role": "user"}]}),
        ("input", {"input": [{"content": "x"}]}),
        ("conversation", {"conversation": "conv_1"}),
        ("prompt", {"prompt": {"id": "pmpt_1"}}),
        ("context_management", {"context_management": []}),
        ("n", {"n": 2}),
        ("max_tokens", {"max_tokens": 2}),
        ("prompt_logprobs", {"prompt_logprobs": 0}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 1}),
        ("response_format", {"response_format": {"type": "json_object"}}),
    ],
    ids=str,
)
def test_what_is_refused_is_named(ask: Callable[..., Any], param: str, fields: dict[str, Any]) -> None:
    reply = ask(fields.pop("input", "hi"), **fields)
    assert reply.status == 400 and reply.error["param"] == param and param in reply.error["message"], reply.body


def test_no_input_is_told_from_an_empty_one(ask: Callable[..., Any]) -> None:
    for given, word in ((None, "missing"), ("", "empty"), ([], "empty")):
        assert ask(given).error["message"] == f"input is {word}: it must be a text, or a list of items."
    assert ask(None, instructions="Say hi.").status == 200
    error = ask("hi", include=["message.output_text.logprobs"], top_logprobs=21).error
    assert error["param"] == "top_logprobs" and "top_logprobs=21 exceeds" in error["message"]


def test_what_changes_nothing_is_taken(ask: Callable[..., Any]) -> None:
    reply = ask(
        n=1,
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        service_tier="auto",
        max_tool_calls=3,
        text={"verbosity": "low", "format": {"type": "text"}},
        include=["reasoning.encrypted_content"],
        stream_options={"include_obfuscation": False},
        parallel_tool_calls=False,
        tool_choice="auto",
        tools=[],
    )
    assert reply.status == 200 and reply.header("x-quire-warning") is None
    assert (reply.json["user"], reply.json["max_tool_calls"], reply.json["text"]["verbosity"]) == ("u", 3, "low")


def test_unknown_responses(client: Client, ask: Callable[..., Any]) -> None:
    for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        reply = asyncio.run(client.call(method, f"{PATH}/resp_x{tail}", b"{}"))
        assert reply.status == 404 and "'resp_x'" in reply.error["message"] and "input" in reply.error["message"]
    reply = ask(previous_response_id="resp_x")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (
        404,
        "previous_response_not_found",
        "previous_response_id",
    )
    reply = asyncio.run(client.post(f"{PATH}/{ask().json['id']}/cancel", {}))
    assert reply.status == 400 and "background" in reply.error["message"]


def test_what_is_wrong_is_said_in_words_of_this_route(ask: Callable[..., Any]) -> None:
    for fields, param, words in (
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "tool_choice.type must be one"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.name is missing"),
        ({"tools": [TOOL, TOOL]}, "tools", "tools[1].name: there is another"),
        ({"text": {"format": {"type": "json_object", "x": 1}}}, "text", "text.format has an unknown field 'x'"),
        ({"reasoning": {"mode": "pro"}}, "reasoning", "reasoning.mode must be one of standard"),
        ({"reasoning": {"modes": "x"}}, "reasoning", "unknown field 'modes': did you mean mode?"),
        ({"reasoning": {"effort": "banana"}}, "reasoning", "reasoning.effort must be one of"),
    ):
        error = ask(**fields).error
        assert error["param"] == param and words in error["message"] and "$." not in error["message"], error


def test_reasoning_that_says_nothing_is_nothing(template_messages: Callable[..., Any]) -> None:
    empty: list[Any] = [{"type": "reasoning", "summary": []}, {"type": "reasoning", "summary": [], "content": []}]
    assert template_messages([{"role": "user", "content": "hi"}, *empty]) == [{"role": "user", "content": "hi"}]


STREAMED = {"input": "a", "background": True, "stream": True}


async def get(client: Client, name: str, query: str) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await client.app(scope | {"query_string": query.encode()}, receive, send)

    return await Client(app).get(f"{PATH}/{name}")


async def first_events(reply: Any) -> list[Any]:
    while not reply.body.endswith(b'"delta":"hel","logprobs":[]}\n\n'):
        await asyncio.sleep(0)
    return events_of(reply)


def test_a_stream_in_the_background_outlives_its_reader(
    scripted: Any, make_client: Callable[..., Client], begin: Callable[..., Any]
) -> None:
    """It is read again from any event on, while it goes on and after its end, by several at once."""

    async def scenario() -> None:
        client = make_client(scripted)
        task, reply, gone, stream = await begin(client, PATH, STREAMED)
        stream.put(output("hel"))
        left = await first_events(reply)
        gone.set()
        await task
        name = left[0]["response"]["id"]
        assert not stream.closed and (await client.get(f"{PATH}/{name}")).json["status"] == "in_progress"
        queries = ["stream=true", "stream=true&starting_after=3", "stream=true&starting_after=4"]
        reading = [asyncio.create_task(get(client, name, query)) for query in queries]
        await asyncio.sleep(0.01)
        stream.put(output("lo", finish="stop"))
        stream.put(None)
        read = [(await one).body for one in reading]
        done = await wait(client, name, "completed")
        events = events_of(await get(client, name, "stream=true"))
        assert events[: len(left)] == left and events[-1]["response"] == done and text_of(done) == "hello"
        assert read == [(await get(client, name, query)).body for query in queries]
        assert read[0].endswith(read[1]) and read[1].endswith(read[2])
        assert [body.count(b"event: ") for body in read] == [len(events), len(events) - 4, len(events) - 5]
        assert (await get(client, name, "stream=true&starting_after=99")).body == b""
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_stream_in_the_background_that_does_not_end_well(
    how: str, scripted: Any, make_client: Callable[..., Client], begin: Callable[..., Any]
) -> None:
    """Its readers are told at once."""

    async def scenario() -> None:
        client = make_client(scripted)
        task, reply, _, stream = await begin(client, PATH, STREAMED)
        stream.put(output("hel"))
        name = (await first_events(reply))[0]["response"]["id"]
        if how == "failed":
            stream.put(EngineDead("it died."))
        else:
            await client.post(f"{PATH}/{name}/cancel", {})
        await task
        *_, last = events_of(reply)
        if how == "failed":
            *_, last, error = events_of(reply)
            assert error["type"] == "error" and error["message"] == "it died."
        assert last["type"] == f"response.{how}" and last["response"] == (await client.get(f"{PATH}/{name}")).json
        await asyncio.sleep(0)
        assert stream.closed and len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_a_stream_in_the_background_that_is_refused(ask: Callable[..., Any]) -> None:
    reply = ask("a " * 100_000, background=True, stream=True)
    assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"


def test_a_background_response_tells_its_warnings(ask: Callable[..., Any]) -> None:
    reply = ask(background=True, reasoning={"effort": "high"}, anything=1)
    assert reply.all("x-quire-warning") == [
        "unknown field 'anything'",
        "reasoning.effort is ignored: the chat template does not read it",
    ]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true", "stream"),
        ("stream=1", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("include[]=reasoning.x", "include[]"),
        ("include%5B%5D=x", "include[]"),
        ("stream=false", None),
        ("", None),
    ],
)
def test_what_a_retrieval_may_ask(client: Client, ask: Callable[..., Any], query: str, param: str | None) -> None:
    reply = asyncio.run(get(client, ask().json["id"], query))
    assert reply.status == 200 if param is None else (reply.status, reply.error["param"]) == (400, param)


def test_oldest_turns_are_left_out_however_much_too_long_they_are(
    mock_engine: Any, text_side: TextSide, make_client: Callable[..., Client]
) -> None:
    """Also if rendering gives up, and if the answer has a grammar, before which reasoning is begun."""
    source = (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if not enable_thinking | default(true) %}<think>"
        "{{ ' word' * 40 }}</think>{% endif %}"
    )
    text = replace(text_side, chat_template=ChatTemplate({"default": source}), parsers=(None, "deepseek_r1"))
    mock_engine.text = text
    longest = mock_engine.ready.max_model_len
    talk = [{"role": role, "content": "word " * (longest // 40)} for _ in range(40) for role in ("user", "assistant")]
    structured = {"format": {"type": "json_object"}}
    client = make_client(mock_engine)
    reply = asyncio.run(
        client.post(
            PATH,
            {
                "input": [*talk, {"role": "user", "content": "end"}],
                "truncation": "auto",
                "text": structured,
                "max_output_tokens": 4,
            },
        )
    )
    assert reply.status == 200, reply.body
    huge = [{"role": "user", "content": "x" * 7_000_000}, {"role": "assistant", "content": "a"}]
    mock_engine.text = replace(
        text, chat_template=ChatTemplate({"default": source.replace("{{ m.content }}", "{{ m.content * 3 }}")})
    )
    reply = asyncio.run(
        client.post(
            PATH, {"input": [*huge, {"role": "user", "content": "end"}], "truncation": "auto", "max_output_tokens": 4}
        )
    )
    assert reply.status == 200, reply.body
