"""Each token through the experts it was routed to: the sum over its k of weight * down(silu(gate(x)) * up(x)).

pack(gate_up [E, 2I, H], down [E, H, I]) -> packed
    Once, after loading; gate's rows come first, then up's. Only functions of the same module understand `packed`; it
    may be the weights themselves, of which the caller must keep no other use. E counts the experts of this rank.
run(x [T, H], weights [T, k] float32, ids [T, k] int32, packed, expert_map [all experts] int32 or None,
    residual [T, H] or None) -> [T, H] in x's dtype, accumulated in float32
    ids number all experts, and expert_map gives each its place in `packed`; without a map they are places themselves. A
    place of -1 is not of this rank: what it would add is left out, so that the ranks' results sum to the whole.
    `residual` is added; the result may take its memory. An id twice in one row counts twice.
    With the feature "join": last, `Fork.join` of what makes the residual, contiguous, beside; called before it is read.
"""
