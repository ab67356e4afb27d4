"""A plan as plain values, for `quire explain`, /debug/plan and the banner: of an engine, its model, memory and ranks.

No torch.
"""
