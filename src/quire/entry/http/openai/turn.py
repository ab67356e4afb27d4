"""One choice of an answer as events, for every route that talks: what the text means, but not how a route shows it.

A `TurnPlan` says, once per request, how the model's text is to be read; a `Turn` reads one choice, in whatever pieces
the engine hands it out: what is streamed, joined, is what comes in one piece.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.contracts.output import CompletionOutput
from quire.contracts.sampling import SamplingParams
from quire.text.detokenizer import hidden_ids
from quire.text.tokenizer import Tokenizer
from quire.text.tools import OutputParser, OutputStyles
from quire.text.turn import Event, Thought, Words


@dataclass(frozen=True, kw_only=True)
class TurnPlan:
    """How the text of a request's choices is to be read.

    styles     in which the model thinks and calls; None: all text is content
    tools      that it may call, as the API has them; (): calls are not looked for
    thinking   the prompt leaves its reasoning open
    parallel   it may call more than once
    must       it is held to a call;  named: of one given function: such an answer ends as any other, with "stop"
    thoughts   the reasoning is to be shown
    """

    styles: OutputStyles | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = False
    parallel: bool = True
    must: bool = False
    named: bool = False
    thoughts: bool = True

    @property
    def plain(self) -> bool:
        """Whether every text is content, so that nothing has to be parsed."""
        return self.styles is None or not (self.tools or self.styles.reasoning)


class Turn:
    """One choice being read. `num_thought`: tokens of its reasoning, but for one that still goes on."""

    def __init__(self, plan: TurnPlan, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self._plan, self._tokenizer = plan, tokenizer
        self._parser = None if plan.styles is None or plan.plain else OutputParser(
            plan.styles, tools=plan.tools or None, thinking=plan.thinking, parallel=plan.parallel, must=plan.must)
        self._hidden = frozenset[int]() if tokenizer is None else hidden_ids(
            tokenizer, params.hides_special_tokens, params.shown_special_ids)
        self.num_thought = 0
        # Text and tokens so far, but for what `_count` has left behind: that many characters.
        self._behind, self._text, self._tokens = 0, list[str](), list[int]()

    def events(self, piece: CompletionOutput) -> list[Event]:
        """What a piece adds: its text may be any part of the whole, "" included; the last one has a finish reason."""
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
        return events if self._plan.thoughts else [event for event in events if not isinstance(event, Thought)]

    def finish_reason(self, piece: CompletionOutput) -> str | None:
        """Why the choice ended, in OpenAI's words, after `events` of the piece; None while it goes on."""
        called = self._parser is not None and self._parser.num_calls > 0 and not self._plan.named
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason

    def _count(self, thoughts: list[tuple[int, int]]) -> None:
        """Reasoning has ended: count the tokens whose bytes are in it, and leave all up to there behind."""
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
