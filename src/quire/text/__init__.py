"""Text: tokenizers, incremental detokenization, stop strings, chat templates, tool formats, a model's defaults.

Knows token ids, strings and the small JSON files of a checkpoint folder. Knows nothing of requests in flight, slots,
devices or torch. The engine core never sees text, and this room never sees the engine.
"""
