"""The state of a balancer of experts, as tests look at it."""

from quire.engine.balancer import Balancer


def moving(balancer: Balancer) -> bool:
    """Return True while a new map is planned or its weights move."""
    return balancer._planned is not None or balancer._next is not None
