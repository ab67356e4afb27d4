"""Speed, measured: the workloads, the model configurations and the result format that every compared engine shares.

Knows nothing of how an engine works inside; of the product only `entry/cli` imports it.
"""
