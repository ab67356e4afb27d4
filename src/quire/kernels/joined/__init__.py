"""Kernels that do the work of several operations in one launch, for steps of few rows on a GPU.

    decode_attention   `heads.prepare`, then `attention.paged_attention`; in Triton
    decode_clusters    the same for some shapes on Hopper, in CUDA C++
    latent_clusters    `latent.prepare`, then `latent.absorbed`; on Hopper, in CUDA C++

`choice.py` chooses the layers and the numbers of rows for them; a step that does not fit takes the
operations themselves, which are the specification, too.
"""

HEAD_DIMS = (16, 32, 64, 128, 256)  # of `decode_attention`
CLUSTER_DIMS = (64, 128)  # of `decode_clusters`
MOST_ROWS = 16
MOST_DRAFTED, MOST_LANES = 4, 16  # rows of a sequence; times query heads of a KV head: more would not fit registers
