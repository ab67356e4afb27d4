"""Drafters of speculative decoding: cheap guesses of the next tokens, which the model verifies in one step.

Knows the tables of the running requests; knows nothing of plans, sampling or acceptance. A drafter decides how fast
requests are answered, never what the answer is.
"""
