"""Sampling: logits [R, V] float32 and each row's parameters -> one token per row. Rows are not slots here.

    noise      keyed by (seed, position, stream, global vocabulary id); exact integers          noise.py
    edits      masks, bias, penalties, in place, before anything is drawn                       edits.py
    draw       greedy, plain and filtered paths; the same meaning, different cost               draw.py
    order      rows sorted by (value descending, id ascending)                                  order.py
    logprobs   of raw logits                                                                    logprobs.py
    ref        all of it for one row in float64, sorted and slow: the specification             ref.py
    inputs     rows that break things: ties, flat, peaked, masked, tiny vocabularies            inputs.py

Contract of every implementation: a row's token is a function of that row's logits, parameters, history and key alone.
Order: edits, penalties, temperature, min-p, top-k (keeps equals of the k-th), top-p (keeps the shortest sorted prefix
that reaches p, at least one; equals by ascending id), then argmax of value + Gumbel noise, lowest id among equals.
"""
