"""Traces: a request, a start, a tensor or a flag, followed through the engine by functions and files.

May look into every room. Of the product, only the command line imports it.
"""
