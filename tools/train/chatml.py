"""ChatML rendering: the Jinja template saved with the tokenizer and the same thing in Python.

The training data is rendered by :func:`render`; the tokenizer carries
:data:`CHAT_TEMPLATE`.  ``prepare_corpus.py`` checks that both give the same text.
"""

from __future__ import annotations

import json
from typing import Any

SPECIAL_TOKENS: list[str] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
]

TOOLS_HEAD = "You can call these tools:\n<tools>\n"
TOOLS_TAIL = (
    "</tools>\nTo call a tool, answer with\n"
    '<tool_call>\n{"name": <tool name>, "arguments": <arguments as JSON>}\n</tool_call>'
)

_HEAD_LITERAL = TOOLS_HEAD.replace("\n", "\\n")
_TAIL_LITERAL = TOOLS_TAIL.replace("\n", "\\n")

CHAT_TEMPLATE: str = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}"
    "{{- '" + _HEAD_LITERAL + "' }}"
    "{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}"
    "{{- '" + _TAIL_LITERAL + "<|im_end|>\\n' }}"
    "{%- elif messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'system' and loop.first %}"
    "{%- elif message['role'] == 'assistant' and message['tool_calls'] %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if message['content'] %}{{- message['content'] + '\\n' }}{%- endif %}"
    "{%- for call in message['tool_calls'] %}"
    "{%- if call['function'] %}{%- set call = call['function'] %}{%- endif %}"
    "{%- if not loop.first %}{{- '\\n' }}{%- endif %}"
    "{{- '<tool_call>\\n{\"name\": \"' + call['name'] + '\", \"arguments\": ' }}"
    "{%- if call['arguments'] is string %}{{- call['arguments'] }}"
    "{%- else %}{{- call['arguments'] | tojson }}{%- endif %}"
    "{{- '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}{%- endif %}"
    "{%- endif %}"
)

Segment = tuple[str, bool]
"""A piece of text and whether the model is trained to predict it."""


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """The text of one tool call in an assistant turn."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def tools_system(tools: list[dict[str, Any]], system: str | None = None) -> str:
    """The system turn's content for a conversation with tools."""
    head = system + "\n\n" if system else ""
    listing = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    return head + TOOLS_HEAD + listing + TOOLS_TAIL


def render(turns: list[tuple[str, str]], learn_user: bool = False, think: str | None = None) -> list[Segment]:
    """Render (role, content) turns as ChatML segments.

    Assistant turns are always learned, all others only with ``learn_user``.
    ``think`` puts a reasoning block at the head of the last assistant turn; the
    ``<think>`` token itself is not learned, so that the model reasons only when
    the prompt ends with it.
    """
    out: list[Segment] = []
    for index, (role, content) in enumerate(turns):
        if role == "assistant":
            out.append(("<|im_start|>assistant\n", learn_user))
            if think is not None and index == len(turns) - 1:
                out.append(("<think>\n", False))
                out.append((think + "\n</think>\n\n", True))
            out.append((content + "<|im_end|>", True))
            out.append(("\n", learn_user))
        else:
            out.append((f"<|im_start|>{role}\n{content}<|im_end|>\n", learn_user))
    return out
