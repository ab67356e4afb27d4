"""Places of a conversation whose texts are tokenized by themselves, found again in its prompt.

They are content parts that are chunks of the prompt (CacheBlend), `"kv_chunk": true` beside their text, and the texts
of special tokens that a message must not bring into the prompt: of a model that writes messages they begin and end
turns. A template renders them with marks, which have a random word that no text of a request holds. The marks show
where the places are in the prompt, and are then cut out. Knows messages as JSON values. Knows nothing of token ids.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from quire.contracts.chunks import no_blending
from quire.contracts.errors import InvalidParameter, shown
from quire.text.chat import TEXT_PARTS


class MarkedParts:
    """The marked places of a conversation.

    blends   the engine reuses KV at other positions; else kv_chunk is refused
    plain    texts of special tokens that are tokenized as plain text in all messages but the assistant's
    """

    def __init__(self, blends: bool, plain: Sequence[str] = ()) -> None:
        self._blends, self._word = blends, secrets.token_hex(16)
        self._texts: list[str] = []
        longest_first = sorted(filter(None, plain), key=len, reverse=True)
        self._plain = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def mark(self, messages: Any) -> Any:
        """Return the messages with marks around the texts of marked parts, and within texts of special tokens. Other
        messages stay as they are."""
        self._texts = []
        if not isinstance(messages, list | tuple):
            return messages
        if self._plain is not None:
            messages = [
                {**one, "content": self._cut(one["content"])}
                if isinstance(one, Mapping) and "content" in one and one.get("role") != "assistant"
                else one
                for one in messages
            ]
        return [
            {**one, "content": [*map(self._mark_part, one["content"])]}
            if isinstance(one, Mapping) and isinstance(one.get("content"), list | tuple)
            else one
            for one in messages
        ]

    def pieces(self, rendered: str) -> list[list[str]]:
        """Return a rendered prompt in pieces without marks: every second one is a marked part. A piece is a list of
        texts, each of which is tokenized by itself. Raises `InvalidParameter` if the template has changed a part."""
        split = re.split(f"{self._word}([0-9]+)[|]", rendered)  # text, number, part, number, text, number, part, ...
        pieces, numbers = split[::2], split[1::2]
        texts = {str(number): text for number, text in enumerate(self._texts)}
        same = pieces[1::2] == [texts.get(number) for number in numbers[::2]] and numbers[::2] == numbers[1::2]
        if not same or sorted(numbers[::2]) != sorted(texts):
            raise InvalidParameter(
                "messages: the chat template drops, repeats or changes a part with kv_chunk: leave "
                "the field out of this part.",
                param="messages",
            )
        return [piece.split(f"{self._word}-") for piece in pieces]

    def _cut(self, value: Any) -> Any:
        """Return a content with a mark behind the first character of each text of a special token."""
        if isinstance(value, str):
            assert self._plain is not None
            return self._plain.sub(lambda found: f"{found[0][0]}{self._word}-{found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {name: self._cut(each) if name in TEXT_PARTS.values() else each for name, each in value.items()}
        return [self._cut(each) for each in value] if isinstance(value, list | tuple) else value

    def _mark_part(self, part: Any) -> Any:
        asked = part.get("kv_chunk") if isinstance(part, Mapping) else None
        field = TEXT_PARTS.get(str(part.get("type")), "") if asked else ""
        if not asked or not isinstance(text := part.get(field), str):
            return part
        if asked is not True:
            raise InvalidParameter(f"messages: kv_chunk is {shown(asked)}: it must be true or false.", param="messages")
        if not self._blends:
            raise no_blending("kv_chunk", "messages")
        mark = f"{self._word}{len(self._texts)}|"
        self._texts.append(text)
        return {**part, field: f"{mark}{text}{mark}"}
