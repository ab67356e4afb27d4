"""Every choice of an engine, as values: placement, memory, formats, kernels, experts, drafts, tiers, collectives.

Pure functions of arguments, options and facts of the machine. No torch. `engine.py` makes the `EnginePlan`,
`holdings.py` tells what each rank holds.
"""
