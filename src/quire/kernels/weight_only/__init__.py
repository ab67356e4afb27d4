"""Products of 16-bit activations and weights of 4 and 8 bits, for the kernels of linear layers and of experts.

    tiles   any NVIDIA GPU, in Triton: weights in tiles of 64 outputs
    words   Hopper, in Gluon: weights in words, in the order of the tensor cores' operand; bits: from words to numbers

    pairs_in_tiles, pairs_in_words   the same for experts: the pairs (token, chosen expert) of one expert each
    pairs_alone                      experts of few tokens, in Triton: weights in words, each pair by itself

Activations are never quantized. The rooms `linear` and `experts` know which weights run here.
"""
