"""Writer of a response: the events of its stream, in OpenAI's order, and the object that they add up to. A whole answer
is made from the same events, so that both are equal."""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from quire.answers.answer_events import CallBegins, Event, Thought, Words
from quire.contracts.output import CompletionOutput, RequestOutput
from quire.entry.http.errors import not_implemented
from quire.entry.http.kept.store import numbered
from quire.entry.http.openai.generate import Job, Writer
from quire.entry.http.openai.logprobs import TokenNames, chat_logprobs
from quire.entry.http.openai.responses_schema import ReasoningOptions, ResponseRequest, TextOptions
from quire.entry.http.openai.schema import Usage
from quire.text.tokenizer import Tokenizer

ENCODE = msgspec.json.Encoder().encode
ECHOED: dict[str, Any] = {  # fields of the request that the answer repeats, with their defaults
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": ReasoningOptions(),
    "safety_identifier": None,
    "store": True,
    "text": TextOptions(),
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}


# A kind of item: (prefix of its id, its constant fields, the field of its part ("" for a call, which has arguments),
# the part's constant fields, name of the part's events, name of the text's events, field of the part's number there).
Kind = tuple[str, dict[str, Any], str, dict[str, Any], str, str, str]
PART = "response.content_part"
MESSAGE: Kind = (
    "msg",
    {"type": "message", "role": "assistant"},
    "content",
    {"type": "output_text", "annotations": []},
    PART,
    "response.output_text",
    "content_index",
)
THOUGHT: Kind = (
    "rs",
    {"type": "reasoning", "summary": [], "encrypted_content": None},
    "content",
    {"type": "reasoning_text"},
    PART,
    "response.reasoning_text",
    "content_index",
)
SUMMARY: Kind = (
    "rs",
    {"type": "reasoning", "encrypted_content": None},
    "summary",
    {"type": "summary_text"},
    "response.reasoning_summary_part",
    "response.reasoning_summary_text",
    "summary_index",
)
CALL: Kind = ("fc", {"type": "function_call"}, "", {}, "", "response.function_call_arguments", "")


class ResponseWriter(Writer):
    """Writer of an answer of /v1/responses. When the response ends, `keep` is called with its JSON.

    collects   keep the events until somebody takes them; the n-th of all has the sequence number n
    """

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer | None,
        request: ResponseRequest,
        response_id: str,
        keep: Callable[[bytes], None],
        *,
        collects: bool = False,
    ) -> None:
        if job.params.logprobs is not None and not job.parser_plan.content_only:
            raise not_implemented(
                "logprobs of an answer with reasoning or calls",
                "leave them out of include, or use a model that does not reason and send no tools.",
                "include",
            )
        (self._parser,) = job.parsers(tokenizer)
        self._names, self._num_top = TokenNames(tokenizer), request.top_logprobs or 0
        self._keep, self._number, self._finish = keep, -1, ""
        self._collects, self._made = collects, list[bytes]()
        given = {name: value for name in ECHOED if (value := getattr(request, name)) is not None}
        self._output: list[dict[str, Any]] = []
        self._answer: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": job.created,
            "status": "in_progress",
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": job.model,
            "output": self._output,
            "usage": None,
            "service_tier": "default",
            "temperature": job.params.temperature,
            "top_p": job.params.top_p,
            **ECHOED,
            **given,
        }
        self._thought = SUMMARY if request.reasoning is not None and request.reasoning.summary else THOUGHT
        # The open item: its kind, its part, the pieces of its text, and the fields that locate it in its events.
        self._kind: Kind | None = None
        self._part, self._text, self._place = dict[str, Any](), list[str](), dict[str, Any]()

    @property
    def body(self) -> bytes:
        """The response in its current state, as JSON."""
        return ENCODE(self._answer)

    def begin(self, prompt: int, output: RequestOutput, usage: bytes = b"") -> bytes:
        """Return the first events, which hold the response without items. See `Writer`."""
        return b"".join(self._event(f"response.{name}", response=self._answer) for name in ("created", "in_progress"))

    def piece(self, choice: int, piece: CompletionOutput, usage: bytes) -> bytes:
        """Return the events for the new part of the answer. The last part closes the last item. See `Writer`."""
        rows = piece.logprobs or []
        logprobs = chat_logprobs(self._names, piece.token_ids[: len(rows)], rows, self._num_top).content
        frames = list[bytes]()
        for event in self._parser.events(piece) or ([Words("")] if logprobs else []):
            frames += self._tell(event, logprobs)
        if piece.finish_reason is not None:
            if not self._output:
                frames += self._open(MESSAGE)
            self._finish = piece.finish_reason
            frames += self._close("incomplete" if self._finish == "length" else "completed")
        return b"".join(frames)

    def end(self, usage: Usage) -> bytes:
        """Return the last event, with the whole response."""
        cut = self._finish == "length"
        self._answer["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parser.num_thought},
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
        }  # OpenAI bills what it writes; nothing is billed here
        self._answer["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        self._answer["completed_at"] = None if cut else int(time.time())
        return self.stop("incomplete" if cut else "completed")

    def whole(self, outputs: list[RequestOutput], usage: Usage) -> bytes:
        """Return the whole response as JSON. See `Writer`."""
        self.piece(0, outputs[0].outputs[0], b"")
        self.end(usage)
        return self.body

    def stop(self, status: str, told: dict[str, Any] | None = None) -> bytes:
        """End the response with a status, give it to `keep`, and return its last events. `told`: fields of an error
        event that follows."""
        frames = self._close("incomplete")
        self._answer["status"] = status
        frames.append(self._event(f"response.{status}", response=self._answer))
        if told is not None:
            frames.append(self._event("error", **told))
        self._keep(self.body)
        return b"".join(frames)

    def fail(self, status: int, body: bytes) -> bytes:
        """End the response with an error. Return the last events: the response, then the error, which clients raise.
        `status`, `body`: the HTTP status and JSON body of the error, as `Exchange.ending` gets them."""
        error = msgspec.json.decode(body)["error"]
        # OpenAI's codes are an enumeration; "invalid_prompt" is the one for invalid requests.
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(status, "server_error")
        self._answer["error"] = {"code": code, "message": error["message"]}
        told = {name: error[name] for name in ("code", "message", "param")}
        return self.stop("failed", {**told, "error": error})

    def take(self) -> list[bytes]:
        """Return the events since the last call, if they are collected."""
        taken, self._made = self._made, []
        return taken

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        made = numbered(kind, self._number, **fields)
        if self._collects:
            self._made.append(made)
        return made

    def _tell(self, event: Event, logprobs: list[Any]) -> list[bytes]:
        """Return the events for one event of the parser."""
        if isinstance(event, CallBegins):
            return self._open(CALL, call_id=event.call_id, name=event.name, arguments="")
        kind = MESSAGE if isinstance(event, Words) else self._thought if isinstance(event, Thought) else CALL
        frames = [] if self._kind is kind else self._open(kind)
        self._text.append(event.text)
        more = {}
        if kind is MESSAGE:
            more["logprobs"] = logprobs
            self._part["logprobs"] += logprobs
        return [*frames, self._event(f"{kind[5]}.delta", **self._place, delta=event.text, **more)]

    def _open(self, kind: Kind, **fields: Any) -> list[bytes]:
        """Close the open item and begin another. Its id contains the id of the response, and its place there."""
        prefix, held, field, part, part_events, _, number = kind
        frames, index = self._close("completed"), len(self._output)
        item = {
            "id": f"{prefix}_{self._answer['id'].partition('_')[2]}{index:x}",
            "status": "in_progress",
            **held,
            **({field: []} if field else {}),
            **fields,
        }
        frames.append(self._event("response.output_item.added", output_index=index, item=item))
        self._output.append(item)
        self._kind, self._part, self._place = kind, item, {"item_id": item["id"], "output_index": index}
        if field:
            self._place[number] = 0
            self._part = {**part, "text": "", **({"logprobs": []} if kind is MESSAGE else {})}
            item[field] = [self._part]
            frames.append(self._event(f"{part_events}.added", **self._place, part=self._part))
        return frames

    def _close(self, status: str) -> list[bytes]:
        kind, text, self._text, self._kind = self._kind, "".join(self._text), [], None
        if kind is None:
            return []
        item, field = self._output[-1], "text" if kind[2] else "arguments"
        self._part[field], item["status"] = text, status
        name = {"name": item["name"]} if kind is CALL else {}  # version 2 of OpenAI's client needs it
        more = {"logprobs": self._part["logprobs"]} if kind is MESSAGE else name
        frames = [self._event(f"{kind[5]}.done", **self._place, **{field: text}, **more)]
        if kind[2]:
            frames.append(self._event(f"{kind[4]}.done", **self._place, part=self._part))
        done = self._event("response.output_item.done", output_index=self._place["output_index"], item=item)
        return [*frames, done]
