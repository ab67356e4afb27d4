"""y = x @ weight.T + bias with an unquantized weight.

pack(weight [N, K]) -> packed       once, after loading; only the functions of the same module understand `packed`
run(x [T, K], packed, bias [N] or None) -> [T, N] in x's dtype, accumulated in float32
run_float(x, packed, bias) -> [T, N] float32
Packing may return the weight itself; the caller must keep no other use of it after packing.

Features an implementation may declare:
add      run_add(x, packed, bias, residual [T, N]) -> [T, N]: the product added to the residual, whose memory the
         result may take
exact    run_float rounds nothing to x's type on its way
gated    pack_gated(weight [2I, K]) -> packed, run_gated(x, packed, bias [2I] or None) -> [T, I]: gate's rows come
         first, then up's; silu(gate) * up of the product (`quire.kernels.activation`)
norm     run_norm(x, norm_weight [K], eps, packed, bias) -> [T, N]: `run` of x after an RMS norm (`quire.kernels.norm`);
         run_norm_gated, the same before `run_gated`, where there is "gated" too
out      run_float(x, packed, bias, out [T, N] float32) -> out
plain    what is packed is the weight as it was, [N, K]
rows     rows(packed, ids [T] int64) -> [T, K]: rows of the weight as they were; NaN for ids outside [0, N)
"""
