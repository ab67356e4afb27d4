"""The formats of reasoning and tool calls, one per model family. All facts about families are in tool_formats.toml.

Knows tags and their order. `tools` parses a text by a format; `tool_grammar` makes a grammar from a format.
"""

from pathlib import Path
from typing import Literal

import msgspec


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A format of reasoning in a model's output.

    names        names for --reasoning-parser; Quire shows the first
    marks        texts that a chat template must have, all of them, for this format to be detected
    start, end   tags around the reasoning
    dropped      tags around the content, which are not content
    """

    names: tuple[str, ...]
    marks: tuple[str, ...]
    start: str
    end: str
    dropped: tuple[str, ...] = ()


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A format of tool calls in a model's output: JSON objects, or a tool's name followed by its arguments.

    names        names for --tool-call-parser; Quire shows the first
    marks        texts that a chat template must have, all of them, for this format to be detected
    starts       tags before the first call
    opens        texts that begin a call after such a tag, or "[" for a list of calls
    bare         True: opens[0] may begin a call without a tag of `starts`
    closes       texts after a call that are not content
    drops        True: all text after a call is dropped
    before, between   text before a tool's name, and texts between the name and its arguments
    syntax       of arguments that are no JSON: "python", as in a Python call; "quoted", an object with bare names, and
                 with `value_ends` as the quotes of strings; "" = JSON, or tags if there is a `key`
    key, key_ends       of arguments in tags: text before a key; texts after a key, of which some mark a string value
    value, value_ends   of arguments in tags: text before a value; texts after it, also that before the next key, since
                 some models forget the closing tag
    end          of arguments in tags: text after all arguments
    printed      texts that models write, for grammars: before the first call, before a name, before the arguments,
                 after the arguments, between calls, after the last call
    """

    names: tuple[str, ...]
    marks: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    opens: tuple[str, ...]
    bare: bool = False
    closes: tuple[str, ...] = ()
    drops: bool = False
    before: str = ""
    between: tuple[str, ...] = ("",)
    syntax: Literal["", "python", "quoted"] = ""
    key: str = ""
    key_ends: tuple[str, ...] = ()
    value: str = ""
    value_ends: tuple[str, ...] = ()
    end: str = ""
    printed: tuple[str, str, str, str, str, str]


class MessageTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The special tokens of messages with headers.

    start, channel, constrain, message   before a role, a channel, the format of a body, and a body
    end, call, stop   after a body: of a message with another behind it, of a call, of the last message
    """

    start: str
    channel: str
    constrain: str
    message: str
    end: str
    call: str
    stop: str


class MessageFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A format in which the whole output is messages with headers. It is read by its tokens, which are special tokens.

    names       names for --tool-call-parser and --reasoning-parser; Quire shows the first
    marks       texts that a chat template must have, all of them, for this format to be detected
    role        role of the model's messages
    thought, comment, answer   channels: of reasoning, of calls (or text before them), of the answer
    namespace   text before a function's name in a recipient
    built_in    tools that the model knows by itself, none of which Quire runs
    efforts     values of `reasoning_effort` that the model knows
    """

    names: tuple[str, ...]
    marks: tuple[str, ...]
    tokens: MessageTokens
    role: str
    thought: str
    comment: str
    answer: str
    namespace: str
    built_in: tuple[str, ...]
    efforts: tuple[str, ...]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: tuple[MessageFormat, ...]
    reasoning: tuple[ReasoningFormat, ...]
    tools: tuple[ToolFormat, ...]


CALL_ID = "[CALL_ID]"  # Mistral's tag of a call's id
CALL_NUMBER = ":"  # before the number of a call in Kimi's ids, functions.NAME:0
_TABLE = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Table)
MESSAGE_FORMATS, REASONING_FORMATS, TOOL_FORMATS = _TABLE.messages, _TABLE.reasoning, _TABLE.tools
PLAIN = TOOL_FORMATS[-1]  # for models without a format of their own
