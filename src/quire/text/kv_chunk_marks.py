"""Content parts of a conversation that are chunks of its prompt (CacheBlend): `"kv_chunk": true` beside their text.

A template renders such a part between two marks with a random word, which no text of a request holds. The marks show
where the part stands in the prompt, and are then cut out. Knows messages as JSON values. Knows nothing of tokens.
"""

import re
import secrets
from collections.abc import Mapping
from typing import Any

from quire.contracts.chunks import no_blending
from quire.contracts.errors import InvalidParameter, shown
from quire.text.chat import TEXT_PARTS


class MarkedParts:
    """The marked parts of a conversation. `blends`: the engine reuses KV at other positions, else marks are refused."""

    def __init__(self, blends: bool) -> None:
        self._blends, self._word = blends, secrets.token_hex(16)
        self._texts: list[str] = []

    def mark(self, messages: Any) -> Any:
        """Return the messages with marks around the texts of marked parts. Other messages stay as they are."""
        self._texts = []
        if not isinstance(messages, list | tuple):
            return messages
        return [
            {**one, "content": [*map(self._mark_part, one["content"])]}
            if isinstance(one, Mapping) and isinstance(one.get("content"), list | tuple)
            else one
            for one in messages
        ]

    def pieces(self, rendered: str) -> list[str]:
        """Return a rendered prompt in pieces without marks: every second one is a marked part. Raises
        `InvalidParameter` if the template has changed a part."""
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
        return pieces

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
