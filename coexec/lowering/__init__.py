"""Takes the steps of a segment, or the block of a staged loop, branch or recursion.

Gives a `Plan` of what crosses the segment's border, and the TensorFlow function definitions that compute it.
"""
