"""Routes without a server: an ASGI client, an engine in the same event loop, and one whose outputs a test writes."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.config.serve import ServerConfig
from quire.contracts.adapters import Adapter
from quire.contracts.errors import QuireError
from quire.contracts.output import CompletionOutput, RequestOutput
from quire.contracts.sampling import SamplingParams
from quire.engine.core import EngineCore
from quire.engine.mock_core import build_mock_core
from quire.entry.completion import Generation
from quire.entry.core_request import FrontLimits
from quire.entry.front_end import FrontEnd
from quire.entry.http.context import ServerContext
from quire.entry.http.lora.served import ServedAdapters
from quire.entry.http.openai.routes import routes
from quire.entry.prompts import Prompt
from quire.observe.metrics import Metrics
from quire.procs.messages import Loading, Ready
from quire.text.load import TextSide, load_text

Batch = list[tuple[int, RequestOutput]]
CHAT = "/v1/chat/completions"


class Pipe:
    """A stream whose batches somebody puts in; an exception in it is raised."""

    def __init__(self, generations: list[Generation], on_close: Callable[[], None]) -> None:
        self.generations = generations
        self.closed = 0
        self.cause = ""
        self._on_close = on_close
        self._waiting: deque[Batch | QuireError | None] = deque()
        self._news = asyncio.Event()

    def put(self, item: Batch | QuireError | None) -> None:
        """None ends it. Batches that wait become one."""
        last = self._waiting[-1] if self._waiting else None
        if isinstance(item, list) and isinstance(last, list):
            last.extend(item)
        else:
            self._waiting.append(item)
        self._news.set()

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        item = self._waiting.popleft()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, QuireError):
            raise item
        return item

    def pour_into(self, *sink: Any) -> None:
        """Everything goes to who waits."""

    def close(self) -> None:
        self.closed += 1
        self._on_close()


class LocalEngine:
    """A real front end and core, stepped by a task of the test's event loop."""

    def __init__(self, core: EngineCore, text: TextSide, *, max_logprobs: int = 20) -> None:
        facts = core.facts
        self.core, self.text = core, text
        self.adapters = ServedAdapters(ServerConfig(), check_adapter)
        self.ready: Ready | None = Ready(
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            num_slots=facts.num_slots,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            depth=1,
            dtype="float32",
            device="cpu",
            weight_bytes=0,
            kv_bytes=0,
        )
        limits = FrontLimits(
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            max_logprobs=max_logprobs,
            eos_ids=text.eos_ids,
        )
        self.front = FrontEnd(text.tokenizer, limits)
        self.seen: list[tuple[Sequence[Prompt], SamplingParams, dict[str, Any]]] = []
        self._open: dict[int, tuple[Pipe, int, list[int]]] = {}  # first handle -> (stream, prompt index, left)
        self._task: asyncio.Task[None] | None = None
        self.loading, self.last_step_age = Loading("starting"), None  # for its readiness

    def open(self, prompts: Sequence[Prompt], params: SamplingParams, **options: Any) -> Pipe:
        self.seen.append((prompts, params, options))
        options = {name: value for name, value in options.items() if name != "deadlines"}
        left = [len(prompts)]
        started = [self.front.start(prompt, params, **options) for prompt in prompts]
        pipe = Pipe([g for g, _ in started], lambda: self._abort([g for g, _ in started]))
        for at, (generation, requests) in enumerate(started):
            for request in requests:
                self.core.add(request)
            self._open[generation.completions[0].handle] = (pipe, at, left)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        return pipe

    def _abort(self, generations: list[Generation]) -> None:
        for generation in generations:
            self._open.pop(generation.completions[0].handle, None)
            for handle in self.front.drop(generation):
                self.core.abort(handle)

    async def _run(self) -> None:
        while self.core.has_work:
            outputs, stopped = self.front.apply(self.core.step())
            for handle in stopped:
                self.core.abort(handle)
            for handle, output in outputs:
                pipe, at, left = self._open[handle]
                pipe.put([(at, output)])
                if output.finished:
                    del self._open[handle]
                    left[0] -= 1
                    if not left[0]:
                        pipe.put(None)
            await asyncio.sleep(0)


class ScriptedEngine:
    """Every `open` gives the next stream, which the test fills; `refusal` is raised instead when it is set."""

    def __init__(self, text: TextSide) -> None:
        self.text: TextSide | None = text
        self.ready: Ready | None = Ready(
            max_model_len=64,
            vocab_size=1024,
            num_slots=4,
            num_blocks=64,
            block_size=16,
            depth=1,
            dtype="float32",
            device="cpu",
            weight_bytes=0,
            kv_bytes=0,
        )
        self.adapters = ServedAdapters(ServerConfig(), check_adapter)
        self.refusal: Exception | None = None
        self.streams: list[Pipe] = []
        self.params: list[SamplingParams] = []
        self.options: list[dict[str, Any]] = []
        self.prompts: list[Sequence[Prompt]] = []

    def open(self, prompts: Sequence[Prompt], params: SamplingParams, **options: Any) -> Pipe:
        if self.refusal is not None:
            raise self.refusal
        self.prompts.append(prompts)
        self.params.append(params)
        self.options.append(options)
        self.streams.append(Pipe([], lambda: None))
        return self.streams[-1]


def output(*texts: str, tokens: list[int] | None = None, finish: str | None = None, num_prompt: int = 3) -> Batch:
    """Return an output of prompt 0 whose completions hold these texts."""
    completions = [
        CompletionOutput(index=i, text=text, token_ids=list(tokens or [7]), finish_reason=finish)
        for i, text in enumerate(texts)
    ]
    return [
        (
            0,
            RequestOutput(
                request_id="r",
                prompt=None,
                prompt_token_ids=[5] * num_prompt,
                outputs=completions,
                finished=finish is not None,
                num_cached_tokens=2,
            ),
        )
    ]


@dataclass
class Reply:
    """Response of the application; `parts` are the pieces in which the body was sent."""

    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    @property
    def data(self) -> list[str]:
        """The data of every event, checking the framing of each."""
        text = self.body.decode()
        assert text.endswith("\n\n")
        frames = text[:-2].split("\n\n")
        assert all(f.startswith(("data: ", ": ")) and "\n" not in f for f in frames)
        return [f.removeprefix("data: ") for f in frames if f.startswith("data: ")]

    @property
    def events(self) -> list[Any]:
        """Every event but the closing [DONE], decoded."""
        assert self.data[-1] == "[DONE]" and "[DONE]" not in self.data[:-1]
        return [json.loads(d) for d in self.data[:-1]]


class Client:
    """Calls an ASGI application. `gone` is set to hang up."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def get(self, path: str) -> Reply:
        return await self.call("GET", path, b"")

    async def post(self, path: str, content: Any, **headers: str) -> Reply:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return await self.call("POST", path, body, headers=headers)

    async def call(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        headers: dict[str, str] | None = None,
        gone: asyncio.Event | None = None,
        reply: Reply | None = None,
    ) -> Reply:
        reply, gone = reply or Reply(), gone or asyncio.Event()
        names = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in (headers or {}).items()}}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "root_path": "",
            "query_string": b"",
            "http_version": "1.1",
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in names.items()],
        }
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert not reply.status, "a second response"
                reply.status = message["status"]
                reply.headers = [(k.decode(), v.decode("latin-1")) for k, v in message["headers"]]
                return
            assert reply.status and not reply.complete
            if message["body"]:
                reply.parts.append(message["body"])
            reply.complete = not message.get("more_body", False)

        async with asyncio.timeout(60):
            await self.app(scope, receive, send)
        return reply


async def check_adapter(adapter: Adapter) -> str:
    """Tell whether an adapter fits the model, as a core does."""
    return "it does not fit" if "odd" in adapter.folder else ""


def make_client(engine: Any, **serve: Any) -> Client:
    """A client of the routes over an engine."""
    config = ServerConfig.from_flat(**serve)
    if config.engine.adapters.enable_lora:
        engine.adapters = ServedAdapters(config, check_adapter)
    context = ServerContext(
        engine=engine, config=config, metrics=Metrics(), model_names=("tiny", "alias"), created=1_700_000_000
    )
    app = Starlette(routes=routes(context))
    return Client(app)


@pytest.fixture(scope="session")
def text_side() -> TextSide:
    return load_text(EngineConfig(), bundled_model())


@pytest.fixture
def scripted(text_side: TextSide) -> ScriptedEngine:
    return ScriptedEngine(text_side)


@pytest.fixture
def mock_engine(text_side: TextSide) -> LocalEngine:
    """The mock core with the bundled tokenizer; sampling defaults of the engine, not of the model."""
    return LocalEngine(build_mock_core(EngineConfig(), bundled_model()), text_side)


@pytest.fixture(name="make_client")
def make_client_fixture() -> Callable[..., Client]:
    return make_client


@pytest.fixture
def begin(scripted: ScriptedEngine) -> Callable[..., Any]:
    """Begin a request and wait until the scripted engine has it: (task, its reply so far, hang up, the stream)."""

    async def call(client: Client, path: str, body: dict[str, Any]) -> Any:
        gone, reply, count = asyncio.Event(), Reply(), len(scripted.streams)
        task = asyncio.create_task(client.call("POST", path, json.dumps(body).encode(), gone=gone, reply=reply))
        while len(scripted.streams) == count and not task.done():
            await asyncio.sleep(0)
        return task, reply, gone, scripted.streams[-1]

    return call


@pytest.fixture(name="output")
def output_fixture() -> Callable[..., Batch]:
    return output


@pytest.fixture(scope="session")
def tiny_core() -> EngineCore:
    """The bundled model, one thread; float32, so that scoring and generating never disagree on near ties."""
    from quire.assemble.engine import assemble

    return assemble(EngineConfig.from_flat(num_threads=1, use_tqdm_on_load=False, max_num_seqs=8, dtype="float32")).core


@pytest.fixture
def tiny_engine(tiny_core: EngineCore, text_side: TextSide) -> LocalEngine:
    """The bundled model behind a front end of this test."""
    return LocalEngine(tiny_core, text_side)


@pytest.fixture
def refusal_of(scripted: Any, make_client: Callable[..., Any]) -> Callable[..., Any]:
    """Send a request that is refused with 400, by default a chat. Return the error."""

    def call(path: str = CHAT, **fields: Any) -> Any:
        body = fields if path != CHAT else {"messages": [{"role": "user", "content": "hi"}], **fields}
        reply = asyncio.run(make_client(scripted).post(path, body))
        assert reply.status == 400, reply.body
        return reply.error

    return call
