"""Backward: what tapes are told of branches and loops on the device, and what they are given back for those.

Each result is recorded by itself, with the arguments that it has a gradient for: so there is none, and not a zero,
where eager TensorFlow has none.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any, NamedTuple

import tensorflow as tf

from coexec.runtime.structures import issue
from coexec.staging.adjoints import Adjoint
from coexec.staging.gradients import Gradient, input_of, unwatched
from coexec.staging.lookups import Held
from coexec.staging.reach import recursion_of
from coexec.staging.unwinding import Unwinding
from tracer.block import CALL, STRUCTURES, Again, Block, Branch, Recursion
from tracer.errors import Refused
from tracer.intercept import current_handler, flat_outputs, tape_is_empty
from tracer.lazy import unwrap
from tracer.op import signature_of
from tracer.private import context, op_def_library, pywrap_tfe, record


def record_reads(arguments: list[Any], given: list[Any]) -> None:
    """Tells tapes of the variables that have been read for a branch or loop."""
    for held, value in zip(arguments, given, strict=True):
        if type(held) is Held:
            if held.variable.trainable:
                pywrap_tfe.TFE_Py_TapeVariableAccessed(held.variable)
            record.record_operation("ReadVariableOp", [value], [held.handle], lambda back: [back], lambda to: [to])


def record_branch(run: Any, gradients: list[Gradient], given: list[Any], results: Any) -> None:
    """Tells tapes of a branch."""
    for gradient, result in zip(gradients, results, strict=True):
        if gradient.connected:
            inputs = [given[k] for k in gradient.connected]
            record.record_operation("Branch", [result], inputs, backward_of(run, gradient, given))


def backward_of(run: Any, gradient: Gradient, given: list[Any]) -> Any:
    """Returns what gives a tape what goes back for the arguments that a result has a gradient for."""

    def backward(back: Any) -> list[Any]:
        arguments = [*given, tf.convert_to_tensor(back)]
        if _is_free(run):
            try:
                specs = [gradient.block.arguments[k] for k in gradient.connected]
                return issue(run, CALL, ("structure", gradient.block), arguments, specs)
            except Refused:
                pass
        return _again(gradient.block, arguments)

    return backward


class Saved(NamedTuple):
    """What a loop has left for the way back through it."""

    given: list[Any]
    turns: int
    turned: Any  # the same as a tensor
    rows: list[Any]  # what states were before each turn
    room: int  # for how many turns they have room


def record_loop(run: Any, adjoint: Adjoint, states: list[Any], saved: Saved) -> None:
    """Tells tapes of a loop: each of its states by itself, with those of its inputs that may have a gradient for it.

    Constants that nobody watches are left out: what goes back for them would be added up for nothing.
    """
    for n in adjoint.order:
        tensors = {p: saved.given[p] if p >= 0 else states[-1 - p] for p in adjoint.connected(n, saved.turns)}
        wanted = tuple([p for p, v in tensors.items() if p in adjoint.numbers or record.should_record_backprop([v])])
        if wanted:
            backward = _through(run, adjoint, n, states, saved, wanted)
            record.record_operation("Loop", [states[n]], [tensors[p] for p in wanted], backward)


def _through(run: Any, adjoint: Adjoint, n: int, states: list[Any], saved: Saved, wanted: tuple[int, ...]) -> Any:
    after = list(states)

    def backward(back: Any) -> list[Any]:
        back = tf.convert_to_tensor(back)
        if _is_free(run):
            try:
                block = adjoint.back(n, saved.turns, saved.room, wanted)
                constants, behind = [saved.given[p] for p in adjoint.constants], [after[m] for m in adjoint.cuts[n]]
                arguments = [*constants, *behind, *saved.rows, saved.turned, back]
                return issue(run, CALL, ("structure", block), arguments, [adjoint.spec_of(p) for p in wanted])
            except Refused:
                pass
        return adjoint.again(n, saved.turns, saved.given, after, back, wanted, _again)

    return backward


def record_unwinding(run: Any, unwinding: Unwinding, given: list[Any], results: list[Any]) -> None:
    """Tells tapes of a block in which functions call themselves, with what it has told of its gradients."""
    *told, packed = results[len(unwinding.block.results) :]
    missing = {pair for pair, flag in zip(unwinding.asked, told, strict=True) if not flag.truth()}
    for n in unwinding.backs:
        wanted = [k for k in unwinding.arguments(n) if (n, k) not in missing]
        if wanted:
            backward = _unwound(run, unwinding, n, wanted, given, packed)
            record.record_operation("Branch", [results[n]], [given[k] for k in wanted], backward)


def _unwound(run: Any, unwinding: Unwinding, n: int, wanted: list[int], given: list[Any], packed: Any) -> Any:
    def backward(back: Any) -> list[Any]:
        back = tf.convert_to_tensor(back)
        places = unwinding.arguments(n)
        if _is_free(run):
            try:
                specs = [unwinding.block.arguments[k] for k in places]
                part = ("structure", unwinding.backs[n])
                found = issue(run, CALL, part, [*given, packed, back], specs)
                return [found[places.index(k)] for k in wanted]
            except Refused:
                pass

        # What asks otherwise, and may ask for more, gets the calls once more, one by one, on a tape.
        def forward() -> Any:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                inputs = {k: tf.identity(given[k]) for k in wanted}  # of which several may be one tensor
                tape.watch(list(inputs.values()))
                result = _again(unwinding.block, [inputs.get(k, v) for k, v in enumerate(given)])[n]
            return tape, result, list(inputs.values())

        tape, *found = forward() if context.executing_eagerly() else unwatched(forward)  # a jacobian traces this
        return list(tape.gradient(*found, output_gradients=back))

    return backward


def _is_free(run: Any) -> bool:
    """Whether what goes back may be an operation of the call: it is still followed, and nobody records it."""
    return context.executing_eagerly() and run.recorder is None and current_handler() is run and tape_is_empty()


def _again(block: Block, given: list[Any]) -> list[Any]:
    """Issues a block's operations one by one, for whoever records or follows them; Python decides."""
    running: list[_Walk] = [_walked(block, given)]
    found: list[Any] | None = None
    while True:  # a function may call itself more often than Python's own may be inside of each other
        try:
            running.append(_walked(*running[-1].send(found)))
            found = None
        except StopIteration as stopped:
            running.pop()
            found = stopped.value
            if not running:
                return list(found or [])


_Walk = Generator[tuple[Any, list[Any]], Any, list[Any]]


def _walked(block: Block, given: list[Any]) -> _Walk:
    """Does so; gives each block inside of it, with its arguments, to get its results; returns the block's."""
    values: dict[int, Any] = {-1 - n: v for n, v in enumerate(given)}
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
                outputs = flat_outputs(tf.cond(condition, *(functools.partial(_again, *way) for way in ways)))
            else:
                outputs = yield ways[0] if condition else ways[1]
        elif isinstance(part, (Recursion, Again)):
            outputs = yield recursion_of(part).block, inputs
        else:
            outputs = flat_outputs(_issued(step, inputs))
        for n, tensor in enumerate(outputs):
            values[step.first + n] = tensor
    return [values[r] if isinstance(r, int) else tf.constant(r[0].value, r[1].dtype) for r in block.results]


def _issued(step: Any, inputs: list[Any]) -> Any:
    if context.executing_eagerly():
        run = pywrap_tfe.TFE_Py_FastPathExecute  # as it is now: hooked, perhaps
        return run(context.context(), step.op, None, *inputs, *step.attrs)
    signature = signature_of(step.op)  # a jacobian traces what it asks often
    assert signature is not None
    attrs = dict(zip(step.attrs[::2], step.attrs[1::2], strict=True))
    given = dict(zip(signature.inputs, unwrap(inputs), strict=True))
    return op_def_library.apply_op(step.op, **given, **attrs)
