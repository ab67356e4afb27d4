"""The routed experts of a mixture-of-experts layer: y = sum over a token's k experts of weight * down(silu(gate) * up).

empty(num_experts, gate_up, down, device) -> packed
    Allocates the weights of this rank's experts, each shaped like gate_up [2I, H] and down [H, I]. Only functions of
    the same module can read `packed`. Quantized weights are a `QuantizedMatrix` each, here and in `put`; the features
    of an implementation name the kinds that it takes, as those of `quire.kernels.linear` do.
put(packed, place, gate_up [2I, H], down [H, I])
    Packs the weights of an expert into its place, once after loading. The rows of gate come first, then those of up.
    The caller must not use the two tensors afterwards.
way(x, packed) -> text
    For a trace, as in `quire.kernels.linear`.
destination(packed) -> (gate_up [E, 2I, H], down [E, H, I])
    Feature "in place", of unquantized weights: returns the memory of all experts in `packed`. Writing an expert there
    packs it.
run(x [T, H], weights [T, k] float32, ids [T, k] int32, packed, expert_map [all experts] int32 or None,
    residual [T, H] or None) -> [T, H] in x's dtype, accumulated in float32
    `ids` are numbers of all experts. `expert_map` gives the place of each in `packed`; without a map ids are places.
    Place -1: another rank has the expert. This rank adds nothing for it, so that the results of all ranks sum to y.
    An id of -1 is no expert: it adds nothing, and no weights are read for it.
    `residual` is added; the result may overwrite its memory. An id that comes twice in a row counts twice.
    Feature "join": one more argument, the `Fork.join` of a side stream that computes the residual (contiguous). `run`
    calls it before it reads the residual.
quantize_rows(x, wire) -> x as `QuantizedRows`
    Feature "quantized rows", of weights whose scheme has a `wire`: `run` takes such rows as x, too, and returns the
    bits that it returns for the x that they were made of. Rows without an expert here may hold anything.
"""
