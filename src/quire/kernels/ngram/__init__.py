"""N-gram drafts: guess that a text goes on as it did where its last tokens came before (prompt lookup decoding).

propose(step, tables, shortest, longest)
    Writes the drafts of each decode of the step to the token history, behind the known tokens (`Tables.computed` + 1 of
    them). The number of drafts is the decode's number of tokens in the step, less one. A slot that is `Tables.hosted`
    has its drafts already.

    Of the n-grams that end the known tokens, with shortest <= n <= longest, the longest counts that occurs earlier, and
    of its occurrences the earliest (as in vLLM). Drafts are the tokens that follow it. If these reach the end of the
    known tokens, they go on with the drafts themselves: the text repeats with a period. Without an occurrence every
    draft is -1.

`step` and `tables` are those of `quire.kernels.step`. `ref.py` waits for the device. The kernel of `triton.py` can be
captured: its grid is the largest number of sequences.
"""
