"""Failures: refuses traced operations that may fail in a way that no check predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coexec.lowering.op_failures import can_fail, differs, needs_check
from tracer.block import CALL, LOOP, STRUCTURES, Block, RecursiveFunction, blocks_of
from tracer.errors import Refused
from tracer.graph import Step

if TYPE_CHECKING:
    from tracer.op import Structure


def refuse_failures(part: Structure, checked: bool = True) -> None:
    """Refuses a part with operations that may fail; if `checked`, except those whose failure a check predicts.

    A recursive function is always `checked`: if a check in it fails, all of its calls are left to Python.
    """
    step = Step(None, CALL if isinstance(part, (Block, RecursiveFunction)) else LOOP, None, None, (), {}, {}, ())
    step.attrs = ("structure", part)
    ahead = [inner for block in blocks_of(step) for inner in block.steps]
    while ahead:
        inner = ahead.pop()
        if inner.op in STRUCTURES:
            if isinstance(inner.attrs[1], RecursiveFunction):
                refuse_failures(inner.attrs[1])
            else:
                ahead += [s for block in blocks_of(inner) for s in block.steps]
            continue
        if difference := differs(inner.op or ""):
            raise Refused(f"{inner.op} {difference}")
        if can_fail(inner) and not (checked and needs_check(inner)):
            raise Refused(f"{inner.op} may fail on some values")
