"""Descriptions of the engine and checks of its results, as values: for people, tests and bug reports.

May look into every room. Of the product, only the command line imports it.
"""
