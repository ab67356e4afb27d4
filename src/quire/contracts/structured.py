"""What a caller may ask of the form of an output (`StructuredOutputsParams`)."""

from typing import Any

import msgspec

from quire.contracts.errors import InvalidParameter
from quire.contracts.named import NamedFields

KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_BYTES = 1 << 20  # of a form as JSON


class StructuredOutputsParams(
    msgspec.Struct, metaclass=NamedFields, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The form that an output must have: exactly one of

    json          a JSON schema, as an object or as its JSON text
    regex         a regular expression that the whole text matches
    choice        texts, one of which is the output
    grammar       a grammar in Lark's syntax, or in GBNF's (`root ::= ...`)
    json_object   any JSON object

    disable_any_whitespace   JSON without white space between its parts
    after                    text that ends the model's reasoning: what comes before it is free; None: nothing is
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    after: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            what = "none" if not given else " and ".join(given)
            raise InvalidParameter(f"structured_outputs needs exactly one of {', '.join(KINDS)}, not {what}.",
                                   param="structured_outputs")

    def spec(self) -> str:
        """The form as JSON text, for the core; raises `InvalidParameter` when a field is not of its type, or too long.
        """
        try:
            text = msgspec.json.encode(self)
            msgspec.json.decode(text, type=StructuredOutputsParams)  # compares what was given with the types
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidParameter(f"structured_outputs: {error}.", param="structured_outputs") from None
        if len(text) > MAX_BYTES or not self.after and self.after is not None:
            what = "after is empty: leave it out" if len(text) <= MAX_BYTES else (
                f"{len(text)} bytes as JSON, and at most {MAX_BYTES} are taken: send a smaller one")
            raise InvalidParameter(f"structured_outputs: {what}.", param="structured_outputs")
        return text.decode()
