"""Parameter records that refuse an unknown field name with a hint at the right one."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from quire.contracts.errors import InvalidParameter, shown
from quire.contracts.text_table import read_rows

# Fields of other engines that Quire refuses -> what to do instead, and the values that have no effect.
TABLE = Path(__file__).with_name("refused_fields.txt")
ROWS = {name: row for names, *row in read_rows(TABLE) for name in names.split()}
REFUSED = {name: why for name, (why, *_) in ROWS.items()}
HARMLESS: dict[str, list[Any]] = {name: json.loads(more[0]) for name, (_, *more) in ROWS.items() if more}


class StrictFields(msgspec.StructMeta):
    """Metaclass of parameter records: the constructor raises `InvalidParameter` for an unknown name, with a hint."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        """Make the record. Raises `InvalidParameter` for the first unknown name."""
        return super().__call__(*args, **known_fields(cls, values))


def known_fields(kind: StrictFields, values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `values` that are fields of `kind`, a class of parameters.

    Fields that Quire refuses are dropped when their values have no effect. Raises `InvalidParameter` for the first
    other name; the message names the nearest field, or what to do instead.
    """
    unknown = [name for name in values if name not in kind.__struct_fields__]
    for name in unknown:
        if name not in REFUSED or not has_no_effect(values[name], HARMLESS.get(name, ())):
            raise InvalidParameter(_unknown(kind, name), param=name)
    return {name: value for name, value in values.items() if name not in unknown} if unknown else values


def has_no_effect(value: object, harmless: Iterable[object]) -> bool:
    """True when the value is None, or equals a harmless value of the same type."""
    return value is None or any(type(value) is type(one) and value == one for one in harmless)


def _unknown(kind: StrictFields, name: str) -> str:
    import difflib

    if name in REFUSED:
        return f"{kind.__name__}: {name} is not implemented: {REFUSED[name]}."
    fields = kind.__struct_fields__
    near = difflib.get_close_matches(name, (*fields, *REFUSED), n=1)
    if near and near[0] not in fields:
        return f"{kind.__name__} has no field {shown(name)}, and {near[0]} is not implemented: {REFUSED[near[0]]}."
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(fields)}."
    return f"{kind.__name__} has no field {shown(name)}: {hint}"
