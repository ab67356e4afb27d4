"""The engine Quire is compared with: how to install it, run it on our workloads, and what it reached.

Runs in an environment of its own that has the peer and need not have Quire's dependencies.
"""
