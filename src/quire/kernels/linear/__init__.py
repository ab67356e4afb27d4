"""The linear layer y = x @ weight.T + bias, with an unquantized weight or a `QuantizedMatrix`.

pack(weight [N, K]) -> packed       called once after loading; only functions of the same module can read `packed`
    The features of an implementation name the weights that it takes: "unquantized" (a Tensor), or words of
    `quire.contracts.scheme.KINDS` (a QuantizedMatrix). Kernels of kinds with `inputs` quantize the activations by
    the rules of `quire.kernels.quantize`
run(x [T, K], packed, bias [N] or None) -> [T, N] in x's dtype, accumulated in float32
run_float(x, packed, bias) -> [T, N] float32
way(x, packed) -> text for a trace: where `run` dequantizes the weight and quantizes x; "" for an unquantized weight. A
    function of implementations that take quantized weights
`pack` may return the weight itself, so the caller must not use the weight afterwards.

Features that an implementation may declare:
add      run_add(x, packed, bias, residual [T, N]) -> [T, N]: the product plus the residual. The result may overwrite
         the residual's memory
exact    run_float keeps float32 from the product to the result, without rounding to x's dtype between
gated    pack_gated(weight [2I, K]) -> packed, run_gated(x, packed, bias [2I] or None, act="silu") -> [T, I]: the
         activation `act` of the product, any of `quire.kernels.activation.ACTS`. The rows of gate come first in the
         weight, then those of up
norm     run_norm(x, norm_weight [K], eps, packed, bias) -> [T, N]: `run` of the RMS-normalized x
         (`quire.kernels.norm`); run_norm_gated: `run_gated` of it, with "gated". "norm of one row": for T = 1 alone
out      run_float(x, packed, bias, out [T, N] float32) -> out
plain    the packed weight is the weight itself, [N, K]
stored   takes weights of another type than x's, bfloat16 or float32, and keeps them in it; the arithmetic is float32
ungated  `run` takes a weight packed by `pack_gated`, too
rows     rows(packed, ids [T] int64) -> [T, K]: rows of the weight, perhaps in float32; NaN for ids outside [0, N)
"""
