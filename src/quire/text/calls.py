"""How a chat template wants to be told of an assistant's past turns, above all of their tool calls.

APIs send the arguments of a call as JSON text and no content beside a call. Templates differ: most print a mapping as
JSON and would quote a text a second time, some join text, some look for an empty content and some for a null one, and
many drop the call in silence if it comes another way. Instead of a list of models, a template is tried once with each
form, and the first form in which call, arguments and result reach the prompt is its style; mappings come first, so a
template that would quote text twice never gets it.
"""

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import msgspec

from quire.contracts.errors import InvalidParameter


class CallStyle(msgspec.Struct, frozen=True, kw_only=True):
    """arguments_as_text: JSON text, else a mapping. null_content: None beside a call without text, else ""."""

    arguments_as_text: bool = False
    null_content: bool = False

    def apply(self, message: dict[str, Any]) -> dict[str, Any]:
        """The form in which templates get an assistant's turn: with content, which may be its refusal or "", and with
        tool calls in this style, or no such key. Any other message as it is."""
        if message.get("role") != "assistant":
            return message
        turn = {name: value for name, value in message.items() if name not in ("refusal", "tool_calls")}
        turn["content"] = message.get("content") or message.get("refusal") or ""
        if calls := message.get("tool_calls"):
            turn["tool_calls"] = [self._call(call) for call in calls] if isinstance(calls, list) else calls
            turn["content"] = turn["content"] or (None if self.null_content else "")
        return turn

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            return call
        function = call["function"]
        return {**call, "function": {**function, "arguments": self._arguments(function.get("arguments", {}))}}

    def _arguments(self, arguments: Any) -> Any:
        if not isinstance(arguments, str):
            return json.dumps(arguments, ensure_ascii=False) if self.arguments_as_text else arguments
        if self.arguments_as_text:
            return arguments
        try:
            mapping = json.loads(arguments or "{}")
        except (ValueError, RecursionError):  # what a model wrote need not be JSON: the template gets it as it was
            return arguments
        return mapping if isinstance(mapping, dict) else arguments


PROBE_CALL = {"id": "probe0001", "type": "function",
              "function": {"name": "probe_name", "arguments": '{"probe_key": "v"}'}}
PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "question"}, {"role": "assistant", "tool_calls": [PROBE_CALL]},
    {"role": "tool", "tool_call_id": "probe0001", "name": "probe_name", "content": "probe_result"}]
PROBE_TOOL: dict[str, Any] = {"type": "function", "function": {  # some templates fail without any; no call is to it
    "name": "other", "description": "other",
    "parameters": {"type": "object", "properties": {"other": {"type": "string", "description": "other"}}}}}


def probe_style(render: Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]) -> CallStyle:
    """The style of a template, given its rendering of (messages, tools); the first style when none carries the call."""
    for null_content, as_text in product((False, True), repeat=2):
        style = CallStyle(arguments_as_text=as_text, null_content=null_content)
        try:
            text = render([style.apply(message) for message in PROBE], [PROBE_TOOL])
        except InvalidParameter:
            continue
        if all(word in text for word in ("probe_name", "probe_key", "probe_result")):
            return style
    return CallStyle()
