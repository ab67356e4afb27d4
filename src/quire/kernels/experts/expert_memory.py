"""The memory of one expert inside packed weights of any implementation, for copies between ranks."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from torch import Tensor


def expert_memory(packed: object, place: int) -> list[Tensor]:
    """Return the tensors that hold the expert at `place`, in an order that is the same for every place and rank.

    packed   weights of this rank's experts: tensors with the experts in the first dimension, lists with an item for
             each expert, and tuples or dataclasses of these
    """
    found: dict[tuple[int, int], Tensor] = {}  # by address: some packed weights have a list of views beside the whole
    for one in _of(packed, place):
        found.setdefault((one.data_ptr(), one.nbytes), one)
    return list(found.values())


def _of(packed: object, place: int) -> Iterator[Tensor]:
    if isinstance(packed, Tensor):
        yield packed[place]
    elif isinstance(packed, list):
        yield from _leaves(packed[place])
    elif isinstance(packed, tuple):
        for part in packed:
            yield from _of(part, place)
    elif is_dataclass(packed):
        for field in fields(packed):
            yield from _of(getattr(packed, field.name), place)


def _leaves(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name))
