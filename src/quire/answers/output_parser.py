"""Parsing of a model's answer as it comes: reasoning, content, tool calls.

The events do not depend on how the text is cut. A call begins when its name is a tool's and its arguments have begun
(in Python's format: are complete). From then on its arguments are passed on as they come. If the text turns out
malformed before that, it is content, as it was written, unless the answer had to be a call, or was cut after the tag
of one. If it turns out malformed later, the call stays, its arguments end at the fault, and the rest is content. We
never complete arguments, so that half a command is not executed.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from quire.answers.answer_events import CallArguments, CallBegins, Event, Thought, Words
from quire.answers.quoted_values import quoted_object
from quire.answers.tool_reader import BLANK, MAX_DEPTH, Malformed, Read, Reader, Reads, Sink
from quire.answers.tool_values import ANY, STRING, UNREADABLE, kinds_of, python_arguments, typed
from quire.text.output_styles import OutputStyles
from quire.text.tool_formats import CALL_ID, CALL_NUMBER, PLAIN, ToolFormat

NO_QUOTE, PYTHON_ESCAPES = re.compile(r"[^()\[\]{}'\"]*"), "\n\\'\"abfnrtvxuUN01234567"
QUOTED = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
LONGEST_ID = 64
# Members of a call that are texts, and what they are. Ids of Cohere's models begin at 0 in each answer: not used.
TEXTS = {"name": "name", "tool_name": "name", "id": "id", "type": "type", "tool_call_id": "number"}


class OutputParser:
    """Parser of one answer's text into events: reasoning, content and calls.

    num_calls   number of tool calls so far
    thoughts    reasoning in the text: (index of the first character, index after the last) of each piece
    """

    def __init__(
        self,
        styles: OutputStyles,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        parallel: bool = True,
        must: bool = False,
    ) -> None:
        """Begin an answer.

        tools      OpenAI's tool objects; without tools, the text of a call is content. A model without a format is
                   parsed by `PLAIN`, which `tool_grammar` forces on it
        thinking   the prompt ended within reasoning;  parallel  False: calls after the first are left out
        must       a grammar forces calls: no text is content
        """
        self.num_calls = 0
        self.thoughts: list[tuple[int, int]] = []
        self._tools = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools or ()}
        self._format, self._reasoning = styles.tools or PLAIN, styles.reasoning
        self._thinking = self._lead = thinking and styles.reasoning is not None  # lead: drop white space here
        self._said = self._muted = self._calling = False  # had content; drop further text; a call's arguments began
        self._parallel, self._must, self._cut = parallel, must, False
        self._ids: set[str] = set()  # of the model's own
        self._event: Callable[[str], Event] | None = None  # makes events of the call's arguments; None: drop them
        self._blank: list[str] = []  # white space that is kept only if more text follows
        self._out: list[tuple[Callable[[str], Event], str]] = []
        self._in = Reader()
        self._reading = self._read()
        next(self._reading)

    def finish(self, *, cut: bool = False) -> list[Event]:
        """End the answer and return its last events. `cut`: the answer was cut off by a token limit."""
        self._cut = cut
        return self.feed("", over=True)

    def feed(self, text: str, *, over: bool = False) -> list[Event]:
        """Parse the next text of the answer and return its events. `over`: no more text follows."""
        self._in.push(text, over=over)
        next(self._reading, None)
        out, self._out = self._out, []
        joined = ((event, "".join(text for _, text in pairs)) for event, pairs in groupby(out, lambda pair: pair[0]))
        return [event(text) for event, text in joined if text]

    def _say(self, text: str) -> None:
        """Emit content or reasoning without the white space around it. Content without calls keeps its white space."""
        self._in.held.clear()
        text = text.lstrip() if self._lead else text
        if text and not self._muted and (self._thinking or not self._must):
            body, self._lead = text.rstrip(), False
            if body and self._thinking:
                end = self._in.read - len(text) + len(body)
                begin = end - len(body) - sum(map(len, self._blank))
                goes_on = self.thoughts and self.thoughts[-1][1] == begin
                self.thoughts.append((self.thoughts.pop()[0] if goes_on else begin, end))
            if body:
                self._out += [(Thought if self._thinking else Words, piece) for piece in (*self._blank, body)]
                self._said, self._blank = self._said or not self._thinking, []
            self._blank.append(text[len(body) :])

    def _think(self, thinking: bool) -> None:
        self._thinking, self._lead, self._blank = thinking, True, []
        self._in.held.clear()

    def _begin(self, name: str, call_id: str = "") -> None:
        if self._thinking:  # a call ends the reasoning
            self._think(False)
        self._calling, self._event = True, None
        if self._parallel or not self.num_calls:
            # Mistral's templates accept only ids of nine characters.
            drawn = secrets.token_hex(5)[1:] if CALL_ID in self._format.between else f"call_{secrets.token_hex(12)}"
            usable = call_id.isascii() and len(call_id) <= LONGEST_ID and call_id not in self._ids
            own = call_id if usable else ""  # the model's own
            self._ids.add(own)
            begins = CallBegins(self.num_calls, own or drawn, name)
            self._out.append((lambda _: begins, name))
            self._event = partial(CallArguments, self.num_calls)
            self.num_calls += 1
        self._in.held.clear()

    def _send(self, text: str) -> None:
        self._in.held.clear()
        self._out += [(self._event, text)] if self._event else []

    def _read(self) -> Read:
        while tag := (yield from self._in.until(self._tags(), self._say)):
            if self._reasoning and tag in (self._reasoning.start, self._reasoning.end):
                if self._said and not self._thinking:
                    self._say(tag)
                else:
                    self._think(not self._thinking)
                continue
            if self._reasoning and tag in self._reasoning.dropped:
                self._in.held.clear()
                continue
            try:
                yield from self._calls(self._format, tag)
            except Malformed:
                # The text ended within a call, or after a tag that begins one: this is not content.
                if self._in.at_end and (self._calling or (self._cut and len(tag) > 1)):
                    self._in.held.clear()
            self._calling = False
            self._say("".join(self._in.held))
        if not self._thinking and not self.num_calls:
            self._out += [(Words, piece) for piece in self._blank]

    def _tags(self) -> tuple[str, ...]:
        """Return the tags that may end the current text. Reasoning comes only before content; no "{" or "[" ends it."""
        fmt, reasoning = self._format, self._reasoning
        tags = fmt.starts + fmt.opens[: fmt.bare] if self._tools else ()
        if reasoning and self._thinking:
            return (reasoning.end, *(tag for tag in tags if len(tag) > 1))
        tags += reasoning.dropped if reasoning else ()
        return (reasoning.start, *tags) if reasoning and not self._said else tags

    def _calls(self, fmt: ToolFormat, tag: str) -> Read:
        """Read the calls after `tag`, which is one of `starts` or `opens`. Raises `Malformed`."""
        opened = (yield from self._in.need(*fmt.opens)) if tag in fmt.starts else tag
        again = ","
        while again:
            if fmt.syntax == "python":
                yield from self._python_call()
            elif fmt.syntax == "quoted":
                yield from self._quoted_call(fmt)
            elif fmt.key:
                yield from self._tagged_call(fmt)
            elif opened in ("{", "["):
                yield from self._object_call("{" if opened == "[" else "")
            else:
                yield from self._named_call(fmt)
            self._calling = False
            self._in.held.clear()
            again = (yield from self._in.need(",", "")) if opened == "[" else ""
        while (yield from self._in.need(*fmt.closes, "")):
            self._in.held.clear()
        self._muted = fmt.drops

    def _object_call(self, brace: str, within: dict[str, str] | None = None) -> Read:
        """Read {"name": ..., "arguments": {...}} with its members in any order, beginning with `brace`.
        `within`: members of the outer object, if this is the object "function" inside another."""
        yield from self._in.need(brace)
        texts, early, more = within or {"name": "", "id": ""}, "", ","
        while more == ",":
            key = yield from self._text()
            yield from self._in.need(":")
            if self._calling:
                yield from self._in.json(len)
            elif key in TEXTS:
                texts[TEXTS[key]] = yield from self._text()
            elif key == "function" and within is None:
                yield from self._object_call("{", texts)
            elif key in ("arguments", "parameters") and not early:
                early = yield from self._arguments(texts["name"], texts["id"])
            else:
                raise Malformed
            if early and texts["name"] in self._tools and not self._calling:
                self._begin(texts["name"], texts["id"])
                self._send(early)
            more = yield from self._in.need(",", "}")
        if not self._calling:
            raise Malformed

    def _named_call(self, fmt: ToolFormat) -> Read:
        """Read a name and an object of arguments."""
        yield from self._in.need(fmt.before)
        name = yield from self._in.need(*self._tools)
        call_id: list[str] = []
        tag = yield from self._in.need(*fmt.between)
        if tag in (CALL_ID, CALL_NUMBER):
            call_id += [f"{fmt.before}{name}:"] if tag == CALL_NUMBER else []
            yield from self._in.until(fmt.between[:1], call_id.append)
        yield from self._arguments(name, "".join(call_id))

    def _arguments(self, name: str, call_id: str) -> Reads:
        """Read an object of arguments. It is passed on or, if the name is not known yet, returned."""
        yield from self._in.need("{")
        if (name and name not in self._tools) or (yield from self._in.span(BLANK)) not in ('"', "}"):
            raise Malformed
        early: list[str] = []
        out: Sink = self._send if name else early.append
        if name:
            self._begin(name, call_id)
        out("{")
        yield from self._in.json(out, "{")
        return "".join(early)

    def _text(self) -> Reads:
        """Read a JSON string and return its value."""
        pieces: list[str] = []
        yield from self._in.string(pieces.append)
        return str(json.loads("".join(pieces)))

    def _tagged_call(self, fmt: ToolFormat) -> Read:
        """Read a name and arguments in tags. A tag or the schema gives the type; a string is passed on as it comes."""
        name = yield from self._in.need(*self._tools)
        schema = self._tools[name]
        types = schema.get("properties") if isinstance(schema, dict) else None
        closed = (yield from self._in.need(*fmt.between)) == '"/>'
        tag = fmt.end if closed else (yield from self._in.need(fmt.key, fmt.end))
        self._begin(name)
        before = "{"
        while tag != fmt.end:
            key: list[str] = []
            value: list[str] = []
            key_end = yield from self._in.until(fmt.key_ends, key.append)
            if fmt.value:
                yield from self._in.need(fmt.value)
            kinds = (
                STRING
                if "true" in key_end
                else ANY
                if "false" in key_end
                else kinds_of(types.get("".join(key)) if isinstance(types, dict) else None)
            )
            self._send(f"{before}{json.dumps(''.join(key), ensure_ascii=False)}: " + '"' * (kinds == STRING))
            end = yield from self._in.until(fmt.value_ends, self._send_quoted if kinds == STRING else value.append)
            self._send("".join(value) if not end else '"' if kinds == STRING else typed("".join(value), kinds))
            tag = fmt.key if end.endswith(fmt.key) else (yield from self._in.need(fmt.key, fmt.end))
            before = ", "
        self._send("{}" if before == "{" else "}")

    def _send_quoted(self, text: str) -> None:
        self._send(json.dumps(text, ensure_ascii=False)[1:-1])

    def _quoted_call(self, fmt: ToolFormat) -> Read:
        """Read a name and an object with bare names, which becomes JSON."""
        name = yield from self._in.need(*self._tools)
        yield from self._in.need(*fmt.between)
        self._begin(name)
        yield from quoted_object(self._in, fmt.value_ends[0], self._send)

    def _python_call(self) -> Read:
        """Read f(a=1). It is passed on when it is complete, since only then it is known to be a call."""
        name = yield from self._in.need(*self._tools)
        yield from self._in.need("(")
        call, depth = ["f("], 1
        while 0 < depth <= MAX_DEPTH and (char := (yield from self._in.span(NO_QUOTE, call.append))):
            call.append(self._in.take())
            if char in QUOTED:
                while (yield from self._in.span(QUOTED[char], call.append)) == "\\":  # a wrong backslash stays
                    escape = yield from self._in.peek(2)
                    call.append(self._in.take(2) if escape[1:] in PYTHON_ESCAPES else "\\" + self._in.take())
                call.append(self._in.take())
            else:
                depth += 1 if char in "([{" else -1
        try:
            arguments = python_arguments("".join(call))
        except UNREADABLE:
            raise Malformed from None
        self._begin(name)
        self._send(arguments)
