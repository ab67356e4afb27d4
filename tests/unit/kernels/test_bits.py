"""The instructions that make bf16 of words with numbers of 4 bits, run one by one: a GPU's registers, in Python."""

import re
from typing import Any

import pytest
import torch

from quire.kernels.weight_only import bits, words

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def halves(word: int) -> torch.Tensor:
    """The two numbers of bf16 in a word, the lower one first."""
    return torch.tensor([word], dtype=torch.uint32).view(torch.bfloat16).double()


def word_of(numbers: torch.Tensor) -> int:
    """Two numbers, rounded to bf16, in a word."""
    return int(numbers.bfloat16().view(torch.uint32))


def ran(code: str, given: dict[str, int]) -> dict[str, int]:
    """Run PTX on registers of 32 bits, and return all of them."""
    registers = dict(given)

    def read(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else registers[name]

    for line in filter(None, map(str.strip, code.strip().strip("{}").split(";"))):
        operation, _, rest = line.partition(" ")
        if operation == ".reg":
            continue
        to, *values = (one.strip() for one in rest.split(","))
        a, *more = map(read, values)
        if operation == "lop3.b32":
            b, c, table = more
            assert table == 0xEA  # a & b | c
            made = a & b | c
        elif operation in ("sub.rn.bf16x2", "mul.rn.bf16x2"):
            one, other = halves(a), halves(more[0])
            made = word_of(one - other if operation[0] == "s" else one * other)
        elif operation == "mov.b32":
            made = a
        elif operation == "and.b32":
            made = a & more[0]
        else:
            assert operation in ("shl.b32", "shr.u32"), operation
            made = a << more[0] & 0xFFFFFFFF if operation == "shl.b32" else a >> more[0]
        registers[to] = made
    return registers


def packed(codes: torch.Tensor, e2m1: bool) -> list[int]:
    """The words of the first lane: outputs 0 and 8, inputs 0, 1, 8, 9 in each 16 inputs."""
    made = words.repack(codes[:, 0::2] | codes[:, 1::2] << 4, 4, e2m1=e2m1)
    return [int(word) & 0xFFFFFFFF for word in made[0, 0, 0]]


@pytest.mark.parametrize("scaled", [False, True])
def test_numbers_of_a_lane(scaled: bool) -> None:
    """E2M1 in the places of integers of 4 bits, of which other tests on a GPU know that they are the tensor cores'."""
    codes = torch.randint(0, 16, (64, 128), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    codes[0, :16], codes[8, 48:64] = torch.arange(16, dtype=torch.uint8), torch.arange(16, dtype=torch.uint8)
    of = {0: 2.0**-9 if scaled else 1.0, 8: 2.0**-3 if scaled else 1.0}  # scale by output
    one, two = (word_of(torch.full((2,), 2.0**126 * of[output])) for output in (0, 8))
    number = torch.tensor(E2M1 + [-size for size in E2M1], dtype=torch.float64)
    integers, floats = packed(codes, False), packed(codes, True)
    for first in (0, 2):  # words of a pair: 32 inputs
        zero = word_of(torch.full((2,), 128.0))
        found: Any = ran(
            bits._asm_4(False), {"$8": integers[first], "$9": integers[first + 1], "$10": zero, "$12": zero}
        )
        given = {"$8": floats[first], "$9": floats[first + 1], "$10": one, "$12": two}
        actual = ran(bits._asm_e2m1(), given)
        for out in range(8):
            numbers = number[halves(found[f"${out}"]).long()] * of[8 if out % 2 else 0]
            assert torch.equal(halves(actual[f"${out}"]), numbers), out
            output, k = out % 2 * 8, first * 16 + out // 4 * 16 + out // 2 % 2 * 8
            assert torch.equal(numbers, number[codes[output, k : k + 2].long()] * of[output]), out


@pytest.mark.parametrize("power", [0, 1, 127, 128])
def test_every_number_with_the_smallest_and_largest_scales(power: int) -> None:
    code = bits._asm_e2m1()
    packed_scales = words.repack_powers(torch.full((64, 4), power, dtype=torch.uint8))
    scale = (int(packed_scales[0, 0, 0]) >> 8 & 255) * 0x00800080  # as `_powers` does
    number = torch.tensor(E2M1 + [-size for size in E2M1], dtype=torch.float64)
    for at, (sign, size) in enumerate(bits.PLACES):
        for value in range(16):
            other = 15 - value
            word = sum((one >> 3 << sign | (one & 7) << size) << half for half, one in ((0, value), (16, other)))
            found = halves(ran(code, {"$8": word, "$9": 0, "$10": scale, "$12": scale})[f"${at}"])
            assert torch.equal(found, number[[value, other]] * 2.0 ** (power - 127))
    assert len(re.findall("mul.rn", code)) == 8
