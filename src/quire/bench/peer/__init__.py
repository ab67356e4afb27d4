"""The engines Quire is compared with (peers): their installation, runs on our workloads, and their results.

The scripts run in a peer's own environment, which need not have Quire's dependencies.
"""
