"""Slices of the tensors of a quantized matrix: which of their numbers belong to a part of a parameter. No torch."""

from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

from msgspec.structs import replace

from quire.contracts.params import Part
from quire.contracts.scheme import Scheme

LEAST = 8  # columns of a group that is a part of a stored one: those of an int32 word of 4-bit values


class Axes(NamedTuple):
    """Axes of a stored tensor, such as the scales, that run along the rows and the columns of the weight matrix.

    rows, columns   index of the axis; None: the tensor has no such axis
    units   (rows, columns) of the matrix per element of the tensor: (128, 128) for scales of such blocks
    """

    rows: int | None
    columns: int | None
    units: tuple[int, int] = (1, 1)


def stored_name(part: Part, suffix: str) -> str:
    """Return the name of a tensor stored beside a weight: for "....q_proj.weight" and "scales", "....q_proj.scales".

    A suffix that begins with "_" is added to the name: for "....experts.down_proj" and "_scales",
    "....experts.down_proj_scales".
    """
    return part.stored + suffix if suffix.startswith("_") else f"{part.stored.rpartition('.')[0]}.{suffix}"


def stored_part(part: Part, suffix: str, shape: tuple[int, ...], axes: Axes) -> Part:
    """Return the slice of a tensor stored beside a weight that belongs to `part`, a slice of the weight.

    suffix   last word of the tensor's name, such as "scales"
    shape    whole shape of the tensor; where it stacks experts, without their axis
    axes     axes of the tensor; elements for blocks that `part` cuts are in the slice
    """
    axis, unit = (axes.columns, axes.units[1]) if part.axis else (axes.rows, axes.units[0])
    name, whole = stored_name(part, suffix), (*part.shape[: part.expert >= 0], *shape)
    if axis is None:
        return Part(name, whole, 0, shape[0], name=part.name, expert=part.expert)
    first, end = part.start // unit, -(-(part.start + part.count) // unit)
    return Part(name, whole, first, end - first, axis=axis, name=part.name, expert=part.expert)


def is_cut(part: Part) -> bool:
    """True for a slice of the columns of a matrix, which tensor parallelism makes."""
    return part.axis == 1 and not part.whole


def mixes_groups(parts: Iterable[Part], stored: Scheme) -> bool:
    """True for slices of columns in activation order: their columns are of any groups, and no groups are whole."""
    return stored.order and any(map(is_cut, parts))


def group_axis(part: Part, stored: Scheme, axis: int) -> int | None:
    """Return the axis of groups in a tensor of scales or zero points; None where a slice of columns reads all of it."""
    return None if not stored.block[1] or mixes_groups((part,), stored) else axis


def scale_part(part: Part, suffix: str, stored: Scheme) -> Part:
    """Return the slice of the scale tensor for `part`: [blocks of rows, blocks of columns], or a single number."""
    rows, columns = part.matrix
    if stored.block == (0, 0):
        return stored_part(part, suffix, (1,), Axes(None, None))
    axes = Axes(0 if stored.block[0] else None, group_axis(part, stored, 1), stored.block)
    return stored_part(part, suffix, stored.scales(rows, columns), axes)


def regrouped(parts: Iterable[Part], stored: Scheme) -> Scheme:
    """Return the scheme of slices of columns that cut groups: its groups are equal parts of the stored ones.

    The parts of a group have the scale and zero point of the group, which is exact. Slices of equal length get one
    scheme: columns 192 to 384 in groups of 128 are three groups of 64. Other schemes than groups of integers stay.
    """
    if not _splits(stored):
        return stored
    ends = [end for part in parts if is_cut(part) for end in (part.start, part.count)]
    return replace(stored, block=(stored.block[0], gcd(stored.block[1], *ends)))


def _splits(stored: Scheme) -> bool:
    """True for integers in groups of columns, which kernels run in groups of other sizes, too."""
    return stored.values in ("w4", "w8") and stored.block[1] > 0 and not stored.order


def cuts_blocks(part: Part, stored: Scheme, packed: int) -> str:
    """Return the reason why `part`, a slice of columns, cannot be read: it cuts a group or a packed word; "" if none.

    packed   columns in an int32 word of packed values; 1: not packed
    """
    if not is_cut(part):
        return ""
    groups = 1 if stored.order else stored.block[1] or 1  # in activation order a slice has the scales of all groups
    for unit, word in ((groups, "groups"), (packed, "packed words")):
        least = LEAST if word == "groups" and _splits(stored) else unit
        if part.start % least or (part.start + part.count) % least and part.start + part.count != part.matrix[1]:
            halves = f" into parts of no multiple of {least}" * (least < unit)
            return (
                f"{part.stored} has {word} of {unit} columns, which columns {part.start} to "
                f"{part.start + part.count} of {part.matrix[1]} cut{halves}"
            )
    return ""


def packed_scheme(parts: tuple[Part, ...], stored: Scheme) -> Scheme:
    """Return the scheme of the fused matrix that stacks `parts`, which the checkpoint stores in the scheme `stored`.

    A scale per tensor becomes a scale per row. Blocks stay blocks where every block of the matrix lies in one block of
    one part; else each row gets the scales of its own blocks: (128, 128) becomes (1, 128), which is exact. Groups that
    slices of columns cut become smaller ones: see `regrouped`.
    """
    stored = regrouped(parts, stored)
    high, wide = stored.block
    if not high:
        return replace(stored, block=(1, wide))
    whole = high > 1 and all(part.start % high == 0 and _stays(part, high) for part in parts)
    joined = all(part.rows % high == 0 for part in parts[:-1])
    return stored if whole and joined or high == 1 else replace(stored, block=(1, wide))


def _stays(part: Part, high: int) -> bool:
    """True when the order of a part's rows moves no row out of its block."""
    if part.paired or not part.order:
        return not part.paired
    moved = [i for i, row in enumerate(part.order) if i != row]
    if not moved:
        return True
    first, last, run = moved[0], moved[-1], len(part.order)
    return all((at + first) // high == (at + last) // high for at in range(0, part.rows, run))
