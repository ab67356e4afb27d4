"""Rows of the table of what works with what, by theme, and the words that they are made of.

Knows options, sizes and model arguments. Knows no plan of an engine: the rows decide whether one can be made.
"""
