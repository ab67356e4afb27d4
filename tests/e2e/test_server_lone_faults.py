"""A request breaks, in the model or in the server's own code: it alone gets an error, its neighbours notice nothing."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire.entry import front_end
from quire.entry.completion import Generation
from quire.entry.front_end import FrontEnd
from quire.entry.http.openai.completions import CompletionWriter
from quire.kv.allocator import KVAllocator

from .in_process import Inside, running_inside
from .serving import Answer, Server, running_server, wait_until
from .test_server_load import gauge, nothing_is_held
from .test_server_signals import outcome, start_streams

NUM_NEIGHBOURS = 8
BAD = "bad-1"
BAD_IDS = [7, 7, 7, 8, 9] * 8  # more than a block


def told(answer: Answer) -> dict[str, Any]:
    """The error of an answer that may have begun."""
    if answer.status == 200:
        error = answer.error()
        assert error is not None
        return error
    assert answer.status == 500 and answer.headers["x-should-retry"] == "false"
    return dict(answer.json()["error"])


# --- the model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned(oracle: Any, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A checkpoint with a row of NaN in its input embeddings, and the token that it belongs to."""
    used = {token for prompt in prompts for token in prompt}
    used |= {token for answer in oracle().greedy(prompts, 64) for token in answer}
    token = next(token for token in range(1, 96) if token not in used)
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(oracle().folder, folder)
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder, token


@pytest.fixture(scope="module")
def poisoned_server(poisoned: tuple[Path, int]) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--num-threads", "1", "--skip-tokenizer-init", "--kv-cache-memory-bytes", "4M")
    with running_server(str(poisoned[0]), *flags) as server:
        yield server


def token_ids(answer: Answer) -> list[int]:
    """All of a stream."""
    return [
        token
        for event in answer.events()
        if isinstance(event, dict)
        for choice in event.get("choices", ())
        for token in choice["token_ids"]
    ]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["prompt", "after a shared prefix", "answer"])
def test_nan_from_one_token_fails_its_request_alone(
    poisoned: tuple[Path, int], poisoned_server: Server, oracle: Any, prompts: list[list[int]], stream: bool, where: str
) -> None:
    server, token = poisoned_server, poisoned[1]
    neighbours = [*prompts, prompts[-1]]
    assert len(neighbours) == NUM_NEIGHBOURS
    fields: dict[str, Any] = {"prompt": [5, token, 6], "stream": stream}
    if where == "after a shared prefix":
        fields["prompt"] = [*prompts[-1], token]
    if where == "answer":
        fields |= {"prompt": [5, 6], "logit_bias": {str(token): 100}}
    with ThreadPoolExecutor(NUM_NEIGHBOURS) as pool:
        answers = [pool.submit(server.complete, ids, max_tokens=64, return_token_ids=True) for ids in neighbours]
        bad = [server.complete(**fields)]
        while not all(answer.done() for answer in answers):
            bad.append(server.complete(**fields))
    for answer in bad:
        error = told(answer)
        assert (error["code"], error["type"], error["param"]) == ("nan_logits", "server_error", None)
    assert [token_ids(answer.result()) for answer in answers] == oracle().greedy(neighbours, 64)
    after = [server.complete(ids, max_tokens=64, return_token_ids=True) for ids in neighbours[-2:]]
    assert [token_ids(answer) for answer in after] == oracle().greedy(neighbours[-2:], 64)  # from the cache, too

    def free() -> bool:
        server.complete([1], max_tokens=2)
        return gauge(server, "num_requests_running") == gauge(server, "kv_blocks", 'state="used"') == 0

    wait_until(free, "free blocks")
    assert "nan_logits" not in server.stderr and "Traceback" not in server.stderr


def test_what_is_computed_beside_nan_is_right_for_others(
    poisoned: tuple[Path, int], oracle: Any, prompts: list[list[int]], engine: Any, greedy: Any
) -> None:
    """The requests that break come first in a step: the others read the blocks before the NaN while they are filled."""
    shared = [ids for ids in prompts if len(ids) > 16]
    llm = engine(poisoned[0], block_size=16, max_num_seqs=16)
    outputs = llm.generate([*([*ids, poisoned[1]] for ids in shared), *shared], greedy(64), use_tqdm=False)
    found = [(output.outputs[0].stop_reason, list(output.outputs[0].token_ids)) for output in outputs]
    assert found == [("nan_logits", [])] * len(shared) + [(None, ids) for ids in oracle().greedy(shared, 64)]


# --- our own code ---------------------------------------------------------------------------------------------------


SECRET = "what only the log may say"


class Planted(RuntimeError):
    """An exception that no code expects."""

    def __init__(self) -> None:
        super().__init__(SECRET)


def is_bad(request: Any) -> bool:
    return request is not None and request.new.request_id.startswith(BAD)


def taking(inside: Inside, patch: pytest.MonkeyPatch) -> None:
    add = inside.core.scheduler.roster.add

    def broken(new: Any, *args: Any) -> Any:
        request = add(new, *args)
        if is_bad(request):
            inside.core.scheduler.roster.remove(request)
            raise Planted
        return request

    patch.setattr(inside.core.scheduler.roster, "add", broken)


def admitting(inside: Inside, patch: pytest.MonkeyPatch) -> None:
    enter = inside.core.scheduler.admitter._enter

    def broken(request: Any, *given: Any) -> Any:
        admission = enter(request, *given)
        if is_bad(request):
            raise Planted  # with a slot and blocks
        return admission

    patch.setattr(inside.core.scheduler.admitter, "_enter", broken)


def growing(inside: Inside, patch: pytest.MonkeyPatch) -> None:
    allocator, requests = inside.core.scheduler.allocator, inside.core.scheduler.table.requests

    def grow_many(self: KVAllocator, slots: Any, needed: Any) -> Any:
        short = slots[needed > self.capacity[slots]].tolist()
        if any(is_bad(requests[slot]) for slot in short):
            raise Planted
        return KVAllocator.grow_many(self, slots, needed)

    def grow(self: KVAllocator, slot: int, num_tokens: int) -> Any:
        if is_bad(requests[slot]):
            raise Planted
        return KVAllocator.grow(self, slot, num_tokens)

    patch.setattr(allocator, "grow_many", grow_many.__get__(allocator))
    patch.setattr(allocator, "grow", grow.__get__(allocator))


def indexing(inside: Inside, patch: pytest.MonkeyPatch) -> None:
    publish = inside.core.scheduler.roster.publish

    def broken(request: Any, num_tokens: int) -> None:
        if is_bad(request) and num_tokens > len(BAD_IDS):
            raise Planted
        publish(request, num_tokens)

    patch.setattr(inside.core.scheduler.roster, "publish", broken)


def making(inside: Inside, patch: pytest.MonkeyPatch) -> None:
    spec = front_end.sampler_spec

    def broken(params: Any, seed: int, num_prompt: int, *rest: Any) -> Any:
        if num_prompt == len(BAD_IDS):
            raise Planted
        return spec(params, seed, num_prompt, *rest)

    patch.setattr(front_end, "sampler_spec", broken)


class BrokenText:
    """A text that cannot be made any more after a few tokens."""

    def __init__(self, text: Any) -> None:
        self._text, self._pushes = text, 0
        self.stepwise = True  # as with stop strings: in the middle of a step

    @property
    def text(self) -> str:
        return str(self._text.text)

    def push(self, *args: Any, **options: Any) -> Any:
        self._pushes += 1
        if self._pushes > 5:
            raise Planted
        return self._text.push(*args, **options)


def detokenizing(inside: Inside, patch: pytest.MonkeyPatch) -> None:
    text = FrontEnd._text

    def broken(self: FrontEnd, token_ids: list[int], params: Any) -> Any:
        return BrokenText(text(self, token_ids, params)) if token_ids == BAD_IDS else text(self, token_ids, params)

    patch.setattr(FrontEnd, "_text", broken)


def handing_out(inside: Inside, patch: pytest.MonkeyPatch) -> None:
    output = Generation.output

    def broken(self: Generation) -> Any:
        if self.request_id.startswith(BAD) and len(self.completions[0].token_ids) > 3:
            raise Planted
        return output(self)

    patch.setattr(Generation, "output", broken)


def writing(inside: Inside, patch: pytest.MonkeyPatch) -> None:
    piece, whole = CompletionWriter.piece, CompletionWriter.whole

    def broken_piece(self: CompletionWriter, choice: int, new: Any, usage: bytes) -> bytes:
        if self._job.request_id == BAD:
            raise Planted
        return piece(self, choice, new, usage)

    def broken_whole(self: CompletionWriter, outputs: Any, usage: Any) -> bytes:
        if self._job.request_id == BAD:
            raise Planted
        return whole(self, outputs, usage)

    patch.setattr(CompletionWriter, "piece", broken_piece)
    patch.setattr(CompletionWriter, "whole", broken_whole)


PLACES: tuple[Callable[[Inside, pytest.MonkeyPatch], None], ...] = (
    taking,
    admitting,
    growing,
    indexing,
    making,
    detokenizing,
    handing_out,
    writing,
)


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with running_inside(mock_step_ms=2.0, max_num_seqs=16, block_size=32) as inside:
        yield inside


@pytest.fixture(scope="module")
def undisturbed(inside: Inside) -> list[tuple[str, object]]:
    return [outcome(inside.server.complete(f"Story {i}", seed=i, max_tokens=100)) for i in range(NUM_NEIGHBOURS)]


@pytest.mark.parametrize(("stream", "n"), [(True, 3), (False, 1)])
@pytest.mark.parametrize("plant", PLACES, ids=lambda plant: plant.__name__)
def test_an_exception_over_one_request_fails_it_alone(
    inside: Inside,
    undisturbed: list[tuple[str, object]],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[Inside, pytest.MonkeyPatch], None],
    stream: bool,
    n: int,
) -> None:
    server = inside.server
    plant(inside, monkeypatch)
    with ThreadPoolExecutor(NUM_NEIGHBOURS) as pool:
        neighbours = start_streams(pool, server, NUM_NEIGHBOURS, max_tokens=100)
        body = {"prompt": BAD_IDS, "max_tokens": 60, "ignore_eos": True, "stream": stream, "n": n, "seed": 1}
        bad = server.ask("/v1/completions", body, **{"X-Request-Id": BAD})
        assert [outcome(stream.result()) for stream in neighbours] == undisturbed
    error = told(bad)
    assert error["type"] == "server_error" and error["code"] in ("internal", "internal_error")
    assert SECRET not in json.dumps(error) and bad.headers["x-request-id"] == BAD
    wait_until(lambda: nothing_is_held(server), "free blocks")
    inside.check()
    monkeypatch.undo()
    again = server.ask("/v1/completions", body, **{"X-Request-Id": BAD})
    assert again.status == 200 and (again.error() is None if stream else len(again.json()["choices"]) == n)
