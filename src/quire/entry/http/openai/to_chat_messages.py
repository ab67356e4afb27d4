"""Chat messages made from a conversation of another API (Responses, Messages). Each API reads its own items and writes
them here, so that the same turn becomes the same message in all of them."""

from typing import Any

from quire.entry.http.openai.schema import ContentPart, FunctionCall, Message, ToolCall


class Talk:
    """Builder of a conversation. Successive reasoning, text and calls of the assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.called: dict[str, str] = {}  # the id of a call -> the name of its function

    def say(self, content: str | list[ContentPart], role: str, *others: str, joined: bool = True) -> None:
        """Add content: to the last message if `joined` and its role is `role` or in `others`, else in a new message."""
        parts = [ContentPart(type="text", text=content)] if isinstance(content, str) else content
        turn = self._turn(role, *others) if joined else self._new(role)
        turn.content = [*(turn.content or ()), *parts]

    def think(self, text: str) -> None:
        """Add reasoning, unless the text is empty."""
        if text:
            turn = self._turn("assistant")
            turn.reasoning_content = "\n".join(filter(None, [turn.reasoning_content, text]))

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any] | None) -> None:
        """Add a tool call."""
        turn, self.called[call_id] = self._turn("assistant"), name
        function = FunctionCall(name=name, arguments=arguments)
        turn.tool_calls = [*(turn.tool_calls or ()), ToolCall(id=call_id, type="function", function=function)]

    def answer(self, call_id: str, content: str | list[ContentPart]) -> None:
        """Add the result of a tool call."""
        self.messages.append(Message(role="tool", tool_call_id=call_id, content=content))

    def _turn(self, role: str, *others: str) -> Message:
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last.role in (role, *others) else self._new(role)

    def _new(self, role: str) -> Message:
        self.messages.append(Message(role=role, content=[]))
        return self.messages[-1]
