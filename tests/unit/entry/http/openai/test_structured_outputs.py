"""A schema gets the same answer in every field and on every route: taken, noted in a header, or refused with a path."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from quire.answers.grammar import GrammarCompiler
from quire.contracts.errors import InvalidParameter
from quire.contracts.structured import StructuredOutputsParams

USER = [{"role": "user", "content": "hi"}]
Ask = tuple[str, dict[str, Any], str, str]  # route, body, the field's name in an error, where its schema begins


@pytest.fixture(autouse=True)
def long_context(scripted: Any) -> None:
    scripted.ready = msgspec.structs.replace(scripted.ready, max_model_len=2**17)


def asks(schema: dict[str, Any]) -> Iterator[Ask]:
    """Every way to ask for a schema, but for the offline one."""
    structured, function = (
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        {"name": "f", "parameters": schema, "strict": True},
    )
    for path, body in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "a"})):
        yield path, {**body, "response_format": structured}, "response_format", ""
        yield path, {**body, "structured_outputs": {"json": schema}}, "structured_outputs", ""
        yield path, {**body, "structured_outputs": {"json": json.dumps(schema)}}, "structured_outputs", ""
    strict = {"messages": USER, "tools": [{"type": "function", "function": function}]}
    yield "/v1/chat/completions", strict, "tools", "f.parameters."
    yield "/v1/chat/completions", {**strict, "tool_choice": "required"}, "tools", "f.parameters."
    shown = {"type": "json_schema", "name": "n", "schema": schema}
    yield "/v1/responses", {"input": "hi", "text": {"format": shown}}, "text.format", ""
    yield "/v1/responses", {"input": "hi", "tools": [{"type": "function", **function}]}, "tools", "f.parameters."
    talk = {"model": "tiny", "max_tokens": 9, "messages": USER}
    yield (
        "/v1/messages",
        {**talk, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ("output_config.format"),
        "",
    )
    given = {"name": "f", "input_schema": schema, "strict": True}
    yield "/v1/messages", {**talk, "tools": [given]}, "tools", "f.parameters."


def thing(**property: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"tags": {"type": "array", "items": property}}, "required": ["tags"]}


@pytest.mark.parametrize(
    "schema",
    [
        thing(type="array", contains={"type": "null"}),
        thing(type="object", dependentRequired={"a": ["b"]}),
        thing(**{"not": {"type": "null"}}),
        thing(oneOf=[{"type": "integer"}, {"type": "number"}]),
        thing(type="string", pattern="(?!a)b"),
        thing(**{"$ref": "#/$defs/none"}),
        thing(type="object", properties={f"p{i}": {"type": "null"} for i in range(513)}),
    ],
    ids=lambda schema: str([*schema["properties"]["tags"]["items"]]),
)
def test_a_refusal_names_the_path_on_every_route(
    scripted: Any, make_client: Callable[..., Any], schema: dict[str, Any]
) -> None:
    with pytest.raises(InvalidParameter) as offline:
        GrammarCompiler(lambda: scripted.text.tokenizer, 9000).compile(StructuredOutputsParams(json=schema).spec())
    reason = str(offline.value).partition("cannot be used: ")[2]
    assert reason.startswith("properties.tags.items: ")
    for path, body, name, before in asks(schema):
        reply = asyncio.run(make_client(scripted).post(path, body))
        message = reply.json["error"]["message"]
        assert reply.status == 400 and message.startswith(name), (path, message)
        assert message.endswith(f" cannot be used: {before}{reason}"), (path, message)


def test_what_is_not_enforced_is_told_in_a_header_on_every_route(
    begin: Any, scripted: Any, make_client: Callable[..., Any], output: Any
) -> None:
    async def ask(path: str, body: dict[str, Any]) -> Any:
        task, reply, _, stream = await begin(make_client(scripted), path, body)
        stream.put(output("a", finish="stop"))
        stream.put(None)
        await task
        assert reply.status == 200, reply.body
        return reply

    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "integer", "format": "int64"}, "uniqueItems": True},
            "b\r\nx-b: c": {"anyOf": [{"type": "string", "format": "path"}, {"type": "string", "format": "date"}]},
        },
    }
    lenient = {**schema, "x-guidance": {"lenient": True}, "maxProperties": 2, "not": {"type": "null"}}
    for path, body, _, before in asks(schema):
        told = f"{before}properties.a: uniqueItems; {before}properties.a.items: format int64; "
        assert asyncio.run(ask(path, body)).all("x-quire-warning") == [
            rf"not enforced: {told}{before}properties.b\r\nx-b: c.anyOf.0: format path"
        ]
    for path, body, _, before in asks(lenient):
        [warning] = asyncio.run(ask(path, body)).all("x-quire-warning")
        assert warning.startswith(f"not enforced: {before[:-1]}{': ' if before else ''}not; {before}properties.a: uniq")
    many = {"type": "object", "properties": {f"p{i}": {"type": "string", "format": "path"} for i in range(25)}}
    [warning] = asyncio.run(ask(*next(asks(many))[:2])).all("x-quire-warning")
    assert warning.count("format path") == 20 and warning.endswith("; and 5 more")
    long = {"type": "object", "properties": {f"{i}" * 200: {"type": "string", "format": "path" * 50} for i in range(9)}}
    [warning] = asyncio.run(ask(*next(asks(long))[:2])).all("x-quire-warning")
    assert len(warning) < 1_100 and warning.endswith("; and 7 more")


def test_a_schema_of_nothing_is_refused_and_one_of_anything_is_json(
    begin: Any, scripted: Any, make_client: Callable[..., Any], output: Any
) -> None:
    """`false` is the schema that no text matches, not a field that is left out; `true` is that of any JSON."""
    for structured in ({"json": False}, {"json": "false"}):
        body = {"prompt": "a", "structured_outputs": structured}
        reply = asyncio.run(make_client(scripted).post("/v1/completions", body))
        assert reply.status == 400 and "json is false, which no text matches" in reply.error["message"]
        with pytest.raises(InvalidParameter, match="json is false, which no text matches"):
            GrammarCompiler(lambda: scripted.text.tokenizer, 9000).compile(StructuredOutputsParams(**structured).spec())

    async def main() -> Any:
        task, _, _, stream = await begin(
            make_client(scripted), "/v1/completions", {"prompt": "a", "structured_outputs": {"json": True}}
        )
        stream.put(output("a", finish="stop"))
        stream.put(None)
        await task
        return scripted.params[-1].structured_outputs.json

    assert asyncio.run(main()) is True
