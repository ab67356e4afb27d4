"""Every record that crosses a process boundary comes out as it went in, and nothing else comes out."""

import msgspec
import numpy as np
import pytest

from quire.contracts.output import Finish, StepOutputs, StepStats
from quire.contracts.prefix import Miss, PrefixReport
from quire.contracts.request import FinishReason, NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import Admission, HostDrafts, RowLogprobs, SharedPrefix, StepPlan, StepResult
from quire.procs import messages as say
from quire.procs import wire
from quire.procs.wire import Messages, encode

SPEC = SamplerSpec(
    seed=2**64 - 1,
    num_prompt=3,
    temperature=0.5,
    stop_ids=(7, 9),
    logit_bias=((4, -1.5),),
    bad_words=((1, 2), (3,)),
    num_logprobs=-1,
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def rows(count: int, width: int) -> RowLogprobs:
    return RowLogprobs(
        np.arange(count * width, dtype=np.int32).reshape(count, width),
        -np.ones((count, width), np.float32) / 3,
        ints(*range(1, count + 1)),
    )


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


PLAN = StepPlan(
    step=12,
    slots=ints(3, 1),
    num_decodes=1,
    num_tokens=ints(1, 64),
    num_rows=ints(1, 0),
    outputs=np.array([1, 0], np.uint8),
    admitted=(
        Admission(
            slot=1,
            request_id="ü",
            token_ids=np.arange(100, dtype=np.int32),
            block_ids=(ints(4, 5),),
            num_computed=16,
            sampler=SPEC,
            pool="mean",
        ),
    ),
    appended=ints(3, 0, 9, 3, 0, 10).reshape(2, 3),
    released=ints(7),
    shared=(SharedPrefix(ints(1, 3), 2),),
    grammar=ints(3),
    drafts=(HostDrafts(3, 2**20, ints(5, 6)),),
)
RESULT = StepResult(
    step=5,
    slots=ints(2),
    tokens=ints(8).reshape(1, 1),
    num_accepted=ints(1),
    logprobs={2: rows(1, 3)},
    pooled={6: np.array([0.1, -2.0], np.float32)},
    failed={4: "nan_logits"},
    num_computed=65,
    moved=3,
)
OUTPUTS = StepOutputs(
    handles=ints(10, 2**31 - 1),
    tokens=ints(5, 6),
    cached={10: 32},
    prefixes={10: PrefixReport(num_reused=2, num_blocks=4, block=2, position=32, why=Miss.TOKENS, differs_at=40)},
    logprobs={10: rows(1, 21)},
    prompt_logprobs={10: rows(7, 1)},
    stats=StepStats(step=3, num_running=2),
    finished=(
        Finish(handle=10, reason=FinishReason.STOP, stop_id=5),
        Finish(handle=11, reason=FinishReason.STOP, vector=np.array([1 / 3, 1e-30], np.float32)),
        Finish(handle=4, reason=FinishReason.ERROR, error="x"),
    ),
)
REQUEST = NewRequest(
    handle=1,
    request_id="r",
    token_ids=bytes(range(12)),
    max_tokens=4,
    sampler=SPEC,
    stop_ids=(7,),
    priority=-3,
    parent=0,
    deadline=1.5,
    cache_salt="s",
    read_prefix_cache=False,
    pool="cls",
)
EMPTY_PLAN = StepPlan(
    step=0, slots=ints(), num_decodes=0, num_tokens=ints(), num_rows=ints(), outputs=np.empty(0, np.uint8)
)
EMPTY_OUTPUTS = StepOutputs(handles=ints(), tokens=ints())


@pytest.mark.parametrize("message", [PLAN, RESULT, OUTPUTS, REQUEST, EMPTY_PLAN, EMPTY_OUTPUTS])
def test_a_message_comes_out_as_it_went_in(message) -> None:
    data = encode(message)
    assert same(message, Messages(type(message)).decode(data))
    assert same(message, Messages(type(message)).decode(memoryview(b"x" + data)[1:]))  # unaligned


def test_arrays_can_be_written_after_decoding() -> None:
    data = bytearray(encode(PLAN))
    plan = Messages(StepPlan).decode(data)
    plan.slots[0] = 99
    plan.appended[1] = 0
    data[:] = bytes(len(data))
    assert plan.admitted[0].token_ids[99] == 99


def test_an_array_that_is_not_contiguous_is_sent_by_value() -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    outputs = StepOutputs(handles=table[:, 1], tokens=table.T[2])
    back = Messages(StepOutputs).decode(encode(outputs))
    assert back.handles.tolist() == [1, 5, 9] and back.tokens.tolist() == [2, 6, 10]


def test_what_is_no_array_of_ours_is_not_sent() -> None:
    with pytest.raises(TypeError, match="ndarray cannot be sent"):
        encode(StepOutputs(handles=np.zeros(2, np.complex64), tokens=ints(1, 2)))
    with pytest.raises(TypeError, match="Path cannot be sent"):
        from pathlib import Path

        encode(StepOutputs(handles=ints(), tokens=ints(), cached={1: Path("x")}))


def test_an_element_type_that_the_field_does_not_have_is_refused() -> None:
    floats = StepOutputs(handles=np.zeros(2, np.float32), tokens=ints(1, 2))
    with pytest.raises(msgspec.ValidationError, match="int32"):
        Messages(StepOutputs).decode(encode(floats))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(OUTPUTS)[:-3],
        encode(REQUEST),
        msgspec.msgpack.encode({"handles": [1], "tokens": [2]}),
        msgspec.msgpack.encode({"handles": msgspec.msgpack.Ext(1, b""), "tokens": msgspec.msgpack.Ext(1, b"")}),
        msgspec.msgpack.encode({"handles": msgspec.msgpack.Ext(1, b"\x00\xff"), "tokens": 0}),
        msgspec.msgpack.encode({"handles": msgspec.msgpack.Ext(1, b"\x00\x01\xff\xff\xff\xff"), "tokens": 0}),
        msgspec.msgpack.encode({"handles": msgspec.msgpack.Ext(1, b"\x09\x00"), "tokens": 0}),
        msgspec.msgpack.encode({"handles": msgspec.msgpack.Ext(2, b"\x00\x01\x00\x00\x00\x00"), "tokens": 0}),
    ],
)
def test_bytes_that_are_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        Messages(StepOutputs).decode(data)


TO_CORE = [say.Add((REQUEST, REQUEST)), say.Abort((1, 2**31 - 1)), say.Control(7, "reset_prefix_cache"), say.Stop()]
FROM_CORE = [
    say.Loading("weights", 1, 2**40, "B"),
    say.Ready(
        max_model_len=1,
        vocab_size=2,
        num_slots=3,
        num_blocks=4,
        block_size=5,
        depth=1,
        dtype="bfloat16",
        device="cpu",
        weight_bytes=6,
        kv_bytes=2**40,
        plans={"norm": "ref"},
        phases={"weights": 0.5},
        notes=("ü",),
    ),
    say.Outputs(OUTPUTS),
    say.Outputs(EMPTY_OUTPUTS),
    say.Rejected((1, 2), "QueueFull", "full", None),
    say.Reply(7, True),
    say.Reply(8, None, "no"),
    say.Failed("EngineDead", "why", "Traceback"),
]


def test_messages_come_out_as_what_they_are() -> None:
    for message in TO_CORE:
        assert same(message, wire.TO_CORE.decode(encode(message)))
    for message in FROM_CORE:
        assert same(message, wire.FROM_CORE.decode(encode(message)))


def test_a_message_in_the_wrong_direction_is_refused() -> None:
    for message in TO_CORE:
        with pytest.raises(msgspec.DecodeError):
            wire.FROM_CORE.decode(encode(message))
    for message in FROM_CORE:
        with pytest.raises(msgspec.DecodeError):
            wire.TO_CORE.decode(encode(message))
    with pytest.raises(msgspec.DecodeError):
        wire.TO_CORE.decode(b"\xc1")
    floats = say.Outputs(StepOutputs(handles=np.zeros(2, np.float32), tokens=ints(1, 2)))
    with pytest.raises(msgspec.ValidationError, match="int32"):
        wire.FROM_CORE.decode(encode(floats))
