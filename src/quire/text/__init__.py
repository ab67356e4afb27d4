"""Text in, text out: tokenizers, incremental detokenization, stop strings, chat templates, a model's own defaults.

Knows token ids, strings and the small JSON files of a checkpoint folder. Knows nothing of requests in flight, slots,
devices or torch; the engine core never sees text, and this room never sees the engine.
"""
