"""Ordinary Pydantic models, one per annotation, with what an output of it is held to."""

import datetime
import decimal
import enum
import ipaddress
import pathlib
import uuid
from typing import Annotated, Any, Literal, NamedTuple, Optional

from pydantic import (
    UUID4,
    AnyUrl,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    SecretBytes,
    SecretStr,
    conint,
    conlist,
    constr,
    create_model,
)


class Color(enum.Enum):
    red, blue = "red", "blue"


class Level(enum.IntEnum):
    low, high = 1, 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = Field(max_length=5)


class Node(BaseModel):
    value: Level
    children: list["Node"] = Field(default=[], max_length=2)


class Pair(NamedTuple):
    low: Level
    high: Optional[Color] = None  # noqa: UP045  as many write it


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: Color = Color.red
    b: bool | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: Color


Short = Annotated[str, Field(max_length=6)]
Small = Annotated[int, Field(ge=0, le=99)]
HELD: dict[str, Any] = {  # Pydantic takes every output
    "ipv4": ipaddress.IPv4Address,
    "uuid": uuid.UUID,
    "uuid of version 4": UUID4,
    "datetime": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "conint": conint(gt=3, le=9),
    "confloat": Annotated[float, Field(ge=0, lt=1)],
    "constr": constr(pattern="^[a-z]+$", max_length=5),
    "literal": Literal["a", 1, None],
    "enum": Color,
    "int enum": Level,
    "optional": Small | None,
    "union": Small | Color | None,
    "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "nested": Closed,
    "recursive": Node,
    "dict": dict[Short, Small],
    "dict of dicts": dict[Short, dict[Short, Small]],
    "dict by enum": dict[Color, Small],
    "dict by literal": dict[Literal["x", "y"], Small],
    "dict by pattern": dict[constr(pattern="^k[0-9]{1,3}$"), Small],
    "dict by length": dict[constr(min_length=2, max_length=4), Small],
    "tuple": tuple[Small, Color],
    "list": conlist(Color, min_length=1, max_length=3),
    "named tuple": Pair,
    "allows more": Open,
    "set": Annotated[set[Color], Field(max_length=4)],
    "frozenset": Annotated[frozenset[Level], Field(max_length=3)],
    "path": pathlib.Path,
    "bytes": Annotated[bytes, Field(max_length=8)],
    "secret": Annotated[SecretStr, Field(max_length=8)],
    "secret bytes": Annotated[SecretBytes, Field(max_length=8)],
    "multiple": conint(multiple_of=5, ge=0, le=500),
    "bool": bool,
    "none": None,
}
NOTED: dict[str, Any] = {  # Pydantic may refuse one: its schema says less, or a format is not enforced
    "ipv6": ipaddress.IPv6Address, "ipv4 network": ipaddress.IPv4Network, "ipv6 network": ipaddress.IPv6Network,
    "ipv4 interface": ipaddress.IPv4Interface, "ipv6 interface": ipaddress.IPv6Interface, "base64": Base64Bytes,
    "decimal": decimal.Decimal, "timedelta": datetime.timedelta, "url": AnyUrl, "dict by uuid": dict[uuid.UUID, Small],
    "set of numbers": set[Small], "any": Any,
}  # fmt: skip


def models() -> dict[str, type[BaseModel]]:
    """A model with one field of each."""
    return {name: create_model("Model", field=(kind, ...)) for name, kind in (HELD | NOTED).items()}
