"""Takes an emitted function body in which Python loops are unrolled.

Gives the same body with loops in place of the repeated operations, so that XLA compiles each iteration only once.
"""
