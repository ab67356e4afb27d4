"""Process boundaries: between engine core and worker, and between front end and engine core.

Knows the contracts and the worker. Decides nothing about requests.
"""
