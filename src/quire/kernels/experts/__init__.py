"""Each token through the experts it was routed to: the sum over its k of weight * down(silu(gate(x)) * up(x)).

empty(num_experts, gate_up, down, device) -> packed
    Room for the weights of this rank's experts, each like gate_up [2I, H] and down [H, I]. Only functions of the same
    module understand `packed`.
put(packed, place, gate_up [2I, H], down [H, I])
    Pack an expert into its place, once after loading; gate's rows come first, then up's. The two tensors are used up.
destination(packed) -> (gate_up [E, 2I, H], down [E, H, I])
    With the feature "in place": all experts in the memory of `packed`. Writing an expert there packs it.
run(x [T, H], weights [T, k] float32, ids [T, k] int32, packed, expert_map [all experts] int32 or None,
    residual [T, H] or None) -> [T, H] in x's dtype, accumulated in float32
    ids number all experts, and expert_map gives each its place in `packed`; without a map they are places themselves. A
    place of -1 is not of this rank: what it would add is left out, so that the ranks' results sum to the whole.
    `residual` is added; the result may take its memory. An id twice in one row counts twice.
    With the feature "join": last, `Fork.join` of what makes the residual, contiguous, beside; called before it is read.
"""
