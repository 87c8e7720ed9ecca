"""Batching: a call's operations come in, one by one; those of a kind at a depth go out together, as one operation each.

For functions whose every call takes another way, through the same operations.
"""

from coexec.batching.batched_calls import BatchedCalls

__all__ = ["BatchedCalls"]
