"""XLA: lowers single operations so that compiled code behaves as their eager kernels do.

Takes operations that XLA would compute, or fail at, differently; emits ones that it computes as the kernels do, and
predicates that are false where a kernel would fail.
"""
