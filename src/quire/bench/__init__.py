"""Benchmarks: the workloads, the model configurations and the result format that all compared engines share.

Knows nothing of an engine's internals. Of the product only `entry/cli` imports it.
"""
