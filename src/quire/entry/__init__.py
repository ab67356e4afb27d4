"""Where users come in: the offline classes, the command line, later HTTP.

Knows prompts, texts and outputs; the engine core behind it sees only token ids.
"""
