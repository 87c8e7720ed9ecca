"""Host operations, which run on their own: which of them need not wait for what is pending."""

from __future__ import annotations

import functools

from tracer.op import signature_of
from tracer.seeds import DRAWING

# Makes what Python goes on to hold, and what only later operations fill. If a pending operation fails, those never run:
# the program would be left with a variable that has no value, where eagerly it has the one before.
MAKES_VARIABLE = "VarHandleOp"

# Declared stateful, but none of the operations that segments contain can tell whether it has run, nor can it tell
# whether those have: it makes a variable that nobody else knows yet, or reads what only operations on their own write.
_APART = frozenset({"Empty", "LookupTableFindV2", "LookupTableSizeV2", MAKES_VARIABLE})

# Declared stateless, though they run Python.
_PYTHON = frozenset({"PyFuncStateless"})


@functools.cache
def is_apart(op: str) -> bool:
    """Returns whether an operation may run before pending ones, if its inputs are known: no one could tell.

    If it fails, pending operations have to be carried out before its error surfaces.
    """
    if op in DRAWING or op in _APART:
        return True
    signature = signature_of(op)
    if signature is None or signature.stateful or op in _PYTHON:
        return False
    return not any(attr.type in ("func", "list(func)") for attr in signature.definition.attr)
