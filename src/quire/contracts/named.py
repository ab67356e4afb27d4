"""Parameter records whose fields are named: an unknown name is refused with a hint at what was meant."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from quire.contracts.errors import InvalidParameter, shown
from quire.contracts.text_table import read_rows

# Fields that callers of other engines know and this one has not -> what to do instead; values that ask for nothing.
ROWS = {name: row for names, *row in read_rows(Path(__file__).with_name("absent.txt")) for name in names.split()}
ABSENT = {name: why for name, (why, *_) in ROWS.items()}
HARMLESS: dict[str, list[Any]] = {name: json.loads(more[0]) for name, (_, *more) in ROWS.items() if more}


class NamedFields(msgspec.StructMeta):
    """The type of parameter records whose constructor refuses an unknown name by `InvalidParameter`, with a hint."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        """Make the record, or raise `InvalidParameter` for the first name that is not a field."""
        return super().__call__(*args, **known_fields(cls, values))


def known_fields(kind: NamedFields, values: dict[str, Any]) -> dict[str, Any]:
    """The values without those of absent fields that ask for nothing. Raises `InvalidParameter` for the first other
    name that is not a field of `kind`, saying what was meant or is absent."""
    unknown = [name for name in values if name not in kind.__struct_fields__]
    for name in unknown:
        if name not in ABSENT or not asks_nothing(values[name], HARMLESS.get(name, ())):
            raise InvalidParameter(_unknown(kind, name), param=name)
    return {name: value for name, value in values.items() if name not in unknown} if unknown else values


def asks_nothing(value: object, harmless: Iterable[object]) -> bool:
    """Whether a value is None or one of the harmless ones, of their types."""
    return value is None or any(type(value) is type(one) and value == one for one in harmless)


def _unknown(kind: NamedFields, name: str) -> str:
    import difflib

    if name in ABSENT:
        return f"{kind.__name__}: {name} is not implemented: {ABSENT[name]}."
    fields = kind.__struct_fields__
    near = difflib.get_close_matches(name, (*fields, *ABSENT), n=1)
    if near and near[0] not in fields:
        return f"{kind.__name__} has no field {shown(name)}, and {near[0]} is not implemented: {ABSENT[near[0]]}."
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(fields)}."
    return f"{kind.__name__} has no field {shown(name)}: {hint}"
