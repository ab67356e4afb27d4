"""A stream and its sink: who gets what comes, in which order, and what a sink's fault does."""

import asyncio
from collections.abc import Awaitable

import pytest

from quire.contracts.errors import EngineDead
from quire.contracts.sampling import OutputKind, SamplingParams
from quire.entry.completion import Completion, Generation
from quire.entry.http.request_stream import Batch, RequestStream


def make_stream(prompts: int = 1) -> tuple[RequestStream, list[RequestStream]]:
    """A stream over prompts without text, and the list of those that were closed."""
    closed: list[RequestStream] = []
    stream = RequestStream("r", closed.append)
    params = SamplingParams(output_kind=OutputKind.DELTA, detokenize=False)
    for i in range(prompts):
        completion = Completion(handle=i, index=0, text=None, eos_ids=frozenset(), streamed=True)
        stream.generations.append(
            Generation(
                request_id="r",
                prompt=None,
                prompt_token_ids=[1],
                params=params,
                completions=[completion],
                tokenizer=None,
            )
        )
    stream.num_open = prompts
    return stream, closed


class Basin:
    """A sink that keeps the tokens that it is given."""

    def __init__(self) -> None:
        self.ready = True
        self.fault: Exception | None = None
        self.tokens: list[list[int]] = []

    def take(self, batch: Batch) -> None:
        if self.fault is not None:
            raise self.fault
        self.tokens.append(tokens_of(batch))


def tokens_of(batch: Batch) -> list[int]:
    return [token for _, output in batch for token in output.outputs[0].token_ids]


def come(stream: RequestStream, token: int, index: int = 0) -> None:
    stream.generations[index].completions[0].token_ids.append(token)
    stream.mark(index)


async def read(stream: RequestStream) -> list[list[int]]:
    return [tokens_of(batch) async for batch in stream]


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def run(work: Awaitable[None]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work, 30)

    asyncio.run(main())


def test_what_comes_while_the_reader_waits_goes_into_the_sink() -> None:
    async def work() -> None:
        stream, _ = make_stream(prompts=2)
        basin = Basin()
        stream.pour_into(lambda: basin.ready, basin.take)
        come(stream, 10)  # the reader is not there yet
        stream.tell()
        reader = asyncio.create_task(read(stream))
        await settle()
        come(stream, 11, index=1)
        come(stream, 12)
        stream.tell()
        assert basin.tokens == [[11, 12]]  # one step, one batch, and no task ran
        basin.ready = False
        for token in (13, 14):
            come(stream, token)
            stream.tell()
        await settle()
        basin.ready = True
        come(stream, 15)
        stream.tell()
        come(stream, 16)
        stream.end_one(0)
        stream.end_one(1)
        stream.tell()
        assert await reader == [[10], [13, 14], [16]] and basin.tokens == [[11, 12], [15]]

    run(work())


def test_while_the_reader_is_at_work_everything_waits_for_it() -> None:
    async def work() -> None:
        stream, _ = make_stream()
        basin, taken, held = Basin(), list[list[int]](), asyncio.Event()
        stream.pour_into(lambda: basin.ready, basin.take)

        async def slow() -> None:
            async for batch in stream:
                taken.append(tokens_of(batch))
                await held.wait()

        reader = asyncio.create_task(slow())
        come(stream, 1)
        await settle()
        for token in (2, 3, 4):
            come(stream, token)
            stream.tell()
        assert basin.tokens == [] and taken == [[1]]
        held.set()
        await settle()
        assert taken == [[1], [2, 3, 4]]
        reader.cancel()
        await settle()
        come(stream, 5)
        stream.tell()  # the reader has gone: nothing is written any more
        assert basin.tokens == []

    run(work())


def test_a_fault_of_the_sink_is_the_reader_s() -> None:
    async def work() -> None:
        stream, closed = make_stream()
        basin = Basin()
        basin.fault = ZeroDivisionError("planted")
        stream.pour_into(lambda: basin.ready, basin.take)
        reader = asyncio.create_task(read(stream))
        await settle()
        come(stream, 1)
        stream.tell()
        come(stream, 2)  # comes before the reader has heard of it
        stream.tell()
        with pytest.raises(ZeroDivisionError, match="planted"):
            await reader
        assert closed == [stream] and basin.tokens == []

    run(work())


def test_after_the_end_of_the_engine_nothing_goes_into_the_sink() -> None:
    async def work() -> None:
        stream, _ = make_stream()
        basin = Basin()
        stream.pour_into(lambda: basin.ready, basin.take)
        reader = asyncio.create_task(read(stream))
        await settle()
        stream.fail(EngineDead("gone"))
        come(stream, 1)
        stream.tell()
        with pytest.raises(EngineDead):
            await reader
        assert basin.tokens == []

    run(work())
