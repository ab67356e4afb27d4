"""Stored responses of /v1/responses: their store, which several HTTP processes share, and the routes that read them.

Knows nothing of how responses are made.
"""
