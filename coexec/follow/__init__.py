"""Follow: answers the operations of a running call along its trace graph.

In come operations as the program issues them; out go lazy tensors at once, and segments to launch where a value is
needed. Where the program does something new, what is pending is carried out and a recorder takes over.
"""
