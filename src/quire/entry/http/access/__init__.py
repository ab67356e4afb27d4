"""Access to a server: API keys, their names and limits, and refusals before the routes.

Knows headers and paths; knows nothing of what the routes do.
"""
