"""Decoding of request bodies into types, for all routes, and error messages that name the field and its range.

msgspec decodes strictly (no "3" for 3, no NaN, no lone surrogates) but accepts an integer for a number.
A field of another route is refused. A field that no type and no table knows is reported in a warning header.
"""

import difflib
import logging
import re
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

from quire.contracts.errors import InvalidParameter, listed, shown
from quire.contracts.unknown_fields import Refused, read_refused
from quire.entry.http.access.body_shape import MAX_DEPTH, MAX_PARTS, depth, num_parts
from quire.entry.http.anthropic.schema import MessagesRequest
from quire.entry.http.context import ServerContext
from quire.entry.http.errors import HttpError, json_fault, not_implemented
from quire.entry.http.openai import schema, schema_embeddings
from quire.entry.http.openai.responses_schema import ResponseRequest
from quire.entry.http.openai.unknown import Fields, value_again
from quire.entry.http.request_response import Exchange

LOG = logging.getLogger("quire")
T = TypeVar("T", bound=msgspec.Struct)
PATH = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`$")
STEP = re.compile(r"\w+|\[[^]]*\]")
MISSING = re.compile(r"missing required field `(\w+)`")
UNKNOWN = re.compile(r"contains unknown field `(.*?)`", re.S)
NONE_OF = re.compile(r"Invalid enum value '?(.*?)'?", re.S)
GOT = re.compile(r"Expected .*, got (int|float|str|bool|null|array|object)")
TOKEN_ID = re.compile("0|[1-9][0-9]*")
FRACTION = re.compile(r"Expected `int.*`, got `float` - at `\$\.(\w+)`")
MAX_BIAS = 100
MAX_DIGITS = 10  # of a token id
MAX_WHOLE = 2**53  # from here on a float does not determine the integer
STRUCTURED_FIELDS = ("response_format", "structured_outputs")
STRUCTURAL = 'send tools with "strict": true, or structured_outputs with a grammar.'
JSON_KINDS = {
    "int": "an integer",
    "float": "a fraction",
    "str": "a string",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
MAX_LOGGED = 100  # names of unknown fields in the log, so that a client cannot fill it
NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])


HERE = Path(__file__).parent
REFUSED = read_refused(HERE / "refused_fields.txt")
ELSEWHERE = "-"  # reason of a field that other routes read: `_foreign` makes the message
ROUTES: dict[str, frozenset[str]] = {
    path: frozenset(kind.__struct_fields__)
    for path, kind in (
        ("/v1/chat/completions", schema.ChatRequest),
        ("/v1/completions", schema.CompletionRequest),
        ("/v1/responses", ResponseRequest),
        ("/v1/messages", MessagesRequest),
        ("/v1/embeddings", schema_embeddings.EmbeddingRequest),
        ("/v1/rerank", schema_embeddings.RerankRequest),
        ("/v1/score", schema_embeddings.ScoreRequest),
        ("/tokenize", schema.TokenizeRequest),
        ("/detokenize", schema.DetokenizeRequest),
    )
}
ALIKE = [
    line.split()
    for line in (  # groups of fields with the same meaning in different routes
        "max_tokens max_completion_tokens max_output_tokens",
        "stop stop_sequences",
        "instructions system messages input",
        "messages prompt input",
        "response_format structured_outputs text output_config",
        "truncation truncate_prompt_tokens",
        "query queries text_1 data_1",
        "documents items text_2 data_2",
        "reasoning reasoning_effort output_config thinking chat_template_kwargs",
    )
]
# Fields without effect, accepted silently: the user; OpenAI's storage and service tiers; hints; options of images.
IGNORED = frozenset(
    "user safety_identifier session_id metadata store service_tier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options prediction verbosity media_io_kwargs mm_processor_kwargs "
    "cache_control".split()
)


class RequestDecoder(Generic[T]):
    """Decoder of the request bodies of one route."""

    def __init__(self, kind: type[T], *, refused: str = "", unread: frozenset[str] = frozenset()) -> None:
        """Prepare the decoder of a type.

        refused   file with a table of fields that this route refuses, even if its type has them
        unread    fields of other routes without effect here: reported as unknown, not refused
        """
        self._decoder = msgspec.json.Decoder(kind)
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        self._type: inspect.Type = info
        self._fields = Fields(info, {})
        fields = self._fields.known
        self._refused = {
            name: rule for name, rule in (REFUSED | _foreign(fields)).items() if name not in fields | unread
        }
        self._refused |= read_refused(HERE / refused) if refused else {}
        self._known = fields | IGNORED | self._refused.keys()

    async def read(self, context: ServerContext, exchange: Exchange) -> T:
        """Return the decoded body. Unknown fields are reported to the client and logged. Raises as `decode`."""
        size = context.engine.ready.vocab_size if context.engine.ready is not None else None
        request, unknown = self.decode(await exchange.body(), size)
        for name in unknown:
            exchange.warn(f"unknown field {name}")
            if name not in (told := context.unknown_fields) and len(told) < MAX_LOGGED:
                told.add(name)
                LOG.warning("a request has the unknown field %s, which is ignored (logged once).", name)
        return request

    def decode(self, body: bytes, vocab_size: int | None = None) -> tuple[T, list[str]]:
        """Decode a body. Return the request and the first unknown fields, as texts for headers. `vocab_size`: of the
        model, for messages that name every wrong token id.
        Raises `HttpError` 400 for invalid JSON or a feature that is not implemented, `InvalidParameter` for a field of
        the wrong type or out of its range."""
        if num_parts(body) > MAX_PARTS:
            words = f"the body has more than {MAX_PARTS:,} fields, lists and objects: send fewer."
            raise HttpError(400, words, code="invalid_json")
        try:
            names = NAMES.decode(body)
            self._refuse(names)
            request = self._decoded(body, names)
            if depth(body) > MAX_DEPTH:
                raise RecursionError
        except msgspec.ValidationError as error:
            fault = self.explain(str(error))
            if fault.param == "logit_bias" and (wrong := _bad_biases(value_again(names[fault.param]), vocab_size)):
                ids = "token ids" if vocab_size is None else f"token ids from 0 to {vocab_size - 1}"
                words = f"logit_bias at {listed(wrong)}: keys must be {ids}, values numbers in [-100, 100]."
                raise InvalidParameter(words, param=fault.param) from error
            if fault.param in STRUCTURED_FIELDS and _is_structural(value_again(names[fault.param])):
                raise not_implemented(f"{fault.param}: structural_tag", STRUCTURAL, fault.param) from error
            raise fault from error
        except msgspec.DecodeError as error:
            words = f"the body is not valid JSON: {json_fault(error, body)}."
            raise HttpError(400, words, code="invalid_json") from error
        except UnicodeDecodeError as error:
            raise HttpError(400, "the body is not valid UTF-8: send JSON in UTF-8.", code="invalid_json") from error
        except RecursionError as error:
            words = f"the body is nested too deeply: at most {MAX_DEPTH} levels of lists and objects."
            raise HttpError(400, words, code="invalid_json") from error
        return request, self._fields.unknown(names, self._known)

    def _decoded(self, body: bytes, names: dict[str, msgspec.Raw]) -> T:
        """Decode a body into the type. 2.0 is accepted as an integer, since some clients have only floats.
        Only requests that would be refused otherwise pay for this: they are decoded again."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            given = names.get(whole[1]) if (whole := FRACTION.fullmatch(str(error))) is not None else None
            value = msgspec.json.decode(given) if given is not None else None
            if whole is None or not (isinstance(value, float) and value.is_integer() and abs(value) < MAX_WHOLE):
                raise
        names[whole[1]] = msgspec.Raw(b"%d" % int(value))
        return self._decoded(msgspec.json.encode(names), names)

    def _refuse(self, names: dict[str, msgspec.Raw]) -> None:
        for name, given in names.items():
            if (rule := self._refused.get(name)) is None:
                continue
            value = msgspec.json.decode(given)
            if not rule.accepts(value):
                if rule.reason.startswith("send "):  # another field does the same
                    raise HttpError(400, f"{name} is not read: {rule.reason}", code="unsupported_parameter", param=name)
                raise not_implemented(name, rule.reason)

    def explain(self, problem: str) -> InvalidParameter:
        """Convert a message of msgspec, such as "Expected `int` <= 128 - at `$.n`", to an `InvalidParameter`."""
        found, missing = PATH.search(problem), MISSING.search(problem)
        path = found[2] if found is not None else ""
        if missing is not None:
            path = f"{path}.{missing[1]}".lstrip(".")
            return InvalidParameter(f"{path} is missing: it must be {self._words(path)}.", param=_field(path))
        if (unknown := UNKNOWN.search(problem)) is not None:
            options = [one for kind in self._kinds(path) for one in getattr(kind, "types", [kind])]
            known = [field.encode_name for kind in options for field in getattr(kind, "fields", ())]
            near = difflib.get_close_matches(unknown[1], known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"its fields are {', '.join(known)}."
            return InvalidParameter(f"{path} has an unknown field {shown(unknown[1])}: {hint}", param=_field(path))
        reason = _reason(problem[: found.start() if found is not None else None].replace("`", ""))
        if not path:
            return InvalidParameter(f"the body must be a JSON object{reason}.")
        if found is not None and found[1]:
            return InvalidParameter(f"the keys of {path} must be token ids{reason}.", param=path)
        return InvalidParameter(f"{path} must be {self._words(path)}{reason}.", param=_field(path))

    def _words(self, path: str) -> str:
        return " or ".join(dict.fromkeys(map(words, self._kinds(path)))) or "left out"

    def _kinds(self, path: str) -> list[inspect.Type]:
        """Return the types that a path may have."""
        kinds = [self._type]
        for step in STEP.findall(path):
            kinds = [inner for kind in kinds for inner in _inside(kind, step)]
        return kinds


def _foreign(fields: frozenset[str]) -> dict[str, Refused]:
    """Make rules that refuse the fields of all routes, for a route with `fields`; `REFUSED` has precedence."""
    rules: dict[str, Refused] = {}
    for name in frozenset[str]().union(*ROUTES.values()) - IGNORED:
        given = REFUSED.get(name, Refused(ELSEWHERE, []))
        ours = dict.fromkeys(other for group in ALIKE if name in group for other in group if other in fields)
        paths = [path for path, names in ROUTES.items() if name in names]
        words = f"send {' or '.join(ours)} instead." if ours else f"send it to {' or '.join(paths)}."
        rules[name] = given._replace(reason=words) if given.reason == ELSEWHERE else given
    return rules


def _bad_biases(given: Any, size: int | None) -> list[str]:
    """Return the keys of entries that are no token id below `size` with a bias in its range."""
    return (
        [
            key
            for key, bias in given.items()
            if not TOKEN_ID.fullmatch(key)
            or (size is not None and (len(key) > MAX_DIGITS or int(key) >= size))
            or type(bias) is bool
            or (not isinstance(bias, int | float) or abs(bias) > MAX_BIAS)
        ]
        if isinstance(given, dict)
        else []
    )


def _is_structural(value: Any) -> bool:
    return isinstance(value, dict) and (
        value.get("type") == "structural_tag" or value.get("structural_tag") is not None
    )


def _reason(text: str) -> str:
    """Return the rest of the message from msgspec's text: the kind of the given value, or its words; "" for a range."""
    if (got := GOT.fullmatch(text)) is not None:
        return f", not {JSON_KINDS[got[1]]}"
    if (none := NONE_OF.fullmatch(text)) is not None:
        return f", not {shown(none[1])}"
    return "" if text.startswith("Expected") else f": {text[0].lower()}{text[1:]}"


def _field(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _inside(kind: inspect.Type, step: str) -> list[inspect.Type]:
    """Return the types to which one step of a path may lead. A step is a field's name or an index in brackets."""
    if isinstance(kind, inspect.UnionType):
        return [inner for option in kind.types for inner in _inside(option, step)]
    if isinstance(kind, inspect.StructType):
        return [field.type for field in kind.fields if field.encode_name == step]
    if isinstance(kind, inspect.ListType) and step.startswith("["):
        return [kind.item_type]
    if isinstance(kind, inspect.TupleType) and step.startswith("["):
        return [*kind.item_types]
    if isinstance(kind, inspect.DictType) and step.startswith("["):
        return [kind.value_type]
    return []


def words(kind: inspect.Type) -> str:
    """Return a description of the values of a type, such as "an integer in [1, 128]"."""
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
    if isinstance(kind, inspect.TupleType):  # all of its entries are alike
        return f"a list of {len(kind.item_types)} entries" + _each(kind.item_types[0])
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
