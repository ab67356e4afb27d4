"""Events of a model's answer, in the order in which a client sees them."""

import msgspec


class Thought(msgspec.Struct, frozen=True):
    """Next piece of the reasoning text, without its tags."""

    text: str


class Words(msgspec.Struct, frozen=True):
    """Next piece of the content: text that is neither reasoning nor a tool call."""

    text: str


class CallBegins(msgspec.Struct, frozen=True):
    """Beginning of a tool call.

    index     number of the call in this answer, from 0
    call_id   id that the model gave the call, or a random one
    """

    index: int
    call_id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """Next piece of the arguments of tool call `index`. The joined pieces are the JSON text of an object."""

    index: int
    text: str


Event = Thought | Words | CallBegins | CallArguments
