"""Kernels that do the work of several operations in one launch, for steps of few rows on a GPU.

    decode_attention   `heads.prepare`, then `attention.paged_attention`

`choice.py` chooses the layers and the numbers of rows for them; a step that does not fit takes the
operations themselves, which are the specification, too.
"""

HEAD_DIMS = (16, 32, 64, 128, 256)  # of `decode_attention`
MOST_ROWS = 16
