"""Answers: grammars that force the form of an answer, and parsers of its reasoning, content and calls.

Knows strings, token ids and the formats in `text`. Knows nothing of HTTP, of requests in flight, of devices or torch.
"""
