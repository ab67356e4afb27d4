"""Parameter records whose fields are named: an unknown name is refused with a hint at what was meant."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from quire.contracts.errors import InvalidParameter
from quire.contracts.text_table import read_rows

# Fields that callers of other engines know and this one has not -> what to do instead.
ABSENT = {name: why for names, why in read_rows(Path(__file__).with_name("absent.txt")) for name in names.split()}


class NamedFields(msgspec.StructMeta):
    """The type of parameter records whose constructor refuses an unknown name by `InvalidParameter`, with a hint."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        """Make the record, or raise `InvalidParameter` for the first name that is not a field."""
        check_names(cls, values)
        return super().__call__(*args, **values)


def check_names(kind: NamedFields, names: Iterable[str]) -> None:
    """Raise `InvalidParameter` for the first name that is not a field of `kind`, saying what was meant or is absent."""
    for name in names:
        if name not in kind.__struct_fields__:
            raise InvalidParameter(_unknown(kind, name), param=name)


def _unknown(kind: NamedFields, name: str) -> str:
    import difflib

    if name in ABSENT:
        return f"{kind.__name__}: {name} is not implemented: {ABSENT[name]}."
    fields = kind.__struct_fields__
    near = difflib.get_close_matches(name, (*fields, *ABSENT), n=1)
    if near and near[0] not in fields:
        return f"{kind.__name__} has no field {name!r}, and {near[0]} is not implemented: {ABSENT[near[0]]}."
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(fields)}."
    return f"{kind.__name__} has no field {name!r}: {hint}"
