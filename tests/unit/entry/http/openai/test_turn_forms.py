"""The same conversation, as each API sends it, is the same prompt, in every collected chat template."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.serve import ServerConfig
from quire.contracts.errors import QueueFull
from quire.entry.http.app import build_app
from quire.entry.http.life.state import EngineState
from quire.observe.metrics import Metrics
from quire.text.chat import REASONING, ChatTemplate
from quire.text.load import TextSide

from .....support.full import FULL
from .conftest import Client, ScriptedEngine

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "c"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "d", "parameters": PARAMETERS}
FIRST, SECOND = "abcdefgh1", "abcdefgh2"  # Mistral's templates want ids of nine characters
USER, NEXT = ("user", "question"), ("user", "go on")
CALL, CALL_2 = ("call", FIRST, '{"city": "Oslo"}'), ("call", SECOND, '{"city": "Rome"}')
RESULT, RESULT_2 = ("result", FIRST, "sun"), ("result", SECOND, "rain")
Talk = list[tuple[Any, ...]]
TALKS: dict[str, Talk] = {
    "system": [("system", "be brief"), USER],
    "turns": [USER, ("say", "certainly"), NEXT],
    "system later": [USER, ("say", "certainly"), ("system", "be brief"), NEXT],
    "only thought": [USER, ("think", "hmm"), NEXT],
    "only thought, then said": [USER, ("think", "hmm"), NEXT, ("say", "certainly"), ("user", "more")],
    "thought and said": [USER, ("think", "hmm"), ("say", "certainly"), NEXT],
    "thought and called": [USER, ("think", "hmm"), CALL, RESULT],
    "called": [USER, CALL, RESULT],
    "said and called": [USER, ("say", "look"), CALL, RESULT, ("say", "sunny"), NEXT],
    "thought, said, called": [USER, ("think", "hmm"), ("say", "look"), CALL, RESULT],
    "thought again": [
        USER,
        ("think", "hmm"),
        CALL,
        RESULT,
        ("think", "hmm again"),
        CALL_2,
        RESULT_2,
        ("say", "both"),
        NEXT,
    ],
    "thought twice": [USER, ("think", "hmm"), ("think", "hmm again"), ("say", "certainly"), NEXT],
    "said twice": [USER, ("say", "certainly"), ("think", "hmm"), ("say", "not"), NEXT],
    "called two": [USER, CALL, CALL_2, RESULT, RESULT_2, ("say", "both"), NEXT],
    "called with nothing": [USER, ("call", FIRST, "{}"), ("result", FIRST, ""), ("say", "certainly"), NEXT],
    "called, then asked": [USER, CALL, RESULT, NEXT],
    "empty answer": [USER, ("say", ""), NEXT],
    "empty question": [("user", ""), ("say", "certainly"), NEXT],
    "refused": [USER, ("refuse", "certainly not"), NEXT],
    "parts": [("user", "question", "one"), ("say", "certainly", "two"), ("user", "go on", "three")],
}
# Why templates refuse some of them, which is theirs to say.
OWN_REASONS = (
    "must alternate",
    "single tool-calls at once",
    "Cannot pass both content and thinking",
    "generator is not JSON serializable",
)


def chat(talk: Talk, blank: Any = "", **more: Any) -> dict[str, Any]:
    """As /v1/chat/completions; `blank`: the content of turns that say nothing, `more`: further fields of turns."""
    messages: list[dict[str, Any]] = []
    for kind, *given in talk:
        text = given[0] if len(given) == 1 else [{"type": "text", "text": text} for text in given]
        if kind in ("user", "system"):
            messages.append({"role": kind, "content": text})
        elif kind == "result":
            messages.append({"role": "tool", "tool_call_id": given[0], "content": given[1]})
        else:
            if messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": blank, **more})
            turn = messages[-1]
            if kind == "think":
                turn["reasoning_content"] = "\n".join([*filter(None, [turn.get("reasoning_content")]), given[0]])
            elif kind == "call":
                function = {"name": "weather", "arguments": given[1]}
                turn["tool_calls"] = [
                    *(turn.get("tool_calls") or ()),
                    {"id": given[0], "type": "function", "function": function},
                ]
            elif kind == "refuse":
                turn["refusal"] = text
            else:
                turn["content"] = text if not turn["content"] else f"{turn['content']}\n{text}"
    return {"messages": messages}


def responses(talk: Talk) -> dict[str, Any]:
    """As /v1/responses."""
    items: list[dict[str, Any]] = []
    for kind, *given in talk:
        if kind in ("user", "system"):
            items.append({"role": kind, "content": [{"type": "input_text", "text": text} for text in given]})
        elif kind in ("say", "refuse"):
            told = {"say": ("output_text", "text"), "refuse": ("refusal", "refusal")}[kind]
            items.append(
                {
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": told[0], told[1]: text} for text in given],
                }
            )
        elif kind == "think":
            part = {"type": "reasoning_text", "text": given[0]}
            items.append({"type": "reasoning", "summary": [], "content": [part]})
        elif kind == "call":
            items.append({"type": "function_call", "call_id": given[0], "name": "weather", "arguments": given[1]})
        else:
            items.append({"type": "function_call_output", "call_id": given[0], "output": given[1]})
    return {"input": items}


def anthropic(talk: Talk) -> dict[str, Any]:
    """As /v1/messages."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": []}
    for kind, *given in talk:
        role = "user" if kind == "result" else kind if kind in ("user", "system") else "assistant"
        if not body["messages"] or body["messages"][-1]["role"] != role:
            body["messages"].append({"role": role, "content": []})
        blocks = body["messages"][-1]["content"]
        if kind == "think":
            blocks.append({"type": "thinking", "thinking": given[0], "signature": ""})
        elif kind == "call":
            blocks.append({"type": "tool_use", "id": given[0], "name": "weather", "input": json.loads(given[1])})
        elif kind == "result":
            blocks.append({"type": "tool_result", "tool_use_id": given[0], "content": given[1]})
        else:
            blocks += [{"type": "text", "text": text} for text in given]
    return body


ECHOED = {"tool_calls": [], "refusal": None, "audio": None, "function_call": None, "reasoning": None, "name": None}
TOOLS = [{"type": "function", "function": TOOL}]
FORMS: dict[str, tuple[str, Callable[[Talk], dict[str, Any]], list[Any]]] = {
    "chat": ("/v1/chat/completions", chat, TOOLS),
    "chat, null": ("/v1/chat/completions", lambda talk: chat(talk, None), TOOLS),
    "chat, as others answer": ("/v1/chat/completions", lambda talk: chat(talk, None, **ECHOED), TOOLS),
    "responses": ("/v1/responses", responses, [{"type": "function", **TOOL}]),
    "messages": ("/v1/messages", anthropic, [{"name": "weather", "description": "d", "input_schema": PARAMETERS}]),
}


class Listening(ScriptedEngine):
    """Takes the prompt and refuses the rest."""

    def open(self, prompts: Any, *_: Any, **__: Any) -> Any:
        self.prompts.append(prompts)
        raise QueueFull("heard.")


class Model:
    """A model with a chat template, behind all routes."""

    def __init__(self, text: TextSide, template: ChatTemplate) -> None:
        self.tools = "tools" in template.source(tools=True)
        self.thinks = any(word in template.source(tools=self.tools) for word in REASONING)
        self.engine: Any = Listening(replace(text, chat_template=template))
        self.engine.state = EngineState.READY
        self.engine.ready = msgspec.structs.replace(self.engine.ready, max_model_len=100_000)
        self.client = Client(build_app(self.engine, ServerConfig.from_flat(served_model_name=("tiny",)), Metrics()))

    async def prompt(self, path: str, body: dict[str, Any]) -> str:
        """The prompt of a request, or why it was refused."""
        count = len(self.engine.prompts)
        reply = await self.client.post(path, body)
        return str(
            self.engine.prompts[-1][0].text
            if len(self.engine.prompts) > count
            else f"{reply.status} {reply.json['error']['message']}"
        )

    async def prompts(self, talk: Talk) -> dict[str, str]:
        """The prompt of each form of a conversation."""
        return {
            name: await self.prompt(path, build(talk) | ({"tools": tools} if self.tools else {}))
            for name, (path, build, tools) in FORMS.items()
        }


@pytest.fixture(scope="module")
def models(shared: Path, text_side: TextSide) -> dict[str, Model]:
    folder = shared / "hf"
    templates = {
        path.stem: ChatTemplate({"default": path.read_text("utf-8")}, SPECIALS)
        for path in sorted((folder / "templates").glob("*.jinja"))
    }
    for path in sorted(folder.glob("*/tokenizer_config.json")):
        if (template := ChatTemplate.load(path.parent)) is not None:
            templates[path.parent.name] = template
    assert len(templates) > 50
    return {name: Model(text_side, template) for name, template in templates.items()}


@pytest.mark.parametrize("name", TALKS)
def test_the_same_turns_are_the_same_prompt(models: dict[str, Model], name: str) -> None:
    """By default each template meets every fourth conversation, and each conversation every fourth template; one with
    reasoning also meets all templates that may show it."""
    said = [
        text for kind, *texts in TALKS[name] if kind in ("user", "say", "refuse") for text in texts if text != "look"
    ]  # beside a call, one template drops it

    turn, thinks = [*TALKS].index(name), any(kind == "think" for kind, *_ in TALKS[name])
    tried = {
        template: model
        for i, (template, model) in enumerate(models.items())
        if FULL or (i + turn) % 4 == 0 or (thinks and model.thinks)
    }

    async def main() -> int:
        refused = 0
        for template, model in tried.items():
            prompts = await model.prompts(TALKS[name])
            prompt = prompts["chat"]
            assert len(set(prompts.values())) == 1, (template, prompts)
            if prompt.startswith("400 "):
                assert any(reason in prompt for reason in OWN_REASONS), (template, prompt)
                refused += 1
            else:
                assert all(text in prompt for text in said), (template, prompt)
        return refused

    assert asyncio.run(main()) < len(tried) / 2


@pytest.mark.parametrize(
    ("form", "body"),
    [
        ("chat", {"messages": [{"role": "user", "content": None}]}),
        ("chat", {"messages": [{"role": "tool", "tool_call_id": "a"}]}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        ("chat", {"messages": [{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}]}),
        ("responses", {"input": [{"role": "user", "content": None}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ("responses", {"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}),
        ("messages", {"messages": [{"role": "user", "content": []}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ],
    ids=str,
)
def test_what_holds_no_text_is_refused_before_the_template(
    models: dict[str, Model], form: str, body: dict[str, Any]
) -> None:
    body |= {"model": "tiny"} | ({"max_tokens": 4} if form == "messages" else {})
    for model in models.values():
        prompt = asyncio.run(model.prompt(FORMS[form][0], body))
        assert prompt.startswith("400 ") and "template" not in prompt, prompt


def test_what_was_cut_within_its_reasoning_goes_on(
    scripted: ScriptedEngine,
    text_side: TextSide,
    make_client: Callable[..., Client],
    begin: Callable[..., Any],
    output: Callable[..., Any],
) -> None:
    source = (
        "{% for m in messages %}{{ m.role + ':' + m.content }}"
        "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %};{% endfor %}"
    )
    scripted.text = replace(text_side, chat_template=ChatTemplate({"default": source}), parsers=(None, "deepseek_r1"))

    async def main() -> str:
        client = make_client(scripted)
        task, reply, _, stream = await begin(client, "/v1/responses", {"input": "one"})
        stream.put(output("<think>so far", finish="length"))
        stream.put(None)
        await task
        assert reply.json["status"] == "incomplete" and [item["type"] for item in reply.json["output"]] == ["reasoning"]
        again = {"input": "two", "previous_response_id": reply.json["id"]}
        task, _, gone, _ = await begin(client, "/v1/responses", again)
        gone.set()
        await task
        return str(scripted.prompts[-1][0].text)

    assert asyncio.run(main()) == "user:one;assistant:(so far);user:two;"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["chat", "responses", "messages"])
def test_a_required_call_that_is_cut_is_never_content(
    scripted: ScriptedEngine, begin: Callable[..., Any], output: Callable[..., Any], form: str, stream: bool
) -> None:
    engine: Any = scripted
    engine.state = EngineState.READY
    engine.ready = msgspec.structs.replace(engine.ready, max_model_len=4096)
    client = Client(build_app(engine, ServerConfig.from_flat(served_model_name=("tiny",)), Metrics()))
    choices: list[Any] = {
        "responses": ["required", {"type": "function", "name": "weather"}],
        "chat": ["required", {"type": "function", "function": {"name": "weather"}}],
        "messages": [{"type": "any"}, {"type": "tool", "name": "weather"}],
    }[form]
    path, build, tools = FORMS[form]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

    async def ask(choice: Any, *pieces: str) -> str:
        body = build([USER]) | {"tools": tools, "tool_choice": choice, "stream": stream}
        task, reply, _, pipe = await begin(client, path, body)
        for at, piece in enumerate(pieces):
            pipe.put(output(piece, finish="length" if at == len(pieces) - 1 else None))
            for _ in range(4):
                await asyncio.sleep(0)
        pipe.put(None)
        await task
        assert reply.status == 200, reply.body
        return str(reply.body.decode())

    for first, choice in enumerate(choices, 1):  # each end with a choice
        for end in range(first, len(call), 1 if FULL else 2):
            said = asyncio.run(ask(choice, *(call[:end] if stream else [call[:end]])))
            assert "<tool" not in said and "name\\" not in said, said


@pytest.mark.parametrize("name", ["mcp.weather", "mcp/weather:now", "a" * 128])
@pytest.mark.parametrize("form", ["chat", "responses", "messages"])
def test_names_of_tools_come_back_as_they_were_sent(
    scripted: ScriptedEngine, begin: Callable[..., Any], output: Callable[..., Any], form: str, name: str
) -> None:
    engine: Any = scripted
    engine.state = EngineState.READY
    engine.ready = msgspec.structs.replace(engine.ready, max_model_len=4096)
    client = Client(build_app(engine, ServerConfig.from_flat(served_model_name=("tiny",)), Metrics()))
    path, build, tools = FORMS[form]

    async def ask(body: dict[str, Any]) -> Any:
        task, reply, _, pipe = await begin(client, path, json.loads(json.dumps(body).replace("weather", name)))
        pipe.put(output(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>', finish="stop"))
        pipe.put(None)
        await task
        return reply

    reply = asyncio.run(
        ask(
            build([USER, CALL, RESULT])
            | {"tools": tools, "tool_choice": ({"type": "any"} if form == "messages" else "required")}
        )
    )
    assert reply.status == 200 and reply.body.decode().count(f'"name":"{name}"') == (2 if form == "responses" else 1)
    assert name in scripted.params[-1].structured_outputs.grammar  # type: ignore[union-attr]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_roles_are_those_that_the_template_knows(
    scripted: ScriptedEngine, text_side: TextSide, make_client: Callable[..., Client], path: str
) -> None:
    source = (
        "{% for m in messages %}{% if m['role'] == 'ipython' or m.role not in [\"user\", 'observation'] %}"
        "<{{ m.role }}>{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    field = "input" if path == "/v1/responses" else "messages"
    engine = Listening(replace(text_side, chat_template=ChatTemplate({"default": source})))
    client = make_client(engine)

    def ask(*roles: str) -> Any:
        return asyncio.run(client.post(path, {field: [{"role": role, "content": "hi"} for role in roles]}))

    reply = ask("user", "ipython", "observation")
    if path == "/tokenize":
        assert reply.status == 200 and reply.json["count"] > 10
    else:
        assert engine.prompts[-1][0].text == "user:hi;<ipython>ipython:hi;observation:hi;"
    error, where = ask("user", "narrator").error, "input: " if field == "input" else "messages[1]."
    assert error["param"] == field and error["message"] == (
        f"{where}role is 'narrator', which the chat template does not know: send one of assistant, developer, "
        "ipython, observation, system, tool, user."
    )
    assert len(ask("user", "x" * 1_000_000).body) < 1000
