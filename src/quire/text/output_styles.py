"""The formats of a model's tool calls and reasoning, chosen by name or detected in its chat template."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from quire.contracts.errors import ConfigError, InvalidParameter, shown
from quire.text.chat import ChatTemplate
from quire.text.tool_formats import (
    MESSAGE_FORMATS,
    REASONING_FORMATS,
    TOOL_FORMATS,
    MessageFormat,
    ReasoningFormat,
    ToolFormat,
)

TURN = re.compile(r"<\||<｜|\[/?INST\]")  # begins another turn in a prompt
TOOLS, REASONING, NONE = "--tool-call-parser", "--reasoning-parser", "none"
Format = TypeVar("Format", ToolFormat, ReasoningFormat)


class OutputStyles(msgspec.Struct, frozen=True):
    """The formats of a model's output.

    tools, reasoning   formats of tool calls and reasoning; None = the model has none
    why                reason for the choice
    messages           format of messages with headers, which hold reasoning and calls; then `tools` and `reasoning` are
                       None. None = the output is one text
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    why: str
    messages: MessageFormat | None = None

    @property
    def turn_tokens(self) -> tuple[str, ...]:
        """Texts of the tokens that begin, end or head messages, which the text of a message must not bring along."""
        return () if self.messages is None else msgspec.structs.astuple(self.messages.tokens)


def choose_styles(
    template: ChatTemplate | None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    token_id: Callable[[str], int | None] | None = None,
) -> OutputStyles:
    """Return the formats of tool calls and reasoning that the parsers' names mean. None = detect the format in the
    chat template; "none" = no format. Raises `ConfigError` with the known names for an unknown name.
    `token_id`: id of a token in the model's vocabulary, which must have all tokens of messages; None = not known yet"""
    sources = template.sources if template else {}
    text = "\n".join(sources.get(name, "") for name in ("default", "tool_use"))
    if (found := _messages(text, tool_parser, reasoning_parser, token_id)) is not None:
        row, why = found
        return OutputStyles(None, None, f"tool calls and reasoning: {why}", row)
    tools, why = _choose(TOOLS, tool_parser, TOOL_FORMATS, text)
    reasoning, because = _choose(REASONING, reasoning_parser, REASONING_FORMATS, text)
    return OutputStyles(tools, reasoning, f"tool calls: {why}; reasoning: {because}")


def _messages(
    text: str, tool_parser: str | None, reasoning_parser: str | None, token_id: Callable[[str], int | None] | None
) -> tuple[MessageFormat, str] | None:
    """Return a format of messages and the reason, if the names or the template's text mean one. Calls and reasoning are
    in the same messages, so that one name means both. Raises `ConfigError` for names that do not go together."""
    for row in MESSAGE_FORMATS:
        lacking = [token for token in msgspec.structs.astuple(row.tokens) if token_id and token_id(token) is None]
        asked = tool_parser in row.names or reasoning_parser in row.names
        if not asked and (lacking or not all(mark in text for mark in row.marks)):
            continue
        if lacking:
            raise ConfigError(
                f"{TOOLS} or {REASONING} asks for {row.names[0]}, and the model's tokenizer has no token "
                f"{lacking[0]}: leave the parser out, or give another."
            )
        others = [name for name in (tool_parser, reasoning_parser) if name not in (None, *row.names)]
        if not others or others == [NONE] and tool_parser == NONE:
            return row, f"{row.names[0]}, " + ("as asked" if asked else f"for {row.marks[0]!r} in the chat template")
        if asked or others == [NONE]:
            raise ConfigError(
                f"{TOOLS} {tool_parser or '(not given)'} and {REASONING} {reasoning_parser or '(not given)'} do not go "
                f"together: the messages of {row.names[0]} hold calls and reasoning. "
                f"Give {row.names[0]}, or none for both."
            )
    return None


def _choose(flag: str, name: str | None, rows: Sequence[Format], text: str) -> tuple[Format | None, str]:
    for row in rows:
        if name in row.names:
            return row, f"{row.names[0]}, as asked"
        if name is None and row.marks and all(mark in text for mark in row.marks):
            return row, f"{row.names[0]}, for {row.marks[0]!r} in the chat template"
    if name in (None, NONE):
        return None, "none, as asked" if name else "none, no known tag is in the chat template"
    names = [row.names for row in rows] + [row.names for row in MESSAGE_FORMATS]
    known = ", ".join(name for each in names for name in each)
    raise ConfigError(f"{flag} {name!r} is not known, or not implemented yet: give one of {known}, or none.")


def effort_variables(template: ChatTemplate, effort: str | None) -> dict[str, Any]:
    """Return the variable of a chat template that an effort of reasoning means: `reasoning_effort` if the template
    reads that; for "none" else enable_thinking=False if it reads that; {} if it reads neither, or for None."""
    if effort is None:
        return {}
    if "reasoning_effort" in template.source():
        return {"reasoning_effort": effort}
    return {"enable_thinking": False} if effort == "none" and "enable_thinking" in template.source() else {}


def check_variables(styles: OutputStyles, variables: Mapping[str, Any]) -> None:
    """Raise `InvalidParameter` for variables of the chat template that a model with messages cannot have: an effort of
    reasoning that it does not know, or its built-in tools, which Quire does not run."""
    if (row := styles.messages) is None:
        return
    effort = variables.get("reasoning_effort")
    if effort is not None and effort not in row.efforts:
        raise InvalidParameter(
            f"reasoning_effort is {shown(effort)}, which this model does not know: send {', '.join(row.efforts)}.",
            param="reasoning_effort",
        )
    if variables.get("builtin_tools"):
        raise InvalidParameter(
            f"builtin_tools ({', '.join(row.built_in)}) are not run by this server: leave them out, and send functions "
            "of your own as tools.",
            param="chat_template_kwargs",
        )


def thinking_at_end(prompt: str, styles: OutputStyles) -> bool:
    """Return True if a rendered prompt ends within reasoning, as after an open <think>."""
    if styles.reasoning is None or styles.reasoning.start not in prompt:
        return False
    after = prompt.rpartition(styles.reasoning.start)[2]
    return styles.reasoning.end not in after and not TURN.search(after)
