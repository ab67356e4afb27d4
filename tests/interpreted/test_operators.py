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
SHAPES: tuple[tuple[int, ...], ...] = ((), (4,), (1,), (4, 2), (4, 1), (1, 2), (2, 4))
TYPES = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.float32, tl.bfloat16)
NUMBERS = (0, 3, -2, 1 << 40, -0.0, 0.0, 0.1, 1e-40, 1e39, float("inf"), float("nan"), True)


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


def outcome(function: Any, left: Any, right: Any) -> Any:
    """Type, shape, numbers and their types of a result; of an error its type."""
    with np.errstate(all="ignore"):
        try:
            found = function(left, right)
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


def test_loads_are_those_of_triton() -> None:
    source = torch.arange(16, dtype=torch.int32)
    own = tl.load
    for kind, shape in itertools.product((tl.int32, tl.int1, tl.float16), SHAPES):
        element = tl.pointer_type(kind)
        places = source.data_ptr() + 4 * np.arange(int(np.prod(shape or (1,))), dtype=np.uint64).reshape(shape or (1,))
        where = tl.core.tensor(TensorHandle(places, element), tl.block_type(element, list(shape)) if shape else element)
        masks = [None, *(numbers(tl.int1, one) for one in SHAPES)]
        for mask, other in itertools.product(masks, (None, 0, 0.0, 3, -1.5)):
            loads = (functools.partial(one, other=other) for one in (own, own.__wrapped__))
            found, expected = (repr(outcome(one, where, mask)) for one in loads)
            assert found == expected, (kind, shape, mask, other)
