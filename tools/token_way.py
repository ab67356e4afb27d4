"""Draw a token's way through the files of Quire, from a real request to a server; README.md shows the drawing.

    PYTHONPATH=src python tools/token_way.py

Server and core run in threads of this process with the bundled model on a CPU. Python's profiler notes every function
of the package that a streamed chat calls.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import quire

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{Path(quire.__file__).parent}/"
# A stop of the way, and its work in a few words. A stop is a file, a folder of kernels, or a function of a file: then
# the file has several stops, or the function waits for a request and is running when the request comes.
STOPS = {
    "entry/http/protocol.py": "bytes of a connection to an HTTP request",
    "entry/http/access/auth.py": "API keys, names in Host headers",
    "entry/http/openai/routes.py": "the handler of the route; its errors become answers",
    "entry/http/openai/chat.py": "POST /v1/chat/completions (completions.py beside it)",
    "entry/http/openai/decode.py": "JSON to a checked ChatRequest",
    "entry/http/openai/generate.py": "one request: sampling parameters, prompt, stream, answer",
    "entry/http/openai/prompts.py": "messages to a prompt",
    "text/chat.py": "the chat template",
    "text/tokenizer.py": "text to token ids",
    "entry/http/engine.py:ServedEngine.open": "the engine as the HTTP process sees it",
    "entry/front_end.py:FrontEnd.start": "checks a prompt, makes the requests of the core",
    "procs/core_client.py:CoreClient.send": "to the core's process, through a socket",
    "procs/wire.py:encode": "a message as msgpack",
    "procs/core_server.py:serve_core": "the core's process: take messages, run a step, send outputs",
    "engine/core.py:EngineCore.step": "one step of the engine: plan, run, finish",
    "engine/scheduler.py": "chooses requests and tokens: the StepPlan",
    "kv/allocator.py:KVAllocator.match": "KV blocks, prefix cache",
    "procs/in_process.py": "the executor on a CPU; on a GPU procs/async_executor.py",
    "worker/runner.py": "the model runner: runs one StepPlan",
    "kernels/step/state.py": "block tables, token history, sampling parameters",
    "worker/programs.py": "launches inputs, layers, head and sampling",
    "kernels/step:build_inputs": "token ids, positions, KV slots",
    "layers/embedding.py": "embedding, LM head",
    "worker/recordings.py": "records small steps, replays them; on a GPU worker/graphs.py",
    "layers/stack.py:run_layers": "the loop over layers",
    "layers/decoder.py": "one decoder layer",
    "layers/attention.py": "QKV, rotation, KV write, attention, output",
    "layers/linear.py": "matrix products, of the kernel that was chosen",
    "kernels/heads": "head norm, rotation, KV write",
    "kernels/attention:paged_attention": "paged attention",
    "layers/mlp.py": "feed-forward",
    "kernels/sampling/sampler.py": "penalties, masks, temperature, top-k, top-p",
    "kernels/sampling:TorchSampling.sample": "draws the tokens",
    "engine/finish.py:Finisher.apply": "stop tokens, lengths, finished requests",
    "procs/core_client.py:CoreClient._receive": "back in the HTTP process, once per step",
    "entry/http/engine.py:ServedEngine._take_outputs": "outputs of a step to the requests that wait",
    "entry/front_end.py:FrontEnd.take": "a token to its request",
    "entry/completion.py:Completion.push": "the tokens of a completion; logprobs",
    "entry/http/request_stream.py:RequestStream._batch": "outputs of a request to its reader",
    "entry/completion.py:Generation.output": "the new part of each completion",
    "text/sequence.py:SequenceText.push": "stop strings",
    "text/detokenizer.py:_ByteDetokenizer.push": "tokens to text, as far as it is certain",
    "entry/http/openai/generate.py:StreamProgress.events": "new parts to events",
    "entry/http/openai/chat.py:ChatWriter.piece": "ChatWriter: JSON of an event",
    "entry/http/sse.py:EventStream.write": "events to the connection",
}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": True, "temperature": 0.7}


@dataclass
class Way:
    """Functions of the package that a request calls, in the order of their first calls.

    called   files below `src/quire`, at their first call
    drawn    stop -> its depth in the drawing
    """

    on: bool = False
    called: dict[str, None] = field(default_factory=dict)
    drawn: dict[str, int] = field(default_factory=dict)

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """Take an event of the profiler, from any thread."""
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(PACKAGE):
            self.called.setdefault(code.co_filename.removeprefix(PACKAGE))
            if (stop := _stop(frame)) is not None and stop not in self.drawn:
                self._draw(frame, stop)

    def _draw(self, frame: FrameType, stop: str) -> int:
        """Give a stop its depth: one more than its caller's, or 0 for a coroutine that goes on after it has waited."""
        outer, depth = frame.f_back, 0
        while outer is not None:
            caller = _stop(outer)
            if caller is not None and caller != stop:
                above = self.drawn[caller] if caller in self.drawn else self._draw(outer, caller)
                later = list(self.drawn.values())[list(self.drawn).index(caller) + 1 :]
                depth = above + 1 if all(each > above for each in later) else 0
                break
            outer = outer.f_back
        return self.drawn.setdefault(stop, depth)

    def drawing(self) -> str:
        """Return the stops as a tree; a file that comes again on the way back is marked."""
        lines, before = [], set()
        for stop, depth in self.drawn.items():
            file = stop.partition(":")[0]
            name = f"{'  ' * depth}{file}{' (back)' * (file in before)}"
            before.add(file)
            lines.append(f"{name:<52}{STOPS[stop]}")
        return "\n".join(lines)


def _stop(frame: FrameType) -> str | None:
    """Return the stop that a running function belongs to, or None."""
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE):
        return None
    file, name = code.co_filename.removeprefix(PACKAGE), code.co_qualname
    places = (file, "/".join(file.split("/")[:2])) if file.startswith("kernels/") else (file,)
    return next((stop for place in places for stop in (f"{place}:{name}", place) if stop in STOPS), None)


@contextmanager
def profiled(way: Way) -> Iterator[None]:
    """Let the threads that start inside report to `way`."""
    threading.setprofile(way.note)
    try:
        yield
    finally:
        threading.setprofile(None)


def request() -> Way:
    """Return the way of a chat through a server in this process."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from tests.e2e.in_process import running_inside

    way = Way()
    options = {"device": "cpu", "async_depth": 1, "num_threads": 1, "kv_cache_memory_bytes": 1 << 24}
    with profiled(way), running_inside(**options) as inside:
        inside.check()  # its answer says that the core waits for messages
        way.on = True
        events = inside.server.ask("/v1/chat/completions", CHAT).events()
        way.on = False
    assert len(events) > 3, events
    return way


def main() -> None:
    """Print the drawing."""
    print(request().drawing())


if __name__ == "__main__":
    main()
