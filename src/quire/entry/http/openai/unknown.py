"""Unknown fields of a request, at its top and inside its fields. msgspec drops them silently; here they are found."""

import difflib
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import msgspec
from msgspec import inspect

MAX_NAME = 64
MAX_UNKNOWN = 10  # names reported per request, so that a client cannot fill the log
MAX_LOOKED = 1000  # objects checked per request: they are mostly alike, and this runs on the event loop
MOST_BYTES = 1 << 20  # larger fields are not checked: decoding them again takes some 25 ms per megabyte
HINTS = {"guided_decoding_backend": " (llguidance makes every mask)"}  # a field that only vLLM reads
NOTHING: tuple[object, ...] = (None, False, "", [], {})  # values without effect
# Names inside fields that do not change the answer: labels, and parts of answers that clients send back.
LABELS = frozenset(
    "annotations cache_control caller citations data encrypted_content id include_obfuscation logprobs "
    "parsed parsed_arguments phase refusal signature status".split()
)


class Fields:
    """The known field names of a type, and of the types inside its fields."""

    def __init__(self, kind: inspect.StructType, seen: dict[type, "Fields"]) -> None:
        seen[kind.cls] = self  # before its fields are looked into: an object may hold others of its kind
        self.known = frozenset(field.encode_name for field in kind.fields)
        self.closed = kind.forbid_unknown_fields  # msgspec refuses unknown fields itself
        self.inner: dict[str, Fields] = {}
        for field in kind.fields:
            if (fields := _inside(field.type, seen)) is not None:
                self.inner[field.encode_name] = fields

    def near(self, name: str) -> str:
        """Return " (did you mean NAME?)" for an unknown name, or its own hint; "" if no known name is close."""
        close = difflib.get_close_matches(name[:MAX_NAME], self.known, n=1, cutoff=0.8)
        return HINTS.get(name) or "".join(f" (did you mean {known}?)" for known in close)

    def unknown(self, names: dict[str, msgspec.Raw], known: Collection[str]) -> list[str]:
        """Return the first unknown field names of a request, each with a hint.
        `names`: the request's fields; `known`: names known at its top level. Deeper names are checked by type."""
        top = ((self, "", name) for name in names if name not in known)
        objects = chain.from_iterable(
            fields._objects(value_again(names[name]), name + ".")
            for name, fields in self.inner.items()
            if name in names
        )
        inside = (
            (fields, path, name)
            for fields, path, value in islice(objects, MAX_LOOKED)
            for name in value
            if name not in fields.known and name not in LABELS and value[name] not in NOTHING
        )
        found: dict[tuple[str, str], Fields] = {}  # (path, name): a name in many list entries is reported once
        for fields, path, name in chain(top, inside):
            found.setdefault((path, name), fields)
            if len(found) == MAX_UNKNOWN:
                break
        return [ascii(path + name[:MAX_NAME]) + fields.near(name) for (path, name), fields in found.items()]

    def _objects(self, value: Any, path: str) -> "Iterator[tuple[Fields, str, dict[str, Any]]]":
        if isinstance(value, list):
            for one in value[:MAX_LOOKED]:
                yield from self._objects(one, path[:-1] + "[].")
        elif isinstance(value, dict):
            yield self, path, value
            for name, fields in self.inner.items():
                if name in value:
                    yield from fields._objects(value[name], f"{path}{name}.")


def value_again(raw: msgspec.Raw) -> Any:
    """Decode a field again, without its type. Return None if it is large or not valid JSON."""
    if len(memoryview(raw)) > MOST_BYTES:
        return None
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(raw)
    return None


def _inside(kind: inspect.Type, seen: dict[type, Fields]) -> Fields | None:
    """Return the `Fields` of the objects that a field holds; None if they cannot have unknown fields."""
    if isinstance(kind, inspect.UnionType):
        return next((fields for one in kind.types if (fields := _inside(one, seen)) is not None), None)
    if isinstance(kind, inspect.ListType):
        return _inside(kind.item_type, seen)
    if not isinstance(kind, inspect.StructType):
        return None
    fields = seen.get(kind.cls) or Fields(kind, seen)
    return None if fields.closed and not fields.inner else fields
