"""Recursion records: records blocks with recursive calls on tapes, and computes their cotangents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from coexec.control_flow.grad.block_vjp import refuse_hidden, unwatched
from coexec.control_flow.grad.tape_records import is_followed, issue_again
from coexec.control_flow.recursion.recursion_vjp import RecursionVjp
from coexec.follow.device_control import FollowedCall
from coexec.follow.synthetic_ops import issue
from coexec.lowering.op_failures import differs
from tracer.block import CALL, FLAG, PACKED, Block, steps_of
from tracer.errors import Refused
from tracer.private import context, record

if TYPE_CHECKING:
    from coexec.control_flow.grad.block_vjp import Backward
    from coexec.control_flow.program_types import Tensor, Value
    from tracer.lazy import LazyTensor


class RecursionRecorder:
    """Records a block on tapes that watch these of its arguments; raises `Refused` if it has no VJP."""

    def __init__(self, block: Block, watched: tuple[int, ...]) -> None:
        if tf.config.list_physical_devices("GPU"):  # TensorFlow has no GPU kernels for what each call packs
            raise Refused("a function in it calls itself, and there is a GPU")
        refuse_hidden(block)
        self._vjp = RecursionVjp(block, watched)
        for step in self._vjp.steps:
            for inner in (step, *steps_of(step)):
                if difference := differs(inner.op or ""):
                    raise Refused(f"{inner.op} {difference}")
        self.forward = self._vjp.forward  # the block to run
        self.more = [*(FLAG for _ in self._vjp.asked), PACKED]  # specs of its further results, for `record`

    def record(self, run: FollowedCall, given: list[Tensor], results: list[LazyTensor]) -> None:
        """Records the block on tapes, with these arguments and results."""
        vjp = self._vjp
        *told, packed = results[len(vjp.block.results) :]
        missing = {pair for pair, flag in zip(vjp.asked, told, strict=True) if not flag.truth()}
        for n in vjp.backs:
            wanted = [k for k in vjp.arguments(n) if (n, k) not in missing]
            if wanted:
                backward = _backward(run, vjp, n, wanted, given, packed)
                record.record_operation("Branch", [results[n]], [given[k] for k in wanted], backward)


def _backward(
    run: FollowedCall, vjp: RecursionVjp, n: int, wanted: list[int], given: list[Tensor], packed: LazyTensor
) -> Backward:
    def backward(back: Tensor) -> list[Tensor]:
        back = tf.convert_to_tensor(back)
        places = vjp.arguments(n)
        if is_followed(run):
            try:
                specs = [vjp.block.arguments[k] for k in places]
                part = ("structure", vjp.backs[n])
                found = issue(run, CALL, part, [*given, packed, back], specs)
                return [found[places.index(k)] for k in wanted]
            except Refused:
                pass

        # Otherwise, for example if a tape records this, the calls are rerun one by one, under a tape of their own.
        def forward() -> tuple[Value, ...]:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                inputs = {k: tf.identity(given[k]) for k in wanted}  # several arguments may be one tensor
                tape.watch(list(inputs.values()))
                result = issue_again(vjp.block, [inputs.get(k, v) for k, v in enumerate(given)])[n]
            return tape, result, list(inputs.values())

        tape, *found = forward() if context.executing_eagerly() else unwatched(forward)  # a Jacobian traces this
        return list(tape.gradient(*found, output_gradients=back))

    return backward
