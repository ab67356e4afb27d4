"""The formats of a model's tool calls and reasoning, chosen by name or detected in its chat template."""

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from quire.contracts.errors import ConfigError
from quire.text.chat import ChatTemplate
from quire.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat

TURN = re.compile(r"<\||<｜|\[/?INST\]")  # begins another turn in a prompt
Format = TypeVar("Format", ToolFormat, ReasoningFormat)


class OutputStyles(msgspec.Struct, frozen=True):
    """The formats of a model's tool calls and reasoning; None = the model has none. `why`: reason for the choice."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    why: str


def choose_styles(
    template: ChatTemplate | None, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> OutputStyles:
    """Return the formats of tool calls and reasoning that the parsers' names mean. None = detect the format in the
    chat template; "none" = no format. Raises `ConfigError` with the known names for an unknown name."""
    sources = template.sources if template else {}
    text = "\n".join(sources.get(name, "") for name in ("default", "tool_use"))
    tools, why = _choose("--tool-call-parser", tool_parser, TOOL_FORMATS, text)
    reasoning, because = _choose("--reasoning-parser", reasoning_parser, REASONING_FORMATS, text)
    return OutputStyles(tools, reasoning, f"tool calls: {why}; reasoning: {because}")


def _choose(flag: str, name: str | None, rows: Sequence[Format], text: str) -> tuple[Format | None, str]:
    for row in rows:
        if name in row.names:
            return row, f"{row.names[0]}, as asked"
        if name is None and row.marks and all(mark in text for mark in row.marks):
            return row, f"{row.names[0]}, for {row.marks[0]!r} in the chat template"
    if name in (None, "none"):
        return None, "none, as asked" if name else "none, no known tag is in the chat template"
    known = ", ".join(name for row in rows for name in row.names)
    raise ConfigError(f"{flag} {name!r} is not known, or not implemented yet: give one of {known}, or none.")


def thinking_at_end(prompt: str, styles: OutputStyles) -> bool:
    """Return True if a rendered prompt ends within reasoning, as after an open <think>."""
    if styles.reasoning is None or styles.reasoning.start not in prompt:
        return False
    after = prompt.rpartition(styles.reasoning.start)[2]
    return styles.reasoning.end not in after and not TURN.search(after)
