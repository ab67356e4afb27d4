"""Operators of the repaired interpreter (`tests/support/triton_interpreter.py`) find what Triton's own ones find."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels import triton_runtime

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

import triton
from triton import language as tl
from triton.runtime.interpreter import TensorHandle

OPERATORS = {"add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "radd", "rsub", "rmul"}
OPERATORS |= {"truediv", "floordiv", "mod", "lshift", "rshift"}
SHAPES: tuple[tuple[int, ...], ...] = ((), (4,), (1,), (4, 2), (4, 1), (1, 2), (2, 4))
TYPES = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float16, tl.float32, tl.bfloat16)
NUMBERS = (0, 3, -2, 31, 200, 0xD2511F53, 1 << 40, -0.0, 0.0, 0.1, 1e-40, 1e39, float("inf"), float("nan"), True)


@triton.jit
def copy_kernel(source, to):
    tl.store(to, tl.load(source))


@pytest.fixture(autouse=True)
def patched() -> None:
    """A launch patches the language."""
    copy_kernel[(1,)](torch.ones(1), torch.ones(1))


def numbers(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    """A tensor of the interpreter."""
    name = {"int1": "bool", "bf16": "uint16", "fp16": "float16", "fp32": "float32"}.get(dtype.name, dtype.name)
    data = np.random.default_rng(seed).integers(0, 4, shape or (1,)).astype(name)
    return tl.core.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def pointers(shape: tuple[int, ...]) -> Any:
    kind = tl.pointer_type(tl.int32)
    data = np.arange(int(np.prod(shape or (1,))), dtype=np.uint64).reshape(shape or (1,))
    return tl.core.tensor(TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def outcome(function: Any, *given: Any) -> Any:
    """Type, shape, numbers and their types of a result; of an error its type."""
    with np.errstate(all="ignore"):
        try:
            found = function(*given)
        except Exception as error:
            return type(error)
    data = found.handle.data
    kind = "" if found.dtype is tl.int1 else data.dtype  # spread masks are integers there
    return (
        str(found.type),
        found.handle.dtype.name,
        kind,
        data.shape,
        data.astype(bool if kind == "" else kind).tolist(),
    )


def compare(name: str, left: Any, right: Any) -> None:
    own = getattr(tl.core.tensor, f"__{name}__")
    found, expected = (repr(outcome(one, left, right)) for one in (own, own.__wrapped__))
    assert found == expected, (name, left.type, getattr(right, "type", right))


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operators_are_those_of_triton(name: str) -> None:
    for one, other in itertools.product(TYPES, TYPES):
        compare(name, numbers(one, (4,)), numbers(other, (4,), seed=1))
    for dtype, one, other in itertools.product((tl.int32, tl.float32, tl.int1), SHAPES, SHAPES):
        compare(name, numbers(dtype, one), numbers(dtype, other, seed=1))
    for dtype, number in itertools.product(TYPES, NUMBERS):
        compare(name, numbers(dtype, (4,)), number)
    compare(name, numbers(tl.float32, ()), tl.constexpr(3))
    for dtype, shape in itertools.product(TYPES, SHAPES if name == "add" else ((4,),)):
        compare(name, pointers((4,)), numbers(dtype, shape))
        compare(name, pointers(()), numbers(dtype, shape))
    for shape, number in itertools.product(((), (4,), (4, 2)), NUMBERS if name == "add" else ()):
        compare(name, pointers(shape), number)


def same(own: Any, *given: Any, **named: Any) -> None:
    """Assert that a function of the language finds what Triton's own one finds."""
    functions = (functools.partial(one, **named) for one in (own, own.__wrapped__))
    found, expected = (repr(outcome(one, *given)) for one in functions)
    assert found == expected, (given, named)


def test_numbers_in_another_type_are_those_of_triton() -> None:
    others = (*TYPES, tl.int16, tl.uint16, tl.float64, tl.float8e5)
    for one, other, shape in itertools.product(TYPES, others, ((), (4,), (4, 2))):
        same(tl.core.tensor.to, numbers(one, shape), other)
        same(tl.core.tensor.to, numbers(one, shape), tl.constexpr(other))
    for dtype, rounding in itertools.product((tl.float16, tl.int32), (None, "rtz")):
        same(tl.core.tensor.to, numbers(tl.float32, (4,)), dtype, fp_downcast_rounding=rounding)
    negative = numbers(tl.float32, (4,)) * -1.5
    for dtype in (tl.int8, tl.int64, tl.float16):
        same(tl.core.tensor.to, negative, dtype)


def test_choices_are_those_of_triton() -> None:
    for one, other in itertools.product(SHAPES, SHAPES):
        same(tl.where, numbers(tl.int1, one), numbers(tl.float32, other), numbers(tl.float32, other, seed=1))
        same(tl.where, numbers(tl.int1, one), numbers(tl.float32, other), numbers(tl.float32, one))
    for dtype, number in itertools.product(TYPES, NUMBERS):
        same(tl.where, numbers(tl.int1, (4,)), numbers(dtype, (4,)), number)
        same(tl.where, numbers(tl.int1, (4,)), tl.constexpr(number), numbers(dtype, (4,)))
    for one, other in itertools.product(TYPES, TYPES):
        same(tl.where, numbers(tl.int1, (4,)), numbers(one, (4,)), numbers(other, (4,)))
    with pytest.warns(UserWarning, match="non-boolean condition"):
        same(tl.where, numbers(tl.int32, (4,)), numbers(tl.int32, (4,)), numbers(tl.int32, (4,), seed=1))
    same(tl.where, numbers(tl.int1, (4,)), 1, 2.0)


def test_new_axes_are_those_of_triton() -> None:
    every = slice(None)
    for shape, count in itertools.product(SHAPES, range(4)):
        for places in itertools.product((None, every, 0, slice(0, 2)), repeat=count):
            same(tl.core.tensor.__getitem__, numbers(tl.int32, shape), places)


def places(memory: torch.Tensor, kind: Any, shape: tuple[int, ...]) -> Any:
    """Pointers to the first numbers of a memory, four bytes apart."""
    element, count = tl.pointer_type(kind), int(np.prod(shape or (1,)))
    data = memory.data_ptr() + 4 * np.arange(count, dtype=np.uint64).reshape(shape or (1,))
    return tl.core.tensor(TensorHandle(data, element), tl.block_type(element, list(shape)) if shape else element)


NAMED: list[dict[str, Any]] = [
    {}, {"cache_modifier": ".cg"}, {"eviction_policy": "evict_first"}, {"cache_modifier": ".wrong"},
    {"cache_modifier": ".ca", "volatile": True},
]  # fmt: skip


def test_loads_are_those_of_triton() -> None:
    source = torch.arange(16, dtype=torch.int32)
    masks = [None, *(numbers(tl.int1, one) for one in SHAPES)]
    for kind, shape in itertools.product((tl.int32, tl.int1, tl.float16, tl.float32), SHAPES):
        where = places(source, kind, shape)
        for mask, other in itertools.product(masks, (None, 0, 0.0, 3, -1.5, float("inf"), numbers(tl.int32, shape))):
            same(tl.load, where, mask, other)
    for named, mask in itertools.product(NAMED, (None, numbers(tl.int1, (4,)))):
        same(tl.load, places(source, tl.int32, (4,)), mask, **named)


def test_stores_are_those_of_triton() -> None:
    memory = torch.zeros(16, dtype=torch.int32)

    def written(store: Any, *given: Any) -> Any:
        memory.fill_(-1)
        try:
            store(*given)
        except Exception as error:
            return type(error)
        return memory.tolist()

    def same_memory(*given: Any, **named: Any) -> None:
        stores = (functools.partial(one, **named) for one in (tl.store, tl.store.__wrapped__))
        found, expected = (written(one, *given) for one in stores)
        assert found == expected, (given, named)

    masks = [None, *(numbers(tl.int1, one, seed=2) for one in SHAPES)]
    for kind, shape, mask in itertools.product((tl.int32, tl.int1, tl.float16, tl.float32), SHAPES, masks):
        for value in [*(numbers(kind, one) for one in SHAPES), 0, 3, -1.5]:
            same_memory(places(memory, kind, shape), value, mask)
    for kind, dtype in itertools.product(TYPES, TYPES):
        if kind.primitive_bitwidth <= 32:
            same_memory(places(memory, kind, (4,)), numbers(dtype, (4,)))
    for named, mask in itertools.product(NAMED, (None, numbers(tl.int1, (4,)))):
        same_memory(places(memory, tl.int32, (4,)), numbers(tl.int32, (4,)), mask, **named)
