"""`quire verify`: step by step against Hugging Face's implementation.

parity.py       the comparison, from a folder to a report
steps.py        records the steps of our layers (recording.py); step_kinds/ has them by kind of layer
reference.py    the same steps by transformers; differences.py compares two results
parameters.py   compares stored parameters; dequantized.py writes the reference of a quantized checkpoint
verdict.py      the first step that differs, and the report
"""
