"""Request bodies to typed requests: the one validator of every route, and error messages that name field and range.

msgspec decodes strictly (no "3" for 3, no NaN, no bare surrogates) but takes an integer where a number is asked for.
Names that neither a schema nor the tables of fields know are told back in a header.
"""

import json
import logging
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from quire.contracts.errors import InvalidParameter
from quire.contracts.text_table import read_rows
from quire.entry.http.context import ServerContext
from quire.entry.http.errors import HttpError, not_implemented
from quire.entry.http.exchange import Exchange

LOG = logging.getLogger("quire")
T = TypeVar("T", bound=msgspec.Struct)
PATH = re.compile(r" - at (`key` in )?`\$\.?(.*)`$")
STEP = re.compile(r"\w+|\[[^]]*\]")
MISSING = re.compile(r"missing required field `(\w+)`")
GOT = re.compile(r"Expected .*, got (int|float|str|bool|null|array|object)")
JSON_KINDS = {"int": "an integer", "float": "a fraction", "str": "a string", "bool": "true or false", "null": "null",
              "array": "a list", "object": "an object"}
MAX_NAME = 64
MAX_UNKNOWN, MAX_LOGGED = 10, 100  # names that are told back, and logged: more would let a client fill the log
NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Refused(NamedTuple):
    """Why a field of other servers' requests that would change the answer is refused, and the values (beside null) that
    ask for nothing and are let through."""

    reason: str
    harmless: list[Any]


def _refused(table: str) -> Iterator[tuple[str, Refused]]:
    for names, reason, *harmless in read_rows(Path(__file__).with_name(table)):
        for name in names.split():
            yield name, Refused(reason, json.loads(harmless[0]) if harmless else [])


REFUSED = dict(_refused("refused_fields.txt"))
# Do not change the answer here, and are taken silently: who asks, what OpenAI keeps and where it runs; hints (what the
# answer will mostly be, how long it should be); how pictures would be read; backends, of which there is one.
IGNORED = frozenset(
    "user safety_identifier session_id metadata store service_tier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options prediction verbosity media_io_kwargs mm_processor_kwargs guided_decoding_backend "
    "parallel_tool_calls include_reasoning cache_control".split())


class RequestDecoder(Generic[T]):
    """Decodes the bodies of one route."""

    def __init__(self, kind: type[T], *, not_here: frozenset[str] = frozenset(), refused: str = "") -> None:
        """`not_here`: names of IGNORED and REFUSED fields that mean nothing to this route, hence unknown.
        `refused`: a table of fields that this route refuses, though its type or others may know them."""
        self._decoder = msgspec.json.Decoder(kind)
        self._type = inspect.type_info(kind)
        self._fields = frozenset(kind.__struct_encode_fields__)
        self._refused = {name: rule for name, rule in REFUSED.items() if name not in not_here | self._fields}
        self._refused |= dict(_refused(refused)) if refused else {}
        self._known = self._fields | (IGNORED - not_here) | self._refused.keys()

    async def read(self, context: ServerContext, exchange: Exchange) -> T:
        """The request in an exchange's body; fields that nobody knows are told back and logged. Errors: `decode`'s."""
        request, unknown = self.decode(await exchange.body())
        for name in unknown:
            exchange.warn(f"unknown field {name}")
            if name not in (told := context.unknown_fields) and len(told) < MAX_LOGGED:
                told.add(name)
                LOG.warning("a request has the unknown field %s; it is ignored (told once).", name)
        return request

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """The request, and the first names of fields that nobody knows, fit for a header.

        Errors: `HttpError` 400 for what is no JSON or asks for something that is not implemented, `InvalidParameter`
        for a field of the wrong type or out of its range.
        """
        try:
            names = NAMES.decode(body)
            self._refuse(names)
            request = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise self._explain(str(error)) from error
        except msgspec.DecodeError as error:
            raise HttpError(400, f"the body is not valid JSON: {error}.", code="invalid_json") from error
        except UnicodeDecodeError as error:
            raise HttpError(400, "the body is not valid UTF-8.", code="invalid_json") from error
        except RecursionError as error:
            raise HttpError(400, "the body is nested too deeply.", code="invalid_json") from error
        unknown = (ascii(name[:MAX_NAME]) for name in names if name not in self._known)
        return request, list(islice(unknown, MAX_UNKNOWN))

    def _refuse(self, names: dict[str, msgspec.Raw]) -> None:
        for name, rule in self._refused.items():
            if name not in names:
                continue
            value = msgspec.json.decode(names[name])
            if value is not None and not any(type(value) is type(h) and value == h for h in rule.harmless):
                if rule.reason.startswith("send "):  # there is another way
                    raise HttpError(400, f"{name} is not read: {rule.reason}", code="unsupported_parameter", param=name)
                raise not_implemented(name, rule.reason)

    def _explain(self, problem: str) -> InvalidParameter:
        """An error in our words from one of msgspec's: "Expected `int` <= 128 - at `$.n`"."""
        found, missing = PATH.search(problem), MISSING.search(problem)
        path = found[2] if found is not None else ""
        if missing is not None:
            path = f"{path}.{missing[1]}".lstrip(".")
            return InvalidParameter(f"{path} is missing: it must be {self._words(path)}.", param=_field(path))
        reason = _reason(problem[: found.start() if found is not None else None].replace("`", ""))
        if not path:
            return InvalidParameter(f"the body must be a JSON object{reason}.")
        if found is not None and found[1]:
            return InvalidParameter(f"the keys of {path} must be token ids{reason}.", param=path)
        return InvalidParameter(f"{path} must be {self._words(path)}{reason}.", param=_field(path))

    def _words(self, path: str) -> str:
        kinds = [self._type]
        for step in STEP.findall(path):
            kinds = [inner for kind in kinds for inner in _inside(kind, step)]
        return " or ".join(dict.fromkeys(map(words, kinds))) or "left out"


def _reason(text: str) -> str:
    """What msgspec says beyond what must be: the kind of value that came, or its own words; "" for a bound."""
    if (got := GOT.fullmatch(text)) is not None:
        return f", not {JSON_KINDS[got[1]]}"
    return "" if text.startswith("Expected") else f": {text[0].lower()}{text[1:]}"


def _field(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _inside(kind: inspect.Type, step: str) -> list[inspect.Type]:
    """The types that one step of a path may lead to: a field's name, or an index in brackets."""
    if isinstance(kind, inspect.UnionType):
        return [inner for option in kind.types for inner in _inside(option, step)]
    if isinstance(kind, inspect.StructType):
        return [field.type for field in kind.fields if field.encode_name == step]
    if isinstance(kind, inspect.ListType) and step.startswith("["):
        return [kind.item_type]
    if isinstance(kind, inspect.DictType) and step.startswith("["):
        return [kind.value_type]
    return []


def words(kind: inspect.Type) -> str:
    """What values a type takes: "an integer in [1, 128]"."""
    if isinstance(kind, inspect.UnionType):
        return " or ".join(dict.fromkeys(words(t) for t in kind.types if not isinstance(t, inspect.NoneType)))
    if isinstance(kind, inspect.IntType):
        return "an integer" + _range(kind)
    if isinstance(kind, inspect.FloatType):
        return "a number" + _range(kind)
    if isinstance(kind, inspect.StrType):
        return "a string" + (_length(kind, "characters") if kind.pattern is None else f" that matches {kind.pattern}")
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.ListType):
        return "a list" + _length(kind, "entries") + _each(kind.item_type)
    if isinstance(kind, inspect.DictType):
        return "an object" + _length(kind, "entries") + _each(kind.value_type)
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(map(str, kind.values))
    return "null" if isinstance(kind, inspect.NoneType) else "an object"


def _each(kind: inspect.Type) -> str:
    return "" if isinstance(kind, inspect.AnyType) else f" (each {words(kind)})"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    low, high = kind.ge, kind.le
    if low is not None and high is not None:
        return f" in [{low:g}, {high:g}]" if isinstance(low, float) else f" in [{low}, {high}]"
    if kind.gt is not None:
        return f" above {kind.gt:g}"
    return "" if low is None else f" >= {low}"


def _length(kind: inspect.StrType | inspect.ListType | inspect.DictType, unit: str) -> str:
    low, high = kind.min_length, kind.max_length
    if low is not None and high is not None:
        return f" of {low} to {high} {unit}"
    if high is not None:
        return f" of at most {high} {unit}"
    return "" if low is None else f" of at least {low} {unit}"
