"""Lowering: turns segments into TensorFlow functions.

Takes the steps of a segment, or the block of a staged loop, branch or recursion; returns a `Plan` of what crosses the
segment's border, and the function definitions that compute it.
"""
