"""The format in which a chat template expects an assistant's past turns, above all their tool calls.

APIs send the arguments of a call as JSON text, and no content beside a call. Templates differ. Most expect arguments as
a mapping, print it as JSON, and would quote a text twice; some expect text. Some expect an empty content, some null.
Many drop a call silently if its format is wrong. So instead of a list of models, each template is probed once: it
renders a call in each format. The first format in which call, arguments and result reach the prompt is its style.
Mappings are tried first, so a template that would quote text twice never gets text.

Some templates have a form for results that only a field of the calling turn reaches (Gemma 4); it is preferred.

Then the template is probed with arguments that `max_tokens` cut off, with call ids of several lengths, with several
calls in a turn, and with reasoning and content beside a call. Such turns stay in a conversation, so a template that
refuses or drops them gets a format that it accepts.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from itertools import product, takewhile
from typing import Any

import msgspec

from quire.contracts.errors import InvalidParameter

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field, in order of precedence
SHORT_ID = re.compile("[0-9A-Za-z]{9}")  # the only call ids that Mistral's templates accept


class CallStyle(msgspec.Struct, frozen=True, kw_only=True):
    """The format of past tool calls that a chat template accepts.

    arguments_as_text   True: arguments are JSON text; False: a mapping
    null_content        `content` of a turn with calls and no text. True: None; False: ""
    objects_only        arguments that are not a JSON object. True: they become {}; False: they stay text
    short_ids           True: a call id that is not nine letters or digits becomes a hash, in calls and in tool results
    single_calls        True: a turn with several calls becomes a turn for each, with its result behind it
    joined_reasoning    True: in a turn with calls, reasoning goes before the content, as one text
    inner_results       True: results become the field `tool_responses` of the turn that has their calls
    """

    arguments_as_text: bool = False
    null_content: bool = False
    objects_only: bool = False
    short_ids: bool = False
    single_calls: bool = False
    joined_reasoning: bool = False
    inner_results: bool = False

    def turns(self, chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation in this style."""
        found: list[dict[str, Any]] = []
        at = 0
        while at < len(chat):
            message, at = chat[at], at + 1
            calls = message.get("tool_calls")
            if message.get("role") != "assistant" or not isinstance(calls, list) or not all(map(_is_call, calls)):
                found.append(message)
                continue
            results = list(takewhile(lambda one: one.get("role") == "tool", chat[at:]))
            if self.inner_results and results:
                at += len(results)
                names = {call.get("id"): call["function"].get("name") for call in calls}
                found.append({**message, "tool_responses": [_response(one, names) for one in results]})
            elif self.single_calls and calls[1:]:
                at += len(results)
                found += _one_by_one(message, calls, results)
            else:
                found.append(message)
        return [self.apply(message) for message in found]

    def apply(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message of a conversation in this style. An assistant's turn gets `content` (its text, its refusal,
        or "" or None) and its tool calls in this style. In other messages only `tool_call_id` may change."""
        if message.get("role") != "assistant":
            return self._named(message, "tool_call_id")
        turn = {name: value for name, value in message.items() if name not in ("refusal", "tool_calls")}
        turn["content"] = message.get("content") or message.get("refusal") or ""
        if calls := message.get("tool_calls"):
            turn["tool_calls"] = [self._call(call) for call in calls] if isinstance(calls, list) else calls
            reasoning = next((turn[name] for name in REASONING if turn.get(name)), None)
            if self.joined_reasoning and isinstance(reasoning, str) and turn["content"]:
                turn = {name: value for name, value in turn.items() if name not in REASONING}
                turn["content"] = f"{reasoning}\n{turn['content']}"
            turn["content"] = turn["content"] or (None if self.null_content else "")
        return turn

    def _call(self, call: Any) -> Any:
        if not _is_call(call):
            return call
        function = call["function"]
        told = {**function, "arguments": self._arguments(function.get("arguments"))}
        return self._named({"type": "function", **call, "function": told}, "id")

    def _named(self, value: dict[str, Any], key: str) -> dict[str, Any]:
        given = value.get(key)
        if not self.short_ids or not isinstance(given, str) or SHORT_ID.fullmatch(given):
            return value
        return {**value, key: hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]}

    def _arguments(self, arguments: Any) -> Any:
        given = {} if arguments is None else arguments
        if self.arguments_as_text:
            return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if isinstance(given, str):
            try:
                given = json.loads(given or "{}")
            except (ValueError, RecursionError):  # models write invalid JSON, and `max_tokens` cuts it anywhere
                given = None
        return given if isinstance(given, dict) else {} if self.objects_only else arguments


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict)


def _one_by_one(
    turn: dict[str, Any], calls: list[dict[str, Any]], results: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return a turn for each call of `turn`, with the call's results behind it. Calls without ids get one each."""
    found: list[dict[str, Any]] = []
    bare = {name: value for name, value in turn.items() if name not in ("content", *REASONING)}
    for number, call in enumerate(calls):
        own = [one for one in results if one.get("tool_call_id") == call.get("id")] if call.get("id") else results[:1]
        results = [one for one in results if one not in own]
        found += [{**(bare if number else turn), "tool_calls": [call]}, *own]
    return found + results


def _response(result: dict[str, Any], names: dict[Any, Any]) -> dict[str, Any]:
    """Return a result as an entry of `tool_responses`: an object if its text is one. `names`: of functions by call."""
    text = result.get("content")
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        value = text
    name = names.get(result.get("tool_call_id")) or result.get("name")
    return {"name": name, "response": value if isinstance(value, dict) else text}


PROBE_ARGUMENTS, PROBE_ID = '{"probe_key": "v"}', "probe0001"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {  # some templates fail without a tool; never called
        "name": "other",
        "description": "other",
        "parameters": {"type": "object", "properties": {"other": {"type": "string", "description": "other"}}},
    },
}


CUT_ARGUMENTS = '{"probe_key": "v'
SECOND, SECOND_ID = ("second_name", "second_result"), "probe0002"
RESPONSE = "<|tool_response>"  # in the prompt of a template that has a form of its own for results
ODD_IDS = ("p", "call_0123456789abcdef01234567", "functions.probe_name:0")


def probe_style(render: Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]) -> CallStyle:
    """Find the format of past tool calls that a template accepts, by test renderings. `render`: (messages, tools) ->
    prompt. Returns the default `CallStyle` when no style brings the call into the prompt."""

    def carries(style: CallStyle, chat: list[dict[str, Any]], *words: str) -> bool:
        try:
            text = render(style.turns(chat), [PROBE_TOOL])
        except InvalidParameter:
            return False
        return all(word in text for word in ("probe_name", "probe_key", "probe_result", *words))

    for null_content, as_text in product((False, True), repeat=2):
        style = CallStyle(arguments_as_text=as_text, null_content=null_content)
        if carries(style, _probe()):
            inner = msgspec.structs.replace(style, inner_results=True)
            if not carries(style, _probe(), RESPONSE) and carries(inner, _probe(), RESPONSE):
                style = inner
            style = msgspec.structs.replace(
                style,
                objects_only=not carries(style, _probe(arguments=CUT_ARGUMENTS)),
                short_ids=not all(carries(style, _probe(call_id=odd)) for odd in ODD_IDS),
            )
            return _with_rare_turns(style, carries)
    return CallStyle()


def _with_rare_turns(style: CallStyle, carries: Callable[..., bool]) -> CallStyle:
    """Return a style that also brings several calls of a turn, and content beside reasoning, into the prompt."""
    several, single = _probe(second=True), msgspec.structs.replace(style, single_calls=True)
    if not carries(style, several, *SECOND) and carries(single, several, *SECOND):
        style = single
    both = _probe()
    both[1] |= {"content": "probe_content", **dict.fromkeys(REASONING, "probe_thought")}
    joined = msgspec.structs.replace(style, joined_reasoning=True)
    return joined if not carries(style, both) and carries(joined, both, "probe_content") else style


def _probe(arguments: str = PROBE_ARGUMENTS, call_id: str = PROBE_ID, *, second: bool = False) -> list[dict[str, Any]]:
    names = ["probe_name", *[SECOND[0]] * second]
    ids = [call_id, SECOND_ID]
    calls = [
        {"id": own, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, own in zip(names, ids, strict=False)
    ]
    results = [
        {"role": "tool", "tool_call_id": own, "name": name, "content": text}
        for name, own, text in zip(names, ids, ("probe_result", SECOND[1]), strict=False)
    ]
    return [{"role": "user", "content": "question"}, {"role": "assistant", "tool_calls": calls}, *results]
