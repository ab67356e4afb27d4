"""What the engine does and whether it is right, as values: for people, tests and bug reports.

May look into every room; nothing of the product but the command line imports it.
"""
