"""Front ends of one core: each gets its part of the outputs, and the core's sockets know whom a message concerns."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from msgspec import structs

from quire.config.engine import EngineConfig
from quire.config.serve import ServerConfig
from quire.contracts.output import Finish, StepOutputs, StepStats
from quire.contracts.prefix import Miss, PrefixReport
from quire.contracts.request import FinishReason, NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import Fetched, RowLogprobs, Tier
from quire.procs.core_server import CoreSockets
from quire.procs.front_ends import (
    MOST_RESTARTS,
    RESTART_SECONDS,
    FrontPlace,
    Restarts,
    owner,
    parts,
    start_front,
)
from quire.procs.held_signals import HELD
from quire.procs.messages import Add, Back, CoreStart, Dropped, FromCore, Gone, Outputs, Ready, Rejected, Reply, Stop
from quire.procs.wire import FROM_CORE, encode

COUNT = 3
PLACES = FrontPlace(count=COUNT).every()
ROWS = RowLogprobs(
    ids=np.zeros((1, 1), np.int32), logprobs=np.zeros((1, 1), np.float32), ranks=np.ones((1, 1), np.int32)
)
PREFIX = PrefixReport(num_reused=0, num_blocks=1, block=0, position=0, why=Miss.DROPPED)
FETCHED = Fetched(tier=Tier.HOST)


def request(handle: int) -> NewRequest:
    return NewRequest(
        handle=handle,
        request_id=str(handle),
        token_ids=bytes(4),
        max_tokens=1,
        sampler=SamplerSpec(seed=0, num_prompt=1),
    )


def outputs(*numbers: int) -> StepOutputs:
    """Outputs of a step in which each of these requests got a token, and each field has all of them."""
    return StepOutputs(
        handles=np.array(numbers, np.int32),
        tokens=np.arange(len(numbers), dtype=np.int32),
        finished=tuple(Finish(handle=number, reason=FinishReason.LENGTH) for number in numbers),
        preempted=numbers,
        cached=dict.fromkeys(numbers, 1),
        prefixes=dict.fromkeys(numbers, PREFIX),
        origins=dict.fromkeys(numbers, {0: FETCHED}),
        homes=dict.fromkeys(numbers, 1),
        logprobs=dict.fromkeys(numbers, ROWS),
        prompt_logprobs=dict.fromkeys(numbers, ROWS),
        stats=StepStats(step=7, num_running=len(numbers), num_tokens=9),
    )


def test_every_request_is_in_the_part_of_its_front_end() -> None:
    numbers = [place.first + i for i in (5, 0, 5) for place in PLACES] + [PLACES[1].end - 1]
    whole = outputs(*numbers)
    found = list(parts(whole, COUNT))
    for place, part in zip(PLACES, found, strict=True):
        mine = [number for number in numbers if owner(number, COUNT) == place.number]
        assert part.handles.tolist() == mine == list(part.preempted) == [finish.handle for finish in part.finished]
        assert part.tokens.tolist() == [at for at, number in enumerate(numbers) if number in mine]
        for name in ("cached", "prefixes", "origins", "homes", "logprobs", "prompt_logprobs"):
            assert list(getattr(part, name)) == list(dict.fromkeys(mine))
    assert [structs.replace(part.stats, step=0, num_elsewhere=0) for part in found] == (
        [structs.replace(whole.stats, step=0)] * COUNT
    )
    assert [(part.stats.step, part.stats.num_elsewhere) for part in found] == [(7, 7), (-1, 0), (-1, 0)]


def test_the_numbers_of_front_ends_do_not_meet_and_are_int32() -> None:
    for count in (1, 2, 3, 7, 64):
        every = FrontPlace(count=count).every()
        every = [half for place in every for half in (place, place.next)]
        assert every[0].first == 0 and every[-1].end <= 2**31
        assert all(before.end <= after.first for before, after in zip(every, every[1:], strict=False))
        assert every[0].next.next.first == 0, "processes of a place use its two halves in turn"
        assert [owner(number, count) for place in every for number in (place.first, place.end - 1)] == (
            [place.number for place in every for _ in range(2)]
        )


def test_a_message_goes_to_those_whom_it_concerns(tmp_path: Path) -> None:
    places = FrontPlace(count=COUNT, folder=str(tmp_path)).every()
    context: Any = zmq.Context()
    receivers, speaker = [context.socket(zmq.PULL) for _ in places], context.socket(zmq.PUSH)
    for receiver, place in zip(receivers, places, strict=True):
        receiver.bind(place.from_core)
        receiver.rcvtimeo = 200
    sockets = CoreSockets(CoreStart(config=EngineConfig(), places=tuple(places)))
    speaker.connect(places[0].to_core)

    def told(message: FromCore) -> list[FromCore | None]:
        sockets.send(message)
        found: list[FromCore | None] = []
        for receiver in receivers:
            try:
                found.append(FROM_CORE.decode(receiver.recv()))
            except zmq.Again:
                found.append(None)
        return found

    try:
        ready = Ready(
            max_model_len=1,
            vocab_size=1,
            num_slots=1,
            num_blocks=1,
            block_size=1,
            depth=1,
            dtype="",
            device="",
            weight_bytes=0,
            kv_bytes=0,
        )
        assert told(ready) == [ready] * 3
        reply, refusal = Reply(places[2].first + 4, True), Rejected((places[1].first,), "QueueFull", "full")
        assert told(reply) == [None, None, reply] and told(refusal) == [None, refusal, None]
        assert told(Dropped("to_core", 1))[1:] == [None, None]
        heard = told(Outputs(outputs(places[1].first + 3)))
        handles = [one.step.handles.tolist() for one in heard if isinstance(one, Outputs)]
        assert handles == [[], [places[1].first + 3], []]
        speaker.send(encode(Gone(places[1])))
        assert sockets.receive(True) == Gone(places[1])
        assert told(ready) == [ready, None, ready]
        speaker.send(encode(Add((request(places[1].first + 5),))))  # it waited in a socket
        speaker.send(encode(Add((request(places[2].first + 5),))))
        taken = sockets.receive(True)
        assert isinstance(taken, Add) and taken.requests[0].handle == places[2].first + 5
        back = places[1].next
        receivers[1].bind(back.from_core)
        speaker.send(encode(Back(back)))
        speaker.send(encode(Add((request(places[1].first + 6),))))  # of the process that has ended
        speaker.send(encode(Add((request(back.first),))))
        taken = sockets.receive(True)
        assert isinstance(taken, Add) and taken.requests[0].handle == back.first
        assert FROM_CORE.decode(receivers[1].recv()) == ready
        refusal = Rejected((back.first,), "QueueFull", "full")
        assert told(refusal) == [None, refusal, None]
        speaker.send(encode(Stop()))
        assert isinstance(sockets.receive(True), Stop)
    finally:
        speaker.close(0)
        for receiver in receivers:
            receiver.close(0)
        sockets.close()
        context.term()


def test_a_front_end_is_started_again_later_each_time_and_not_for_ever() -> None:
    restarts, place, now, waits = Restarts(), PLACES[1], 100.0, list[float]()
    while (wait := restarts.ended(place, now)) is not None:
        waits.append(wait)
        assert restarts.due(now + 0.99 * wait) == []
        now += wait
        assert restarts.due(now) == [place.next] and restarts.due(now) == []
        place = place.next
    assert len(waits) == MOST_RESTARTS and all(2 * a == b for a, b in zip(waits, waits[1:], strict=False))
    assert restarts.due(now + 100) == []
    assert restarts.ended(PLACES[2], now) == waits[0], "places are counted together"
    assert restarts.ended(PLACES[1], now + RESTART_SECONDS) == waits[0], "old ends count"


def test_a_signal_of_the_operator_does_not_end_a_front_end_that_only_starts() -> None:
    """Here a module of Python stands for it, which reads its standard input to the end and has no handlers."""
    reader, writer = os.pipe()
    child = start_front("tokenize", ServerConfig.from_flat(device="mock"), reader, PLACES[1])
    for number in HELD:
        child.send_signal(number)
    child.release(0)  # standard input ends
    child.release()
    os.close(reader)
    os.close(writer)
    assert "exited" in str(child.ended())
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*HELD}  # of this process
