"""Records and protocols shared by all rooms: requests, step plans and results, block geometry, outputs, errors.

Knows nothing of torch, models, schedulers or text. Every room may import from here. This room imports only the
standard library, msgspec and numpy.
"""
