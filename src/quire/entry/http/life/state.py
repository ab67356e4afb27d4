"""The states of a served engine."""

from enum import StrEnum


class EngineState(StrEnum):
    """State of the engine, in the order of its life."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    DEAD = "dead"
