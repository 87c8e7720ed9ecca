"""Tape records: records branches and loops that ran on the device on tapes, and computes their cotangents.

Each result is recorded separately, with the arguments that it has a gradient for: so where eager TensorFlow has no
gradient there is None, not zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from coexec.control_flow.grad.block_vjp import BlockVjp, input_of
from coexec.control_flow.grad.loop_vjp import LoopVjp
from coexec.control_flow.trace.read_guards import VariableRead
from coexec.follow.device_control import FollowedCall
from coexec.follow.synthetic_ops import issue
from tracer.block import CALL, STRUCTURES, Block, Branch, RecursiveCall, RecursiveFunction, recursion_of
from tracer.errors import Refused
from tracer.intercept import current_handler, flat_outputs, tape_is_empty
from tracer.lazy import unwrap
from tracer.op import signature_of
from tracer.private import context, op_def_library, pywrap_tfe, record
from tracer.spec import Spec
from tracer.variables import notify_watchers

if TYPE_CHECKING:
    from coexec.control_flow.grad.block_vjp import Backward
    from coexec.control_flow.program_types import Tensor, Value
    from tracer.graph import Step
    from tracer.lazy import LazyTensor


def record_reads(arguments: list[Value], given: list[Tensor]) -> None:
    """Records on tapes the variable reads of a branch or loop."""
    for held, value in zip(arguments, given, strict=True):
        if type(held) is VariableRead:
            if held.variable.trainable:
                pywrap_tfe.TFE_Py_TapeVariableAccessed(held.variable)
            record.record_operation("ReadVariableOp", [value], [held.handle], lambda back: [back], lambda to: [to])


def notify_of_reads(arguments: list[Value]) -> None:
    """Notifies watchers of the variables that a branch or loop reads."""
    notify_watchers([v.variable for v in arguments if type(v) is VariableRead and v.variable.trainable])


class BranchVjp:
    """Records a block on tapes, given the gradients of its results; records nothing if there are none."""

    def __init__(self, block: Block, vjps: list[BlockVjp]) -> None:
        self.forward = block  # the block to run
        self.more: list[Spec] = []  # specs of its further results, for `record`
        self._vjps = vjps

    def record(self, run: FollowedCall, given: list[Tensor], results: list[Tensor]) -> None:
        """Records the block on tapes, with these arguments and results."""
        for vjp, result in zip(self._vjps, results, strict=False):
            if vjp.connected:
                inputs = [given[k] for k in vjp.connected]
                record.record_operation("Branch", [result], inputs, backward_of(run, vjp, given))


def backward_of(run: FollowedCall, gradient: BlockVjp, given: list[Tensor]) -> Backward:
    """Returns the backward function of a result: it computes the cotangents of the arguments in `connected`."""

    def backward(back: Tensor) -> list[Tensor]:
        arguments = [*given, tf.convert_to_tensor(back)]
        if is_followed(run):
            try:
                specs = [gradient.block.arguments[k] for k in gradient.connected]
                return issue(run, CALL, ("structure", gradient.block), arguments, specs)
            except Refused:
                pass
        return issue_again(gradient.block, arguments)

    return backward


class SavedStates(NamedTuple):
    """The residuals of a loop: what its backward pass needs."""

    given: list[Tensor]
    turns: int
    turned: LazyTensor  # the same as a tensor
    rows: list[Tensor]  # states before each iteration
    room: int  # the number of iterations that they have room for


def record_loop(run: FollowedCall, vjp: LoopVjp, states: list[Tensor], saved: SavedStates) -> None:
    """Records a loop on tapes: each state separately, with those inputs that may get a gradient from it.

    Constants that no tape watches are left out, as nothing would use their cotangents.
    """
    for n in vjp.order:
        tensors = {p: saved.given[p] if p >= 0 else states[-1 - p] for p in vjp.connected(n, saved.turns)}
        wanted = tuple([p for p, v in tensors.items() if p in vjp.numbers or record.should_record_backprop([v])])
        if wanted:
            backward = _through(run, vjp, n, states, saved, wanted)
            record.record_operation("Loop", [states[n]], [tensors[p] for p in wanted], backward)


def _through(
    run: FollowedCall, vjp: LoopVjp, n: int, states: list[Tensor], saved: SavedStates, wanted: tuple[int, ...]
) -> Backward:
    """Returns the backward function of state `n`: it maps its cotangent to the `wanted` ones."""
    after = list(states)

    def backward(back: Tensor) -> list[Tensor]:
        back = tf.convert_to_tensor(back)
        if is_followed(run):
            try:
                block = vjp.back(n, saved.turns, saved.room, wanted)
                constants, behind = [saved.given[p] for p in vjp.constants], [after[m] for m in vjp.cuts[n]]
                arguments = [*constants, *behind, *saved.rows, saved.turned, back]
                return issue(run, CALL, ("structure", block), arguments, [vjp.spec_of(p) for p in wanted])
            except Refused:
                pass
        return vjp.again(n, saved.turns, saved.given, after, back, wanted, issue_again)

    return backward


def is_followed(run: FollowedCall) -> bool:
    """Whether cotangents may be computed by an operation of the call: it is followed, and no tape records them."""
    handler: object = current_handler()
    return context.executing_eagerly() and run.recorder is None and handler is run and tape_is_empty()


def issue_again(block: Block, given: list[Tensor]) -> list[Tensor]:
    """Issues a block's operations one by one, for the current handler or tape; Python decides its branches."""
    running: list[_Walk] = [_walked(block, given)]
    found: list[Tensor] | None = None
    while True:  # recursion may be deeper than Python's stack allows
        try:
            running.append(_walked(*running[-1].send(found)))  # type: ignore[arg-type]  # None to start it
            found = None
        except StopIteration as stopped:
            running.pop()
            found = stopped.value
            if not running:
                return list(found or [])


_Walk = Generator[tuple[Block, list["Tensor"]], list["Tensor"], list["Tensor"]]


def _walked(block: Block, given: list[Tensor]) -> _Walk:
    """Does so as a generator: yields each inner block with its arguments, and receives its results."""
    values: dict[int, Tensor] = {-1 - n: v for n, v in enumerate(given)}
    for step in block.steps:
        inputs = [input_of(step, i, slot, values) for i, slot in enumerate(step.slots)]
        part = step.attrs[1] if step.op in STRUCTURES else None
        if isinstance(part, Branch):
            condition, *others = inputs
            ways = [
                (way, [others[k] for k in places])
                for way, places in ((part.then, part.then_inputs), (part.other, part.other_inputs))
            ]
            if tf.is_symbolic_tensor(condition):
                outputs = flat_outputs(tf.cond(condition, *(functools.partial(issue_again, *way) for way in ways)))
            else:
                outputs = yield ways[0] if condition else ways[1]
        elif isinstance(part, (RecursiveFunction, RecursiveCall)):
            outputs = yield recursion_of(part).block, inputs  # type: ignore[misc]  # traced by now
        else:
            outputs = flat_outputs(_issued(step, inputs))
        for n, tensor in enumerate(outputs):
            values[step.first + n] = tensor
    return [values[r] if isinstance(r, int) else tf.constant(r[0].value, r[1].dtype) for r in block.results]


def _issued(step: Step, inputs: list[Value]) -> Value:
    if context.executing_eagerly():
        run = pywrap_tfe.TFE_Py_FastPathExecute  # looked up each time: it may be hooked
        return run(context.context(), step.op, None, *inputs, *step.attrs)
    signature = signature_of(step.op)  # in a graph: a Jacobian traces its function
    assert signature is not None
    attrs = dict(zip(step.attrs[::2], step.attrs[1::2], strict=True))
    given = dict(zip(signature.inputs, unwrap(inputs), strict=True))
    return op_def_library.apply_op(step.op, **given, **attrs)
