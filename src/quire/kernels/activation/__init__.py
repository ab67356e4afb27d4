"""The gated activation of the feed-forward layer (SwiGLU; Shazeer, 2020).

silu_mul(gate_up [T, 2I]) -> [T, I]
    gate is the first half of a row, up the second: y = gate * sigmoid(gate) * up.
"""
