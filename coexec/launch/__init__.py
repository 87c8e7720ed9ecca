"""Launch: executes segments.

Takes a segment with this call's values and computes real tensors: by a compiled executable where there is one that was
validated against its operations, else by running the operations one by one.
"""
