"""Graph functions: inlines calls of `tf.function`s without effects, as the operations that they consist of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coexec.base.stats import EventLog, Kind
from coexec.base.tuning import tuning
from coexec.control_flow.trace.check_failures import refuse_failures
from coexec.follow.device_control import FollowedCall
from coexec.follow.synthetic_ops import issue, read
from tracer.block import CALL
from tracer.errors import Refused
from tracer.functions import Call, take_apart
from tracer.lazy import LazyTensor
from tracer.location import place_of
from tracer.op import plain_name, signature_of
from tracer.private import EagerTensor
from tracer.spec import Spec, spec_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coexec.control_flow.program_types import Tensor


class GraphFunctions:
    """The graph functions that one co-executed function calls."""

    def __init__(self, ledger: EventLog) -> None:
        self.ledger = ledger
        self._known: dict[tuple[str, tuple[Spec, ...]], Call | None] = {}

    def call(self, run: FollowedCall, op: str | bytes, inputs: Sequence[Tensor]) -> list[LazyTensor] | None:
        """Issues a graph function's operations as part of a followed call; None if it must run on its own."""
        name = op.decode() if isinstance(op, bytes) else op
        if signature_of(name) is not None or not all(isinstance(v, EagerTensor) for v in inputs):
            return None
        key = name, tuple(map(spec_of, inputs))
        if key not in self._known:
            if len(self._known) >= tuning.max_functions:
                self._known.clear()
            self._known[key] = self._taken_apart(*key)
        found = self._known[key]
        if found is None:
            return None
        try:
            arguments = zip(found.sources, found.block.arguments, strict=True)
            given = [read(run, inputs[k], spec) if held else inputs[k] for (k, held), spec in arguments]
            return issue(run, CALL, ("structure", found.block), given, list(found.outputs))
        except Refused as refused:
            self.ledger.cause(Kind.CUT, f"{plain_name(name)} runs on its own: {refused}", place_of())
            return None

    def _taken_apart(self, name: str, specs: tuple[Spec, ...]) -> Call | None:
        try:
            found = take_apart(name, specs)
            refuse_failures(found.block, checked=False)  # TensorFlow's errors name the place of tracing
        except (Refused, Exception) as refused:  # anything not understood runs as TensorFlow runs it
            self.ledger.cause(Kind.CUT, f"{plain_name(name)} runs on its own: {refused}", place_of())
            return None
        return found
