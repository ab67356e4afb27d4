"""The routed experts of a mixture-of-experts layer: y = sum over a token's k experts of weight * expert(x), with
expert(x) = down @ act(gate_up @ x + b1) + b2. `act` is a gated activation (`quire.kernels.activation`); most experts
have no biases b1 [2I] and b2 [H].

empty(num_experts, gate_up, down, device, form) -> packed
    Allocates the weights of this rank's experts, each shaped like gate_up [2I, H] and down [H, I]. Only functions of
    the same module can read `packed`. Quantized weights are a `QuantizedMatrix` each, here and in `put`; the features
    of an implementation name the kinds that it takes, as those of `quire.kernels.linear` do.
    `form` (form.py) has the activation and says if the experts are biased. The default is "silu" without biases, which
    every implementation runs; others need features: "gelu_tanh", "gelu", "swiglu_oai", "relu2" (no gates: gate_up and
    b1 have I rows, those of up), "bias".
put(packed, place, gate_up [2I, H], down [H, I], biases)
    Packs the weights of an expert into its place, once after loading. The rows of gate come first, then those of up.
    `biases` of a biased form: b1 [2I], rows of gate first, and b2 [H]. Where ranks share an expert, and their results
    are summed, one rank gets b2 and the others get zeros. The caller must not use the tensors afterwards.
way(x, packed) -> text
    For a trace, as in `quire.kernels.linear`.
destination(packed) -> (gate_up [E, 2I, H], down [E, H, I])
    Feature "in place", of unquantized weights without biases: returns the memory of all experts in `packed`. Writing
    an expert there packs it.
run(x [T, H], weights [T, k] float32, ids [T, k] int32, packed, expert_map [all experts] int32 or None,
    residual [T, H] or None) -> [T, H] in x's dtype, accumulated in float32
    `ids` are numbers of all experts. `expert_map` gives the place of each in `packed`; without a map ids are places.
    Place -1: another rank has the expert. This rank adds nothing for it, so that the results of all ranks sum to y.
    An id of -1 is no expert: it adds nothing, and no weights are read for it.
    `residual` is added; the result may overwrite its memory. An id that comes twice in a row counts twice.
    Feature "join": one more argument, the `Fork.join` of a side stream that computes the residual (contiguous). `run`
    calls it before it reads the residual.
run_adapted(x, (weights, ids, expert_map), packed, residual, adapters[, join]) -> [T, H]
    Feature "adapters": `run` for a step in which some rows have adapters of experts (`quire.kernels.lora.routed`).
    Rows without an adapter have the results of `run`, within rounding.
quantize_rows(x, wire) -> x as `QuantizedRows`
    Feature "quantized rows", of weights whose scheme has a `wire`: `run` takes such rows as x, too, and returns the
    bits that it returns for the x that they were made of. Rows without an expert here may hold anything.
"""
