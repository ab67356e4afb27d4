"""Parameter records that refuse an unknown field name with a hint at the right one."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.contracts.errors import InvalidParameter, shown
from quire.contracts.text_table import read_rows


class Refused(NamedTuple):
    """Refusal of a name that other engines know and Quire does not implement.

    reason     the end of the error message: what to do instead
    harmless   values without effect, which are accepted, as None always is
    """

    reason: str
    harmless: list[Any]

    def accepts(self, value: object) -> bool:
        """Return True for a value without effect: None, or a value that equals a harmless one of the same type."""
        return value is None or any(type(value) is type(one) and value == one for one in self.harmless)


def read_refused(path: Path) -> dict[str, Refused]:
    """Return the refusals in a text file, by name. Rows: names | reason | harmless values, a JSON list."""
    return {
        name: Refused(reason, json.loads(harmless[0]) if harmless else [])
        for names, reason, *harmless in read_rows(path)
        for name in names.split()
    }


REFUSED = read_refused(Path(__file__).with_name("refused_fields.txt"))


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
        if name not in REFUSED or not REFUSED[name].accepts(values[name]):
            raise InvalidParameter(_unknown(kind, name), param=name)
    return {name: value for name, value in values.items() if name not in unknown} if unknown else values


def _unknown(kind: StrictFields, name: str) -> str:
    import difflib

    if name in REFUSED:
        return f"{kind.__name__}: {name} is not implemented: {REFUSED[name].reason}."
    fields = kind.__struct_fields__
    near = difflib.get_close_matches(name, (*fields, *REFUSED), n=1)
    if near and near[0] not in fields:
        reason = REFUSED[near[0]].reason
        return f"{kind.__name__} has no field {shown(name)}, and {near[0]} is not implemented: {reason}."
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(fields)}."
    return f"{kind.__name__} has no field {shown(name)}: {hint}"
