"""Takes single operations that XLA would compute, or fail at, differently from their eager kernels.

Gives operations that XLA computes as the kernels do, and predicates that are false where a kernel would fail.
"""
