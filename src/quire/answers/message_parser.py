"""Parsing of an answer in messages with headers (harmony, the format of gpt-oss), by its tokens.

    [role][ to=RECIPIENT] <|channel|> CHANNEL[ to=RECIPIENT][ <|constrain|> FORMAT] <|message|> BODY <|end|> <|start|>

The prompt has written <|start|> and the role of the first message. Only special tokens are structure: the same
characters in ordinary tokens are text. A body of the channel analysis is reasoning, other bodies are content, and a
recipient makes a call. No sequence of tokens is an error. A token that cannot stand where it is ends the message, or is
skipped, and text that is no header becomes content.

The events do not depend on how the answer is cut. Text is passed on only as far as the sequence's text has come: a stop
string may hold text back, or cut it.
"""

import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import msgspec

from quire.answers.answer_events import CallArguments, CallBegins, Event, Thought, Words
from quire.answers.tool_reader import BLANK, Malformed, Read, Reader
from quire.text.detokenizer import Detokenizer, detokenizer_for
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats import MessageFormat

MOST_HEADER = 512  # characters; with more, or a line break, a header is text
RECIPIENT = re.compile(r"to=\S+")
NOBODY = ("assistant", "user", "all")  # recipients that are no tools
BETWEEN = "\n"  # between the texts of several messages of one kind


class MessageParser:
    """Parser of one answer in messages into events: reasoning, content and calls.

    num_calls     number of tool calls so far
    num_thought   number of tokens of reasoning so far
    in_header     True when the next token belongs to a header: at first, True unless the prompt has begun a body
    """

    def __init__(
        self,
        fmt: MessageFormat,
        tokenizer: Tokenizer,
        detokenizer: Detokenizer,
        *,
        opened: Sequence[int] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        parallel: bool = True,
    ) -> None:
        """Begin an answer.

        detokenizer   makes the text of the answer's tokens, as the sequence's own does
        opened        last tokens of the prompt, from the last <|start|> on
        tools         OpenAI's tool objects: a call to another name is content
        parallel      False: calls after the first are left out
        """
        self._format, self._detokenizer, self._parallel = fmt, detokenizer, parallel
        self._names = {tool["function"]["name"] for tool in tools}
        self._marks = {tokenizer.token_id(token): kind for kind, token in msgspec.structs.asdict(fmt.tokens).items()}
        self._tags = msgspec.structs.asdict(fmt.tokens)
        self.in_header, self._first = True, True
        self._header: dict[str, str] = {}  # texts after "start", "channel" and "constrain"
        self._body: Callable[[str], None] = self._words
        self._begin_state(opened, tokenizer)

    def _begin_state(self, opened: Sequence[int], tokenizer: Tokenizer) -> None:
        """Read the end of the prompt, for the state that it leaves. A body that it has begun is no call."""
        own, self._detokenizer = self._detokenizer, detokenizer_for(tokenizer)
        self._clear()
        names, self._names = self._names, set()
        self.feed(opened, 10**9)
        self._detokenizer, self._names, self._first = own, names, True
        self._header["start"] = self._header.pop("start", "").strip().removeprefix(self._format.role)
        self._clear()

    def _clear(self) -> None:
        self.num_calls = self.num_thought = self._room = 0
        self._queue: deque[tuple[str, str, int]] = deque()  # (mark or "", text, tokens)
        self._out: list[tuple[Callable[[str], Event], str]] = []
        self._said: set[type[Event]] = set()
        self._new = True  # nothing of the current body was emitted yet
        self._reading: Read | None = None  # of the body of a call
        self._whole = False  # the model has ended that body
        self._in = Reader()

    @property
    def begins_message(self) -> bool:
        """True when nothing of the current message was read but its role."""
        return self.in_header and not "".join(self._header.values()) and "channel" not in self._header

    def feed(self, tokens: Sequence[int], num_chars: int) -> list[Event]:
        """Parse the next tokens and return their events. `num_chars`: characters by which the sequence's text grew."""
        run: list[int] = []
        for token in tokens:
            if (kind := self._marks.get(token)) is None:
                run.append(token)
                continue
            self._queue.append(("", self._detokenizer.push(run), len(run)))
            text = self._detokenizer.push((token,))
            tag = self._tags[kind] if text.endswith(self._tags[kind]) else ""  # "": special tokens are not in the text
            self._queue += [("", text[: len(text) - len(tag)], 0), (kind, tag, 1)]
            run = []
        self._queue.append(("", self._detokenizer.push(run), len(run)))
        self._room += num_chars
        return self._release()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """End the answer and return its last events. `cut`: the answer was cut off by a token limit."""
        self._queue.append(("", self._detokenizer.flush(), 0))
        return self._release(over=True, cut=cut)

    def _release(self, *, over: bool = False, cut: bool = False) -> list[Event]:
        while self._queue:
            kind, text, count = self._queue[0]
            if kind and len(text) > self._room:
                break
            shown = text[: self._room]
            self._room -= len(shown)
            if kind:
                self._take_mark(kind)
            else:
                self._take(shown, count)
            if len(shown) < len(text):
                self._queue[0] = ("", text[len(shown) :], 0)
                break
            self._queue.popleft()
        if over:
            for kind, _, count in self._queue:  # tokens whose text a stop string has cut off
                if kind:
                    break
                self.num_thought += count if self._thinks else 0
            if self.in_header:
                self._flush_header(cut=cut)
            else:
                self._close(whole=not cut)
        out, self._out = self._out, []
        joined = ((event, "".join(text for _, text in pairs)) for event, pairs in groupby(out, lambda pair: pair[0]))
        return [event(text) for event, text in joined]

    def _take(self, text: str, count: int) -> None:
        """Read text: of a header, or of a body."""
        if self.in_header and text:
            part = next(reversed(self._header), "start")
            whole = self._header.get(part, "") + text
            room = MOST_HEADER - sum(len(each) for name, each in self._header.items() if name != part)
            end = whole.find("\n")
            end = room if end < 0 or end > room else end
            self._header[part], rest = whole[:end], whole[end:]
            if not rest:
                return
            self._flush_header()
            if self.in_header:
                self._open(Words)
            text = rest
        if not self.in_header:
            self.num_thought += count if self._thinks else 0
            if text:
                self._body(text)

    @property
    def _thinks(self) -> bool:
        return not self.in_header and self._body == self._think

    def _take_mark(self, kind: str) -> None:
        if kind in ("channel", "constrain") and self.in_header:
            self._header.setdefault("start", "")
            earlier = self._header.pop(kind, "")  # of several the last one counts; a recipient stays
            self._header["start"] += " ".join(["", *RECIPIENT.findall(earlier)])
            self._header[kind] = ""
        elif kind == "message" and self.in_header:
            self._begin_body()
        elif kind in ("start", "channel", "end", "call", "stop"):
            if self.in_header:
                self._flush_header()
            else:
                self._close(whole=True)
            self.in_header, self._first, self._header = True, False, {}
            if kind == "channel":  # the model left out the end of a message
                self._header = {"start": "", "channel": ""}

    def _begin_body(self) -> None:
        """Begin the body of a message, as its header says."""
        fmt, header = self._format, self._header
        recipient = next((found[0][3:] for text in header.values() if (found := RECIPIENT.search(text))), "")
        bare = recipient.removeprefix(fmt.namespace)
        name = next((each for each in (bare, recipient) if each in self._names), "")
        if name:
            self._open(CallBegins, name)
        elif recipient and recipient not in NOBODY and bare.split(".")[0] in fmt.built_in:
            self._open(None)
        elif header.get("channel", "").lstrip().startswith(fmt.thought) and (not recipient or recipient in NOBODY):
            self._open(Thought)
        else:
            self._open(Words)

    def _open(self, kind: type[Event] | None, name: str = "") -> None:
        self.in_header, self._header, self._new = False, {}, True
        if kind is CallBegins:
            self._in = Reader()
            self._reading = self._call(name)
            next(self._reading)
            self._body = self._read
        else:
            self._body = self._think if kind is Thought else self._words if kind is Words else self._drop

    def _close(self, *, whole: bool) -> None:
        """End the body. `whole`: the model ended it; an empty call is then a call without arguments."""
        if self._reading is not None:
            self._whole = whole
            self._in.push("", over=True)
            next(self._reading, None)
            self._reading = None
        self._body = self._words

    def _flush_header(self, *, cut: bool = False) -> None:
        """Emit the text of a header without a body, beyond the words of a header, as content."""
        fmt, header = self._format, self._header
        role = rf"(?:{re.escape(fmt.role)})?" if not self._first else ""
        to = r"(?:\s*to=\S+)?"
        channels = "|".join(map(re.escape, (fmt.thought, fmt.comment, fmt.answer)))
        channel = rf"\s*(?:{channels})?{to}(?:\s*json\b)?"
        words = {"start": rf"\s*{role}{to}", "channel": channel, "constrain": r"\s*\w*"}
        rest = "".join(re.sub("^" + words[name], "", text) for name, text in header.items()).strip()
        begun = cut and (not self._first or "channel" in header or rest in ("t", "to"))
        self._header = {}
        if rest and not begun:
            self._open(Words)
            self._words(rest)
            self._body = self._words

    def _emit(self, kind: type[Thought] | type[Words], text: str) -> None:
        if self._new and kind in self._said:
            self._out.append((kind, BETWEEN))
        self._new = False
        self._said.add(kind)
        self._out.append((kind, text))

    def _think(self, text: str) -> None:
        self._emit(Thought, text)

    def _words(self, text: str) -> None:
        self._emit(Words, text)

    def _drop(self, text: str) -> None:
        pass

    def _read(self, text: str) -> None:
        assert self._reading is not None
        self._in.push(text)
        next(self._reading, None)

    def _call(self, name: str) -> Read:
        """Read the arguments of a call: a JSON object. Other text, and text after a fault in it, is content."""
        called = False
        try:
            if not (yield from self._in.span(BLANK)):
                if self._whole:
                    self._begin(name)("{}")
                return
            yield from self._in.need("{")
            if (yield from self._in.span(BLANK)) not in ('"', "}"):
                raise Malformed
            send, called = self._begin(name), True
            send("{")
            yield from self._in.json(send, "{")
            yield from self._in.span(BLANK)
        except Malformed:
            if (held := "".join(self._in.held)) and not (self._in.at_end and (called or not self._whole)):
                self._words(held)
        yield from self._in.until((), self._words)

    def _begin(self, name: str) -> Callable[[str], None]:
        """Begin a call. Return the function that takes its arguments."""
        if self.num_calls and not self._parallel:
            return lambda text: self._in.held.clear()
        begins = CallBegins(self.num_calls, f"call_{secrets.token_hex(12)}", name)
        event = partial(CallArguments, self.num_calls)
        self._out.append((lambda _: begins, ""))
        self.num_calls += 1

        def send(text: str) -> None:
            self._in.held.clear()
            self._out.append((event, text))

        return send
