"""What one answer of a model consists of, as events in the order in which a client is to see them."""

import msgspec


class Thought(msgspec.Struct, frozen=True):
    """More of the reasoning, without its tags."""

    text: str


class Words(msgspec.Struct, frozen=True):
    """More of the content."""

    text: str


class CallBegins(msgspec.Struct, frozen=True):
    """A tool is called. `index`: number of the call in this answer, from 0;  call_id: drawn by us, or the model's."""

    index: int
    call_id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of call `index`: all pieces joined are JSON text of an object."""

    index: int
    text: str


Event = Thought | Words | CallBegins | CallArguments
