"""Launch: carries out segments.

In comes a segment with this call's values; out come real tensors, from a compiled executable where there is one that
was found to agree with the operations, else from the operations one by one.
"""
