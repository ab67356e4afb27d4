"""Activations x [M, K] in 8 bits: values, and float32 scales with x = values * scale up to rounding.

fp8_tokens(x) -> values [M, K] float8_e4m3fn, scale [M, 1]
fp8_groups(x, ue8m0=False) -> values, scale [M, ceil(K / 128)]: a scale for each row and 128 columns
fp8_static(x, scale) -> values: by the given scale, a float32 scalar
int8_tokens(x) -> values [M, K] int8, scale [M, 1]
int8_static(x, scale) -> values
quantize_rows(x, wire) -> `QuantizedRows` of x in the form `wire` (a `Wire` of `quire.contracts.scheme`)

Rules, all in float32:
- computed scales: max(amax, 1e-10) / 448 for FP8, / 127 for INT8. A row of zeros has values 0, never NaN
- `ue8m0`: scales are rounded up to powers of two
- FP8 values: x / scale, clamped to +-448 before the cast (a cast without saturation makes NaN), rounded to nearest even
- INT8 values: x / scale, rounded half to even, clamped to -128 .. 127
- NaN and infinity make a computed scale NaN or infinite, and all numbers that share the scale NaN in the products. With
  a given scale NaN is NaN in FP8; INT8 has none
"""
