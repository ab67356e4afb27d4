"""Events of a response: OpenAI's order for every kind of item, and the same object however the answer was cut."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from quire.answers.answer_events import CallArguments, CallBegins, Event, Thought, Words
from quire.answers.choice_parser import ParserPlan
from quire.contracts.output import CompletionOutput, RequestOutput
from quire.contracts.sampling import SamplingParams
from quire.entry.http.errors import HttpError
from quire.entry.http.openai.generate import usage
from quire.entry.http.openai.responses_schema import ReasoningOptions, ResponseRequest
from quire.entry.http.openai.responses_writer import ResponseWriter

ANSWER: list[Event] = [
    Thought("let "),
    Thought("me see"),
    Words("I "),
    Words("ask."),
    CallBegins(0, "call_a", "add"),
    CallArguments(0, '{"a"'),
    CallArguments(0, ":1}"),
    CallBegins(1, "call_b", "now"),
    CallArguments(1, "{}"),
]


class Read:
    """A parser whose pieces are what a test says."""

    num_thought = 2

    def __init__(self, pieces: list[list[Event]]) -> None:
        self._pieces = iter(pieces)

    def events(self, piece: CompletionOutput) -> list[Event]:
        return next(self._pieces)


def writer_of(
    pieces: list[list[Event]],
    kept: list[bytes],
    params: SamplingParams | None = None,
    plan: ParserPlan | None = None,
    **fields: Any,
) -> ResponseWriter:
    job: Any = SimpleNamespace(
        params=params or SamplingParams(),
        parser_plan=plan or ParserPlan(),
        model="m",
        created=7,
        parsers=lambda tokenizer: [Read(pieces)],
    )
    return ResponseWriter(job, None, ResponseRequest(**fields), "resp_1", kept.append)


def piece_of(finish: str | None) -> CompletionOutput:
    return CompletionOutput(index=0, text="", token_ids=[1], finish_reason=finish)


def streamed(pieces: list[list[Event]], finish: str = "stop", **fields: Any) -> tuple[list[Any], list[bytes]]:
    """All events, and what was kept."""
    kept: list[bytes] = []
    writer = writer_of(pieces, kept, **fields)
    frames = writer.begin(0, None)  # type: ignore[arg-type]
    for at in range(len(pieces)):
        frames += writer.piece(0, piece_of(finish if at == len(pieces) - 1 else None), b"")
    assert not kept
    frames += writer.end(usage(3, 9, 1))
    return [json.loads(frame.partition(b"\ndata: ")[2]) for frame in frames.split(b"\n\n")[:-1]], kept


def built(events: list[Any]) -> list[Any]:
    """The output that a client makes of the deltas; every `done` must say the same."""
    items: list[Any] = []
    for event in events:
        what, at = event["type"].removeprefix("response."), event.get("output_index")
        if what == "output_item.added":
            assert at == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif what == "output_item.done":
            assert event["item"] == items[at] | {"status": event["item"]["status"]}
            items[at] = event["item"]
        elif at is not None:
            item = items[at]
            assert event["item_id"] == item["id"] and item["status"] == "in_progress"
            parts = item["summary"] if "summary_index" in event else item.get("content")
            if what.endswith("part.added"):
                assert parts == []
                parts.append(event["part"])
            elif what.endswith("part.done"):
                assert parts == [event["part"]]
            else:
                holder, text = (item, "arguments") if item["type"] == "function_call" else (parts[0], "text")
                holder[text] = holder[text] + event["delta"] if what.endswith("delta") else holder[text]
                assert what.endswith("delta") or event[text] == holder[text]
    return items


def names(events: list[Any]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


@pytest.mark.parametrize("cut", range(len(ANSWER) + 1))
@pytest.mark.parametrize("fields", [{}, {"reasoning": ReasoningOptions(summary="auto")}], ids=["content", "summary"])
def test_pieces_add_up_to_the_whole(cut: int, fields: dict[str, Any]) -> None:
    events, kept = streamed([ANSWER[:cut], ANSWER[cut:]], **fields)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert built(events) == last["output"] and kept == [json.dumps(last, separators=(",", ":")).encode()]
    whole = writer_of([ANSWER], [], **fields)
    body = json.loads(
        whole.whole(
            [
                RequestOutput(
                    request_id="r", prompt=None, prompt_token_ids=[], finished=True, outputs=[piece_of("stop")]
                )
            ],
            usage(3, 9, 1),
        )
    )
    assert body | {"completed_at": 0} == last | {"completed_at": 0}
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert {item["status"] for item in body["output"]} == {"completed"} and body["status"] == "completed"
    assert body["output"][3] == {
        "id": "fc_13",
        "status": "completed",
        "type": "function_call",
        "call_id": "call_b",
        "name": "now",
        "arguments": "{}",
    }
    thought = body["output"][0]["summary" if fields else "content"]
    assert thought == [{"type": "summary_text" if fields else "reasoning_text", "text": "let me see"}]
    assert body["usage"] == {
        "input_tokens": 3,
        "output_tokens": 9,
        "total_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 2},
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
    }


def test_the_order_of_events() -> None:
    events, _ = streamed([[Thought("a")], [Words("b"), CallBegins(0, "c", "f"), CallArguments(0, "{}")]])
    assert names(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert (events[-3]["name"], events[-3]["arguments"]) == ("f", "{}")
    events, _ = streamed([[Thought("a")], [Words("b")]], reasoning=ReasoningOptions(summary="detailed"))
    assert names(events)[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]


def test_what_is_cut_off_is_incomplete() -> None:
    events, _ = streamed([[Thought("a")], [Words("b")]], finish="length")
    last = events[-1]
    assert last["type"] == "response.incomplete" and last["response"]["completed_at"] is None
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]
    events, _ = streamed([[Thought("a")]], finish="length")
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning"]


def test_an_answer_without_anything_is_an_empty_message() -> None:
    events, _ = streamed([[]])
    (item,) = built(events)
    assert item["type"] == "message" and item["content"][0]["text"] == ""
    assert events[-1]["type"] == "response.completed"


def test_logprobs_beside_reasoning_are_refused() -> None:
    class Busy(ParserPlan):
        content_only = False  # type: ignore[assignment]

    with pytest.raises(HttpError, match="logprobs"):
        writer_of([], [], SamplingParams(logprobs=1), Busy())
