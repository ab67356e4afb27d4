"""Process boundaries: how plans reach workers, and how a front end reaches the core.

Knows the contracts and the worker; decides nothing about requests.
"""
