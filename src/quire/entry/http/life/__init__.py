"""Routes about the life of the engine: pauses, sleep, and weights that are replaced."""
