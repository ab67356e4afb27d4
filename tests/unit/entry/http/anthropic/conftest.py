"""The whole application over an engine whose outputs a test writes, and what clients make of a stream of messages."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import msgspec
import pytest

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.config.serve import ServerConfig
from quire.contracts.output import CompletionOutput, RequestOutput
from quire.engine.mock_core import build_mock_core
from quire.entry.http.app import build_app
from quire.entry.http.life.state import EngineState
from quire.observe.metrics import Metrics
from quire.text.chat import ChatTemplate
from quire.text.load import TextSide, load_text

from ..openai.conftest import Client, LocalEngine, Reply, ScriptedEngine

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hi"}]
# A model that thinks when it is told to, and calls tools as many do.
THINKER = r"""{% if tools %}{{ tools | tojson }} Write <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>
{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"id": "{{ call.id }}", "name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{{ "\n" }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
WEATHER = {
    "name": "weather",
    "description": "of a town",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}


@pytest.fixture(scope="session")
def bundled_text() -> TextSide:
    return load_text(EngineConfig(), bundled_model())


@pytest.fixture(scope="session")
def thinker_text(bundled_text: TextSide) -> TextSide:
    return replace(bundled_text, chat_template=ChatTemplate({"default": THINKER}))


class Api:
    """A server of messages. `engine` is scripted, or the mock core."""

    def __init__(self, engine: Any, **config: Any) -> None:
        self.engine = engine
        engine.state = EngineState.READY
        config = {"served_model_name": ("tiny", "alias")} | config
        self.client = Client(build_app(engine, ServerConfig.from_flat(**config), Metrics()))

    def ask(self, path: str = PATH, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        """The answer of the mock core, or of an engine that is never asked."""
        body = {"model": "tiny", "max_tokens": 4, "messages": HELLO} | fields
        if path != PATH:
            del body["max_tokens"]
        return asyncio.run(self.client.post(path, body, **(headers or {})))

    def told(
        self,
        *pieces: str,
        finish: str | None = "stop",
        stop_reason: int | str | None = None,
        error: Exception | None = None,
        **fields: Any,
    ) -> Reply:
        """The answer when the model says these pieces, each some tokens, of which the last ends it."""
        body = {"model": "tiny", "max_tokens": 4096, "messages": HELLO} | fields
        text = "".join(pieces)
        pieces = pieces if body.get("stream") else (text,)
        tokenizer = self.engine.text.tokenizer
        tokens = tokenizer.encode(text, False)
        begins = [0, *accumulate(len(tokenizer.token_bytes(token)) for token in tokens)][:-1]  # in bytes of the text

        async def run() -> Reply:
            count = len(self.engine.streams)
            task = asyncio.create_task(self.client.post(PATH, body))
            while len(self.engine.streams) == count and not task.done():
                await asyncio.sleep(0.001)
            if not task.done():
                stream, size = self.engine.streams[-1], 0
                for at, piece in enumerate(pieces):
                    last, before = finish if at == len(pieces) - 1 else None, size
                    size += len(piece.encode())
                    ids = [token for token, begin in zip(tokens, begins, strict=True) if before <= begin < size]
                    completion = CompletionOutput(
                        index=0,
                        text=piece,
                        token_ids=ids,
                        finish_reason=last,
                        stop_reason=stop_reason if last else None,
                    )
                    stream.put(
                        [
                            (
                                0,
                                RequestOutput(
                                    request_id="r",
                                    prompt=None,
                                    prompt_token_ids=self.engine.prompts[-1][0].token_ids,
                                    outputs=[completion],
                                    finished=last is not None,
                                    num_cached_tokens=16,
                                ),
                            )
                        ]
                    )
                    for _ in range(4):
                        await asyncio.sleep(0)
                stream.put(error)
            return await asyncio.wait_for(task, 30)

        return asyncio.run(run())

    @property
    def prompt(self) -> str:
        """The last prompt that the engine got."""
        return str((self.engine.prompts[-1] if self.engine.prompts else self.engine.seen[-1][0])[0].text)


@pytest.fixture
def make_api(thinker_text: TextSide) -> Callable[..., Api]:
    """A server over a scripted engine of a model that thinks and calls; `text` is that of another one."""

    def make(text: TextSide | None = None, *, longest: int = 2048, **config: Any) -> Api:
        engine = ScriptedEngine(text or thinker_text)
        assert engine.ready is not None
        engine.ready = msgspec.structs.replace(engine.ready, max_model_len=longest)
        return Api(engine, **config)

    return make


@pytest.fixture
def api(make_api: Callable[..., Api]) -> Api:
    return make_api()


@pytest.fixture
def mock_api(bundled_text: TextSide) -> Api:
    """A server over the mock core, with the bundled model's tokenizer."""
    return Api(LocalEngine(build_mock_core(EngineConfig(), bundled_model()), bundled_text))


def events(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name; comments are left out."""
    assert reply.status == 200 and reply.header("content-type") == "text/event-stream; charset=utf-8", reply.body
    assert reply.body.endswith(b"\n\n") and b"[DONE]" not in reply.body
    found = []
    for frame in reply.body.decode()[:-2].split("\n\n"):
        if not frame.startswith(":"):
            name, data = frame.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def gathered(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together, with every rule of the order of events checked."""
    first, ping, *middle, delta, stop = stream
    assert (first["type"], ping, stop) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    assert message["content"] == [] and message["stop_reason"] is message["stop_sequence"] is None
    fields = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    kinds = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "tool_use"}
    texts: list[str] = []
    is_open = False
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts.append("")
        else:
            assert is_open and event["index"] == len(texts) - 1
        is_open = event["type"] != "content_block_stop"
        if event["type"] == "content_block_delta":
            kind = event["delta"]["type"]
            assert set(event["delta"]) == {"type", fields[kind]} and kinds[kind] == message["content"][-1]["type"]
            texts[-1] += event["delta"][fields[kind]]
    assert not is_open
    for block, text in zip(message["content"], texts, strict=True):
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(text)
        else:
            assert block[block["type"]] == ""
            block[block["type"]] = text
    assert set(delta) == {"type", "delta", "usage"} and set(delta["delta"]) == {"stop_reason", "stop_sequence"}
    return message | delta["delta"] | {"usage": delta["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what is drawn anew each time."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"id": "", "content": content}
