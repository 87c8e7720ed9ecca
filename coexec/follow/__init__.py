"""Follow: matches the operations of a running call with its trace graph.

Takes operations as the program issues them; returns lazy tensors at once, and launches segments where a value is
needed. On a divergence, pending operations are run and a recorder takes over.
"""
