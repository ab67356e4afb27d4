"""Parsing of a choice into events (content, reasoning, calls), for all chat routes. Each route writes them in its way.

A `ParserPlan` says how to parse the text of a request's choices. A `ChoiceParser` parses one choice, in pieces of any
size: the joined events of a stream equal those of the whole text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.answers.answer_events import Event, Thought, Words
from quire.answers.message_parser import MessageParser
from quire.answers.output_parser import OutputParser
from quire.contracts.output import CompletionOutput
from quire.contracts.sampling import SamplingParams
from quire.text.detokenizer import detokenizer_for, hidden_ids
from quire.text.output_styles import OutputStyles
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ParserPlan:
    """Plan for parsing the text of a request's choices.

    styles     formats of the model's reasoning and tool calls; None = all text is content
    tools      tools that the model may call, in the API's format; () = the text is not parsed for calls
    thinking   True = the prompt has begun the reasoning, so that the text begins inside it
    parallel   True = the model may make several calls
    must       True = the model must make a call
    named      True = the request names the function to call; then the finish reason is "stop", not "tool_calls"
    thoughts   True = the answer has the reasoning; False = it is dropped
    opened     of a model that writes messages: last tokens of the prompt, from the beginning of a message on
    """

    styles: OutputStyles | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = False
    parallel: bool = True
    must: bool = False
    named: bool = False
    thoughts: bool = True
    opened: tuple[int, ...] = ()

    @property
    def content_only(self) -> bool:
        """True when all text is content, so that nothing has to be parsed."""
        return self.styles is None or not (self.tools or self.styles.reasoning or self.styles.messages)


class ChoiceParser:
    """Parser of a choice's text into events. `num_thought`: reasoning tokens, counted when a reasoning ends."""

    def __init__(self, plan: ParserPlan, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self._plan, self._tokenizer = plan, tokenizer
        self._parser: OutputParser | None = None
        self._messages: MessageParser | None = None  # instead of `_parser`, for a model that writes messages
        if plan.styles is not None and plan.styles.messages is not None and tokenizer is not None:
            detokenizer = detokenizer_for(
                tokenizer,
                plan.opened,
                skip_special_tokens=params.hides_special_tokens,
                shown=params.shown_special_ids,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            self._messages = MessageParser(
                plan.styles.messages,
                tokenizer,
                detokenizer,
                opened=plan.opened,
                tools=plan.tools,
                parallel=plan.parallel,
            )
        elif plan.styles is not None and not plan.content_only:
            self._parser = OutputParser(
                plan.styles, tools=plan.tools or None, thinking=plan.thinking, parallel=plan.parallel, must=plan.must
            )
        self._hidden = (
            frozenset[int]()
            if tokenizer is None
            else hidden_ids(tokenizer, params.hides_special_tokens, params.shown_special_ids)
        )
        self.num_thought = 0
        # Text and tokens that `_count` has not counted yet, and the number of characters before them.
        self._behind, self._text, self._tokens = 0, list[str](), list[int]()

    def events(self, piece: CompletionOutput) -> list[Event]:
        """Return the events in the next piece of text, which may be "". The last piece must have a finish reason."""
        events = self._events(piece)
        return events if self._plan.thoughts else [event for event in events if not isinstance(event, Thought)]

    def _events(self, piece: CompletionOutput) -> list[Event]:
        if self._messages is not None:
            events = self._messages.feed(piece.token_ids, len(piece.text))
            if piece.finish_reason is not None:
                events = [*events, *self._messages.finish(cut=piece.finish_reason == "length")]
            self.num_thought = self._messages.num_thought
            return events
        if self._parser is None:
            return [Words(piece.text)] if piece.text else []
        events = self._parser.feed(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            events = [*events, *self._parser.finish(cut=piece.finish_reason == "length")]
        self._text.append(piece.text)
        self._tokens += piece.token_ids
        over = piece.finish_reason is not None or any(not isinstance(event, Thought) for event in events)
        if over and self._parser.thoughts:
            self._count(self._parser.thoughts)
        return events

    def finish_reason(self, piece: CompletionOutput) -> str | None:
        """Return OpenAI's finish reason; None while the choice goes on. Call it after `events` of the piece."""
        parser = self._messages or self._parser
        called = parser is not None and parser.num_calls > 0 and not self._plan.named
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason

    def _count(self, thoughts: list[tuple[int, int]]) -> None:
        """Count the tokens with bytes in the ended reasoning, and drop all text and tokens up to its end."""
        text, at, past = "".join(self._text), 0, 0
        for span in thoughts:
            low, high = (len(text[: place - self._behind].encode()) for place in span)
            while at < high and past < len(self._tokens) and self._tokenizer is not None:
                token = self._tokens[past]
                size = 0 if token in self._hidden else len(self._tokenizer.token_bytes(token))
                self.num_thought += bool(size) and at + size > low
                at, past = at + size, past + 1
        thoughts.clear()
        rest = text.encode()[at:].decode("utf-8", "ignore")
        self._behind, self._text = self._behind + len(text) - len(rest), [rest]
        del self._tokens[:past]
