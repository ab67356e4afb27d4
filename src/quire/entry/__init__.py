"""Entry points for users: the offline classes, the command line, the HTTP server.

Knows prompts, texts and outputs. The engine core behind it sees only token ids.
"""
