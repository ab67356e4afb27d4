"""Kernels in which the bits of a row depend on that row alone (`--batch-invariant`, feature "fixed order").

A row is a token with its context. Its bits do not depend on the other rows of a step, on the chunk of the prompt that
brings it, or on a prefix that was found in the cache: a token that is computed again has the same bits. So each sum has
one order, whatever the number of rows:

    products    over all inputs in order, in one chain for each output
    attention   over parts of the context that begin at fixed positions, added up in the order of positions
    norms       within the row
    experts     the experts of a token in the order of its choice

Only the division of rows among programs and threads may vary. Kernels that have this property anyway declare the
feature in their own rooms; here are those that would choose another order for the sake of speed.
"""
