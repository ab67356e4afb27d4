"""The processes of an engine's ranks: where they start, on one host or several, how they are watched, what they say.

Knows sockets, processes and hosts. Knows nothing of models; `assemble` says what a rank builds.
"""
