"""What crosses between rooms: requests, step records, block geometry, outputs, errors and protocols.

Knows nothing of torch, models, schedulers or text. Everything else may import from here; it imports only the
standard library, msgspec and numpy.
"""
