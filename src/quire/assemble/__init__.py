"""The composition root: model and weights are found, the plan is made, and an engine is built from it.

`engine.py` has `assemble`. Nothing else builds an engine of parts from several rooms.
"""
