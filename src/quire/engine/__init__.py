"""The brain: which tokens of which requests run in the next step, and what becomes of the results.

Plain bookkeeping on numpy columns; knows nothing of torch, of text or of how a step is executed.
"""
