"""The engine: chooses the requests and tokens of the next step, and applies the results.

Bookkeeping on numpy columns. Knows nothing of torch, of text or of how a step is executed.
"""
