"""Attention on a CPU: plans of a step, and C kernels. `quire.kernels.attention` has the contract and the entry modules.

plan.py           calls of PyTorch's flash kernel (`attention/cpu.py`), and the chunks of prompts
native_plan.py    arguments of the C kernels in a step (`attention/native.py`)
native_calls.py   checks a layer's tensors and calls the C kernels
rows.c            single rows: decodes, and the few rows of short chunks
chunks.c          chunks of prompts on AMX tiles
prompts.c         chunks of prompts on vectors
"""
