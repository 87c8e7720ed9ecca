"""ShowPlan: prints the operations of a segment as text, with feeds and results by number, as the trace graph prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tracer.graph import CONST, LIST, Step
from tracer.spec import Spec


def lines_of(steps: Sequence[Step], feeds: Sequence[Spec], outputs: Sequence[int]) -> Iterator[str]:
    """Yields a line for each feed, source line and operation, and one for what comes out.

    `%3` is a tensor of the segment, by its number.
    """
    yield from (f"  feed {n}: {spec!r}" for n, spec in enumerate(feeds))
    place = ""
    for step in steps:
        if (here := str(step.frames[0]) if step.frames else "") != place:
            place = here
            yield f"  # {place}"
        made = ", ".join(f"%{step.first + n}" for n in range(len(step.outputs)))
        specs = ", ".join(
            repr(out.spec) if out.const is None else f"{out.spec!r}={_value(out.const.value)}" for out in step.outputs
        )
        yield f"  {made}{' = ' if made else ''}{step.op}({_inputs(step)})" + (f" -> {specs}" if specs else "")
    yield f"  gives {', '.join(f'%{n}' for n in outputs) or 'nothing'}"


def _inputs(step: Step) -> str:
    """Returns the text of a step's inputs: `%3` a tensor of the segment, `feed 1`, or a constant."""

    def written(slot: int, constant: Any) -> str:
        if slot >= 0:
            return f"%{slot}"
        return _value(constant.value) if constant is not None else f"feed {-1 - slot}"

    def item(n: int, slot: int) -> str:
        if slot == LIST:
            slots, constants = step.lists[n]
            return f"[{', '.join(written(s, constants.get(k)) for k, s in enumerate(slots))}]"
        return written(slot, step.consts.get(n) if slot == CONST else None)

    return ", ".join(item(n, slot) for n, slot in enumerate(step.slots))


def _value(value: Any) -> str:
    """Returns the text of a constant; large ones as dtype and shape."""
    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.tolist()) if value.size <= 8 else f"<{value.dtype}{list(value.shape)}>"
    return repr(value)
