"""Messages of the system and of the developer, which a chat template must not drop.

Templates differ: some read instructions anywhere in a conversation, some only in its first message, and of several some
keep the first, some the last; some read the system's alone. What is dropped is dropped silently. So a template is
probed once, for the first conversation with other instructions than one system message in front. If it drops any, all
are joined at the beginning of the conversation. A template that refuses them with words of its own is left to refuse.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.contracts.errors import InvalidParameter

INSTRUCTIONS = ("system", "developer")  # roles
PROBES = (("system", "system", "user"), ("user", "assistant", "system", "user"))  # roles of test conversations


def beyond_first(chat: Sequence[dict[str, Any]]) -> bool:
    """Return True if a message behind the first one has instructions."""
    return any(message["role"] in INSTRUCTIONS for message in chat[1:])


def need_probe(chat: Sequence[dict[str, Any]]) -> bool:
    """Return True if a conversation has instructions that a template may drop: all but one system message in front."""
    return beyond_first(chat) or chat[0]["role"] == "developer"


class Instructions(msgspec.Struct, frozen=True):
    """The messages with instructions that a chat template reads.

    developer   True: the developer's are read; False: they must have the role of the system
    all_kept    True: all of the system's are read; False: of several, or beyond the first message, some are dropped
    """

    developer: bool
    all_kept: bool

    def turns(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation whose instructions the template keeps."""
        if not self.developer:
            chat = [one | {"role": "system"} if one["role"] == "developer" else one for one in chat]
        return chat if self.all_kept or not beyond_first(chat) else joined(chat)


def probe_instructions(render: Callable[[list[dict[str, Any]]], str], source: str) -> Instructions:
    """Find out what a chat template reads, by test renderings. `render`: messages -> prompt. `source`: its text, which
    names the developer if the model knows one; many templates print whatever role they are given."""

    def prints(roles: Sequence[str], refused: bool) -> bool:
        chat = [{"role": role, "content": f"probe_text_{at}"} for at, role in enumerate(roles)]
        try:
            text = render(chat)
        except InvalidParameter:
            return refused
        return all(message["content"] in text for message in chat)

    developer = "developer" in source and prints(("developer", "user"), False)
    return Instructions(developer, all(prints(roles, True) for roles in PROBES))


def joined(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation whose instructions are one message at its beginning, with an empty line between them."""
    found = [message for message in chat if message["role"] in INSTRUCTIONS]
    text = "\n\n".join(message["content"] for message in found if message.get("content"))
    return [found[0] | {"content": text}, *(message for message in chat if message["role"] not in INSTRUCTIONS)]
