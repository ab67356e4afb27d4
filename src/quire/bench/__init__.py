"""Benchmarks: the workloads, the model configurations and the result format that all compared engines share.

`tools/peer` in the repository runs them on other engines. Knows nothing of an engine's internals. Of the product only
`entry/cli` imports it.
"""
