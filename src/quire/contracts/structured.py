"""What a caller may ask of the form of an output (`StructuredOutputsParams`)."""

from typing import Any

import msgspec

from quire.contracts.errors import InvalidParameter
from quire.contracts.sampling import NamedFields

KINDS = ("json", "regex", "choice", "grammar", "json_object")


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
