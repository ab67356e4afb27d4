"""Tours of the engine: one token, stop by stop, with the values of a live trace (`quire tour`).

Texts lie in Markdown files beside the code, one for each tour and language. Everything else on a page is read from the
trace, from the plan, or from the source of the function that ran. Of the product, only the command line imports it.
"""
