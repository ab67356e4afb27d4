"""The routers that `routing/normed.py` takes, and the reasons. No torch."""

from typing import NamedTuple

from quire.args.experts import Routing

MOST_ROWS, MOST_PICKS = 8, 32
BLOCKS = 8  # with 16 the kernel alone takes 0.2 us less, and a step of DeepSeek-V2-Lite 4% more
WARPS = 8, 16  # the few if they have room for the router's weight
MOST_WEIGHTS = 4096  # numbers of the router's weight that a warp has in registers


class Tiling(NamedTuple):
    """The tiling of the kernel: blocks of a cluster, warps of a block."""

    blocks: int
    warps: int


def tiling_of(inputs: int, experts: int) -> Tiling | None:
    """Return the tiling for a router. None: no warp has room for its part of the weight."""
    most = (warps for warps in WARPS if -(-experts // (BLOCKS * warps)) * inputs <= MOST_WEIGHTS)
    return next((Tiling(BLOCKS, warps) for warps in most), None)


def why_not(routing: Routing, inputs: int) -> str:
    """Return the reason why the kernel does not take a router with so many inputs, or ""."""
    against = {
        "experts have groups": routing.num_groups > 1,
        f"{inputs} inputs are no multiple of 8": inputs % 8 > 0,
        f"{routing.num_experts} experts of {inputs:,} inputs have no room in registers": tiling_of(
            inputs, routing.num_experts
        )
        is None,
        f"{routing.top_k} experts of a token are more than {MOST_PICKS}": routing.top_k > MOST_PICKS,
    }
    return next((reason for reason, holds in against.items() if holds), "")
