"""Sums over the bytes of stored tensors, by which engines know that they have the same weights.

A tensor has two sums modulo 2**64, S_0 and S_1. Byte b at offset o of the tensor adds to S_t

    b * 256**(o % 4) * A_t[o // 4 % 1024] * B_t(o // 4096)

    A_t      1024 fixed numbers below 2**32
    B_t(n)   odd numbers of 64 bits that follow from key t of the tensor: mix(key_t + n * GOLDEN) | 1

Every byte adds by its own offset, so the sums of slices add up to those of the tensor, whatever the cut. Four bytes are
a word w, which adds w * A * B. A changed word always changes both sums. Weights that differ in several words, or in the
order of rows, have the same two sums with a probability of about 2**-56: A mod-2**64 product loses the low bits of
its factors, which costs a few bits of each sum. The sums are not cryptographic: their numbers are public, and whoever
wants to can write weights with given sums. `mix` is the finalizer of SplitMix64 (Steele et al., 2014).

    ref.py      numpy, in host memory
    native.c    C, in host memory
    triton.py   Triton, in the memory of a GPU

A span is a run of bytes of a slice. The slice is described by a row of five int64:

    base     offset in the tensor of the slice's first byte
    length   bytes of the slice's runs: all of a slice of rows; of a slice of columns those of a row
    stride   bytes of the tensor from run to run
    key_0, key_1
"""
