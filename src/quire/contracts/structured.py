"""Structured output as a caller asks for it (`StructuredOutputsParams`)."""

from typing import Any

import msgspec

from quire.contracts.errors import InvalidParameter
from quire.contracts.unknown_fields import StrictFields

KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_BYTES = 1 << 20  # of the parameters as JSON


class StructuredOutputsParams(
    msgspec.Struct, metaclass=StrictFields, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Structured output of a request: exactly one of the first five fields. With a `budget` they may all be absent.

    json          a JSON schema, as an object or as its JSON text
    regex         a regular expression that the whole text matches
    choice        texts, one of which is the output
    grammar       a grammar in Lark's syntax, or in GBNF's (`root ::= ...`)
    json_object   any JSON object

    disable_any_whitespace   JSON without white space between its parts
    after                    text that ends the reasoning, such as "</think>"; the prompt has begun the reasoning. The
                             grammar applies after the token that completes this text. Before, only a stop string ends
                             the output. None: there is no reasoning
    budget                   maximum tokens of reasoning; then the tokens of `after` are forced. None: no limit
    inside                   True: the grammar describes the reasoning, too, and applies from the first token on
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
            raise InvalidParameter(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}, not {what}.", param="structured_outputs"
            )

    @property
    def given(self) -> list[str]:
        """Names of the fields of `KINDS` that are set; empty when only `budget` is set."""
        given = [name for name in KINDS if getattr(self, name) is not None]
        return given if self.json_object is not False else [name for name in given if name != "json_object"]

    def spec(self) -> str:
        """Return the parameters as JSON text, for the core.

        Raises `InvalidParameter` for a field of the wrong type, a wrong `after` or `budget`, or too long a text.
        """
        try:
            text = msgspec.json.encode(self)
            msgspec.json.decode(text, type=StructuredOutputsParams)  # checks the types of the fields
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidParameter(f"structured_outputs: {error}.", param="structured_outputs") from None
        for wrong, what in (
            (len(text) > MAX_BYTES, f"{len(text)} bytes of JSON, at most {MAX_BYTES} are taken: send a smaller one"),
            (self.after == "", "after is empty: leave it out"),
            (self.budget is not None and self.after is None, "budget limits reasoning: give `after`, its end, too"),
            (self.budget is not None and self.budget < 0, f"budget={self.budget}: must be 0 or more"),
        ):
            if wrong:
                raise InvalidParameter(f"structured_outputs: {what}.", param="structured_outputs")
        return text.decode()
