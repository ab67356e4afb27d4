"""Reading of objects with bare names and quotes of their own, as Gemma 4 writes arguments, into JSON text.

    {city:<|"|>Oslo<|"|>,days:3,units:[<|"|>C<|"|>,true],more:{a:null}}

A string has no escapes, so that it ends at the next quote. JSON's strings are read, too.
"""

import json
from collections.abc import Generator

from quire.answers.tool_reader import BLANK, MAX_DEPTH, Malformed, Read, Reader, Reads, Sink
from quire.answers.tool_values import ANY, typed

WORD_ENDS = (",", "}", "]", "{", "[", ":", '"')


def quoted_object(reader: Reader, quote: str, out: Sink) -> Read:
    """Read an object after its brace; call `out` with pieces of its JSON text. Raises `Malformed`.
    `quote`: text before and after a string."""
    out("{")
    yield from _members(reader, quote, out, 1)


def _members(reader: Reader, quote: str, out: Sink, depth: int) -> Read:
    first = True
    while (yield from reader.span(BLANK)) != "}" or not first:
        name = yield from _name(reader, quote)
        out(("" if first else ", ") + name + ": ")
        yield from _value(reader, quote, out, depth)
        first = False
        if (yield from reader.need(",", "}")) == "}":
            out("}")
            return
    reader.take()
    out("}")


def _items(reader: Reader, quote: str, out: Sink, depth: int) -> Read:
    if (yield from reader.span(BLANK)) == "]":
        reader.take()
        out("]")
        return
    more = ","
    while more == ",":
        yield from _value(reader, quote, out, depth)
        more = yield from reader.need(",", "]")
        out(", " if more == "," else "]")


def _value(reader: Reader, quote: str, out: Sink, depth: int) -> Read:
    char = yield from reader.span(BLANK)
    if depth > MAX_DEPTH:
        raise Malformed
    if char in ("{", "["):
        out(reader.take())
        yield from (_members if char == "{" else _items)(reader, quote, out, depth + 1)
    elif char == '"':
        yield from reader.string(out)
    elif (yield from _quotes(reader, quote)):
        out('"')
        if not (yield from reader.until((quote,), lambda text: out(json.dumps(text, ensure_ascii=False)[1:-1]))):
            raise Malformed
        out('"')
    else:
        word = yield from _word(reader)
        out(typed(word, ANY))


def _name(reader: Reader, quote: str) -> Reads:
    """Read a name and the colon behind it. Return the name as a JSON string."""
    pieces: list[str] = []
    if (yield from reader.span(BLANK)) == '"':
        yield from reader.string(pieces.append)
        yield from reader.need(":")
        return "".join(pieces)
    if (yield from _quotes(reader, quote)):
        yield from reader.until((quote,), pieces.append)
        yield from reader.need(":")
        return json.dumps("".join(pieces), ensure_ascii=False)
    word = yield from _word(reader)
    yield from reader.need(":")
    return json.dumps(word, ensure_ascii=False)


def _quotes(reader: Reader, quote: str) -> Generator[None, None, bool]:
    """Read a quote if one follows. Return True if it does. Raises `Malformed` when the text ends within it."""
    found = yield from reader.peek(len(quote))
    if quote.startswith(found):
        reader.take(len(found))
        if found != quote:
            raise Malformed
    return found == quote


def _word(reader: Reader) -> Reads:
    """Read a word up to a sign of the syntax, which must follow."""
    pieces: list[str] = []
    while (char := (yield from reader.peek(1))) not in WORD_ENDS:
        if not char:
            raise Malformed
        pieces.append(reader.take())
    if not (word := "".join(pieces).strip()):
        raise Malformed
    return word
