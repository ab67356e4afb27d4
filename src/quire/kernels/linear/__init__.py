"""y = x @ weight.T + bias with an unquantized weight.

pack(weight [N, K]) -> packed       once, after loading; `packed` is a tensor only `run` of the same module understands
run(x [T, K], packed, bias [N] or None) -> [T, N] in x's dtype, accumulated in float32
Packing may return the weight itself; the caller must keep no other use of it after packing.
"""
