"""The bits of packed weights in words of 32 bits, and how Hopper's registers make bf16 of them, in Gluon.

Numbers of 4 bits lie in both halves of a word alike: the numbers of a pair have the same place in their half. Integers
have nibbles. E2M1 has the bits of `PLACES`, so that two of four pairs need no more than a shift to be bf16, apart from
a power of two.
"""

from __future__ import annotations

from quire.kernels.triton_runtime import gl, gluon_jit, tl

# Fields of a half-word of E2M1: place of the sign, and of the other three bits. In bf16 they lie at 15 and 6, and are
# the number times 2^-126. That of 0.5 is below bf16's normal numbers, and just as exact. So one multiplication brings
# 2^126 and the scale. Its factor is a power of two, of which a byte has bf16's exponent.
PLACES = ((15, 6), (12, 3), (14, 0), (13, 9))

# Two words of 4-bit numbers to 16 of bf16, minus zero points. 128 + q in bf16 has q in its low bits. A word's halves
# have four numbers each: of output g, inputs 2 t and 2 t + 1; of output g + 8; both again for inputs 8 further.
_FIELD = "shr.u32 a, {word}, {shift}; lop3.b32 {out}, a, 0x000F000F, 0x43004300, 0xEA;"
_SUB, _MUL = "sub.rn.bf16x2 {out}, {out}, {zero};", "mul.rn.bf16x2 {out}, {out}, {scale};"


def _asm_4(scaled: bool) -> str:
    """Return the code for a pair of words: outputs $0 to $7, words $8 and $9, zeros from $10, scales from $14 on."""
    lines = "".join(
        (_FIELD + _SUB + _MUL * scaled).format(
            out=f"${4 * half + at}",
            word=f"${8 + half}",
            shift=4 * at,
            zero=f"${10 + 2 * (at & 1)}",
            scale=f"${14 + 2 * (at & 1)}",
        )
        for half in range(2)
        for at in range(4)
    )
    return "{ .reg .b32 a; " + lines + " }"


def _asm_e2m1() -> str:
    """Return the code for a pair of words of E2M1: outputs $0 to $7, words $8 and $9, multipliers from $10 on."""
    lines = ""
    for half in range(2):
        for at, (sign, size) in enumerate(PLACES):
            out, word = f"${4 * half + at}", f"${8 + half}"
            if sign - size == 9:  # as in bf16
                lines += f"shl.b32 a, {word}, {15 - sign}; and.b32 {out}, a, 0x81C081C0; "
            else:
                shift = f"shl.b32 a, {word}, {6 - size}" if size < 6 else f"shr.u32 a, {word}, {size - 6}"
                lines += f"{shift}; and.b32 a, a, 0x01C001C0; shl.b32 b, {word}, {15 - sign}; "
                lines += f"lop3.b32 {out}, b, 0x80008000, a, 0xEA; "
            lines += _MUL.format(out=out, scale=f"${10 + 2 * (at & 1)}")
    return "{ .reg .b32 a, b; " + lines + " }"


def _asm_8(scaled: bool) -> str:
    """Return the code for a pair of words of 8-bit numbers: outputs $0 to $3, words $4 and $5, zeros from $6 on.

    2^23 + q in float32 has q in its low byte; the zeros are 2^23 + z.
    """
    lines = "".join(
        f"prmt.b32 u, ${4 + at // 2}, 0x4B000000, 0x744{at % 2 * 2}; mov.b32 a, u; "
        f"prmt.b32 u, ${4 + at // 2}, 0x4B000000, 0x744{at % 2 * 2 + 1}; mov.b32 b, u; "
        f"sub.f32 a, a, ${6 + 2 * (at & 1)}; sub.f32 b, b, ${6 + 2 * (at & 1)}; cvt.rn.bf16x2.f32 ${at}, b, a; "
        + (_MUL * scaled).format(out=f"${at}", scale=f"${10 + 2 * (at & 1)}")
        for at in range(4)
    )
    return "{ .reg .b32 u; .reg .f32 a, b; " + lines + " }"


def _constraints(outputs: int, inputs: str) -> str:
    return ",".join(["=&r"] * outputs + list(inputs))


if gl is not None:
    PLAIN_4, SCALED_4 = gl.constexpr(_asm_4(False)), gl.constexpr(_asm_4(True))
    PLAIN_8, SCALED_8 = gl.constexpr(_asm_8(False)), gl.constexpr(_asm_8(True))
    PLAIN_4_IN, SCALED_4_IN = gl.constexpr(_constraints(8, "r" * 6)), gl.constexpr(_constraints(8, "r" * 10))
    PLAIN_8_IN, SCALED_8_IN = gl.constexpr(_constraints(4, "rrffff")), gl.constexpr(_constraints(4, "rrffffrrrr"))
E2M1_CODE = E2M1_IN = None  # without Triton
if tl is not None:
    E2M1_CODE, E2M1_IN = tl.constexpr(_asm_e2m1()), tl.constexpr(_constraints(8, "r" * 6))


@gluon_jit
def _join(a, b, c, d, e, f, g, h):
    """[..] -> [.., 2, 2, 2]; the last dimension tells the first four tensors from the others."""
    return gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))


@gluon_jit
def _numbers(words, zeros, scales, BITS: gl.constexpr, SCALED: gl.constexpr, E2M1: gl.constexpr):
    """Numbers minus zero points, in bf16: [A, B, 16 outputs, 64 inputs] (8 bits: 32) of A x B units.

    words    int32 [A, B, 32, 4]
    zeros    of outputs g and of g + 8 for lanes 4 g to 4 g + 3, which broadcast to the words: 128 + z twice in bf16,
             bitwise (8 bits: 2^23 + z in float32)
    scales   as well, twice in bf16; used if SCALED
    E2M1     numbers of 4 bits are E2M1, without zero points and always scaled: `scales` are `_powers`
    """
    A: gl.constexpr = words.shape[0]
    B: gl.constexpr = words.shape[1]
    if BITS == 4:
        TYPES: gl.constexpr = (
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
        )
        if E2M1:
            one, two = scales
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                E2M1_CODE, E2M1_IN, [words, one, two], dtype=TYPES, is_pure=True, pack=2
            )
        elif not SCALED:
            low, high = zeros
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                PLAIN_4, PLAIN_4_IN, [words, low, high], dtype=TYPES, is_pure=True, pack=2
            )
        else:
            low, high = zeros
            one, two = scales
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                SCALED_4, SCALED_4_IN, [words, low, high, one, two], dtype=TYPES, is_pure=True, pack=2
            )
        # [A, B, 8 g, 4 t, 2 k32, 2 k1, 2 +8 outputs, 2 k8, 2 k16]
        numbers = _join(a, b, c, d, e, f, g, h).reshape([A, B, 8, 4, 2, 2, 2, 2, 2])
        return numbers.permute([0, 1, 6, 2, 4, 8, 7, 3, 5]).reshape([A, B, 16, 64])
    else:
        low, high = zeros
        FOUR: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
        if not SCALED:
            a, b, c, d = gl.inline_asm_elementwise(
                PLAIN_8, PLAIN_8_IN, [words, low, high], dtype=FOUR, is_pure=True, pack=2
            )
        else:
            one, two = scales
            a, b, c, d = gl.inline_asm_elementwise(
                SCALED_8, SCALED_8_IN, [words, low, high, one, two], dtype=FOUR, is_pure=True, pack=2
            )
        # [A, B, 8 g, 4 t, 2 k16, 2 k1, 2 +8 outputs, 2 k8]
        numbers = gl.join(gl.join(a, b), gl.join(c, d)).reshape([A, B, 8, 4, 2, 2, 2, 2])
        return numbers.permute([0, 1, 6, 2, 4, 7, 3, 5]).reshape([A, B, 16, 32])


@gluon_jit
def _zero(zeros, at, BITS: gl.constexpr):
    """Load zero points as `_numbers` takes them; without zeros those of symmetric numbers."""
    if BITS == 4:
        if zeros is None:
            return at * 0 + 0x43084308
        else:
            return gl.load(zeros + at).to(gl.int32) * 0x10001 + 0x43004300
    else:
        if zeros is None:
            return (at * 0).to(gl.float32) + 8388736.0
        else:
            return gl.load(zeros + at).to(gl.float32) + 8388608.0


@gluon_jit
def _powers(words, piece: gl.constexpr):
    """Return byte `piece` of words, an exponent of bf16, as that power of two twice in bf16, bitwise."""
    return ((words >> (8 * piece)) & 255) * 0x00800080


@gluon_jit
def _twice(scales, DEEP: gl.constexpr, FIRST: gl.constexpr, E2M1: gl.constexpr):
    """Return scales in bf16 twice, bitwise: tuples by group, of two tensors each. As they are if not FIRST.

    scales   as `words._scales_of` returns them
    """
    if E2M1:
        low, high = scales
        pairs = ()
        for piece in gl.static_range(128 // DEEP):
            pairs = pairs + ((_powers(low, piece), _powers(high, piece)),)
        return pairs
    elif FIRST:
        pairs = ()
        for piece in gl.static_range(128 // DEEP):
            pairs = pairs + ((_pair(scales[piece][0]), _pair(scales[piece][1])),)
        return pairs
    else:
        return scales


@gluon_jit
def _pair(scale):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [scale], dtype=gl.int32, is_pure=True, pack=1
    )
