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
    """The form that an output must have, if it has one: one of

    json          a JSON schema, as an object or as its JSON text
    regex         a regular expression that the whole text matches
    choice        texts, one of which is the output
    grammar       a grammar in Lark's syntax, or in GBNF's (`root ::= ...`)
    json_object   any JSON object

    disable_any_whitespace   JSON without white space between its parts
    after                    text that ends the reasoning which the prompt has begun (a token that ends it belongs to it
                             whole): before it nothing is held to the form, and only a stop string ends; None: none is
    budget                   tokens of reasoning after which `after` is forced; None: it may take as long as it takes
    inside                   the form has a place for the reasoning, and holds from the first token on
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    after: str | None = None
    budget: int | None = None
    inside: bool = False

    def __post_init__(self) -> None:
        given = self.given
        if len(given) > 1 or not given and self.budget is None:
            what = " and ".join(given) or ("none" if self.json_object is None else "json_object=False alone")
            raise InvalidParameter(f"structured_outputs needs exactly one of {', '.join(KINDS)}, not {what}.",
                                   param="structured_outputs")

    @property
    def given(self) -> list[str]:
        """The names of `KINDS` that are; none of them where only reasoning is held to its budget."""
        given = [name for name in KINDS if getattr(self, name) is not None]
        return given if self.json_object is not False else [name for name in given if name != "json_object"]

    def spec(self) -> str:
        """The form as JSON text, for the core; raises `InvalidParameter` when a field is not of its type, or too long.
        """
        try:
            text = msgspec.json.encode(self)
            msgspec.json.decode(text, type=StructuredOutputsParams)  # compares what was given with the types
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidParameter(f"structured_outputs: {error}.", param="structured_outputs") from None
        for wrong, what in (
            (len(text) > MAX_BYTES, f"{len(text)} bytes of JSON, at most {MAX_BYTES} are taken: send a smaller one"),
            (self.after == "", "after is empty: leave it out"),
            (self.budget is not None and self.after is None, "budget is one of reasoning: give `after`, its end"),
            (self.budget is not None and self.budget < 0, f"budget={self.budget}: must be 0 or more"),
        ):
            if wrong:
                raise InvalidParameter(f"structured_outputs: {what}.", param="structured_outputs")
        return text.decode()
