"""Replay: a segment's operations, run one by one as the eager program would have run them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from coexec.compile.executable import Alone
from coexec.launch.assertion import fail
from coexec.launch.keras_error_context import note_of
from coexec.launch.segment import PendingSegment
from coexec.lowering.op_failures import ASSERTION
from coexec.lowering.plan import recurses
from coexec.lowering.xla.philox import PHILOX, STATELESS, words_of
from tracer.block import BRANCH, CALL, STRUCTURES, Block
from tracer.callees import Callee
from tracer.graph import CONST, LIST, Step, spec_of_constant
from tracer.inputs import python_spec
from tracer.intercept import flat_outputs, handling, make_constant, run_execute
from tracer.lazy import eager_constant
from tracer.location import raise_at
from tracer.op import Const, signature_of
from tracer.private import EagerTensor, context, core, record
from tracer.seeds import Pair, join
from tracer.single_kernels import execute_alone, fast_execute, fast_execute_alone
from tracer.sizes import const_at, settled
from tracer.slow_path import named
from tracer.spec import intern_spec

# Maps an operation's inputs and results to other results.
Changed: TypeAlias = Callable[[Step, list[Any], list[Any]], list[Any]]


def replay(pending: PendingSegment, seeds: list[Pair], changed: Changed | None = None) -> None:
    """Runs a segment's operations in order, and sets the values of its lazy tensors that are still referenced.

    A failing operation raises what it raises eagerly, and `pending.at` is its step: earlier ones have run, later ones
    have not. With `changed`, later operations see the results that it returns in place of an operation's own.
    """
    values, raw = pending.values, pending.raw
    real = pending.real = pending.real or [None] * len(values)
    with handling(None), record.stop_recording():
        if raw:  # a fault of the runtime came after it
            assert pending.at is not None
            _give(pending, pending.at, flat_outputs(raw[0]))
        steps, said = pending.reaching(), (pending.assertions, pending.notes)
        for step, inputs, tensors in _run(steps, pending.feeds, seeds, real, *said, raw):
            if changed is not None:
                tensors = changed(step, inputs, tensors)
            _give(pending, step, tensors)
    pending.finished = True


def _give(pending: PendingSegment, step: Step, tensors: list[Any]) -> None:
    """Stores an operation's results in `pending.real` and in the lazy tensors that wait for them."""
    values, real, first = pending.values, pending.real, step.first
    for n, tensor in enumerate(tensors):
        real[first + n] = tensor
        lazy = values[first + n]
        if lazy is not None:
            lazy._value = tensor
    pending.done = step.depth
    pending.raw.clear()


def _run(
    steps: Iterable[Step], feeds: list[Any], seeds: list[Pair], real: list[Any], said: dict[Step, Any],
    notes: dict[Step, Any], raw: list[Any],
) -> Iterator[tuple[Step, list[Any], list[Any]]]:  # fmt: skip
    """Runs the steps in order, stores results in `real`, and yields them with the inputs; skips folded operations.

    `said`, `notes`: this call's assertions and Keras notes, where they differ from those kept with the steps.
    An operation's result is in `raw` as soon as it has run.
    """
    ctx = context.context()
    for step in steps:
        assert step.op is not None
        assert step.node is not None
        if step.variant is None:  # it has run already
            continue
        if step.variant.folded:
            for n, output in enumerate(step.outputs):
                out = settled(output, feeds)
                assert out.const is not None
                real[step.first + n] = eager_constant(out.const.value, out.spec)
            continue
        inputs = [_input(step, i, slot, real, feeds) for i, slot in enumerate(step.slots)]
        if step.op == ASSERTION:
            if not inputs[0]:
                fail(said.get(step, step.assertion), real, feeds, step.node.location, note_of(step, notes))
            yield step, inputs, []
            continue
        try:
            if step.op in STRUCTURES:
                result = _run_structure(step, inputs)
            elif step.seeded:
                result = _draw(step, _made(inputs), seeds[step.draws - 1])
            elif step.node.callee is not None:
                result = _call(ctx, step, step.node.callee, inputs)
            elif step.node.entry == "execute":
                given = ctx.device_name, step.op, _made(inputs), step.attrs, len(step.outputs)
                result = run_execute(*given, run=execute_alone)
            else:
                result = _run_fast(ctx, step, inputs, step.attrs)
            raw.append(result)
        except (core._NotOkStatusException, tf.errors.OpError) as error:
            failure: Any = error  # of an operation issued by name
            if isinstance(error, core._NotOkStatusException):
                failure = named(error, step.node.name)
            if step.node.callee is not None:
                step.node.callee.explain(failure)
            note = note_of(step, notes)
            failure = failure if note is None else note.added_to(failure, feeds)
            failure.__suppress_context__ = True
            try:
                raise_at(failure, step.node.location)
            finally:
                del failure  # else its traceback, and so all frames in it, would refer to itself
        step.variant.ran = True
        tensors = flat_outputs(result)
        for n, tensor in enumerate(tensors):
            real[step.first + n] = tensor
        yield step, inputs, tensors


def _call(ctx: Any, step: Step, callee: Callee, inputs: list[Any]) -> list[Any]:
    """Calls a graph function, by its name; returns those of its results that only the call tells."""
    results = run_execute(ctx.device_name, callee.name, inputs, step.attrs[:-2], len(callee.results))
    return [results[number] for number in callee.computed]


def _draw(step: Step, inputs: list[Any], pair: Pair) -> Any:
    """Draws from these seeds what a fresh kernel draws, as it was when the operation was issued.

    TensorFlow caches kernels by their seeds until `tf.random.set_seed`, which may have been called meanwhile: a kernel
    that has drawn since would continue from its own state.
    """
    op = step.op or ""
    enum = step.outputs[0].spec.enum
    words = words_of([pair])
    shape, *bounds = (v if isinstance(v, EagerTensor) else make_constant(v, None) for v in inputs)
    key, counter = (make_constant(part, tf.uint64) for part in (words[:1], words[1:]))
    attrs = () if bounds else ("dtype", enum)
    try:
        return fast_execute_alone(context.context(), STATELESS[op], None, shape, key, counter, PHILOX, *bounds, *attrs)
    except core._NotOkStatusException:  # raise with the operation's own message
        return fast_execute(context.context(), op, None, *inputs, *join(step.attrs, pair))


_alone: weakref.WeakKeyDictionary[Any, Alone] = weakref.WeakKeyDictionary()


def _run_structure(step: Step, inputs: list[Any]) -> list[Any]:
    """Runs a loop, a branch or a function, operation by operation."""
    assert step.variant is not None
    given = [v if isinstance(v, EagerTensor) else make_constant(v, s.dtype)
             for v, s in zip(inputs, step.variant.key, strict=True)]  # fmt: skip
    part = step.attrs[1]
    if step.op == CALL and recurses(step):
        if part not in _alone:
            _alone[part] = Alone(part, step.variant.key)
        return _alone[part].run(given)
    if step.op == CALL:
        return _run_block(part, given)
    if step.op == BRANCH:
        condition, *others = given
        block, places = (part.then, part.then_inputs) if condition else (part.other, part.other_inputs)
        return _run_block(block, [others[k] for k in places])
    turned, (go,) = 0, _run_block(part.test, [given[k] for k in part.test_inputs])
    states = [step.variant.key[part.states[k]] for k in part.saved]
    saved = [np.zeros((part.limit, *spec.shape), spec.dtype.as_numpy_dtype) for spec in states]
    while go and turned < part.limit:
        for rows, k in zip(saved, part.saved, strict=True):
            rows[turned] = given[part.states[k]].numpy()
        try:
            *results, stuck = _run_block(part.body, [given[k] for k in part.body_inputs])
            after = list(given)
            for k, state in zip(part.states, results, strict=True):
                after[k] = state
            (again,) = _run_block(part.test, [after[k] for k in part.test_inputs])
        except tf.errors.OpError:
            if part.whole:
                raise
            break  # Python will reach the error itself, from the state before this iteration
        if stuck:
            break
        given, go, turned = after, again, turned + 1
    kept = [eager_constant(rows, intern_spec(s.enum, rows.shape)) for rows, s in zip(saved, states, strict=True)]
    return [*(given[k] for k in part.states), make_constant(turned, tf.int32), go, *kept]


def _run_block(block: Block, given: list[Any]) -> list[Any]:
    real: list[Any] = [None] * (block.steps[-1].end if block.steps else 0)
    for _ in _run(block.steps, given, [], real, {}, {}, []):
        pass
    return [
        _tensor(r, real, given) if isinstance(r, int) else eager_constant(np.asarray(r[0].value), r[1])
        for r in block.results
    ]


def _run_fast(ctx: Any, step: Step, inputs: list[Any], attrs: tuple[Any, ...]) -> Any:
    op, name = step.op or "", step.node.name if step.node is not None else None
    try:
        return fast_execute_alone(ctx, op, name, *inputs, *attrs)
    except core._FallbackException:
        # Constants that were tensors when the operation was recorded, of a dtype that only tensors have, or NumPy
        # scalars, whose dtypes the generated wrapper determined by converting all inputs together.
        return fast_execute_alone(ctx, op, name, *_settled(step, inputs), *attrs)


def _settled(step: Step, inputs: list[Any]) -> list[Any]:
    """Returns the inputs with arrays and NumPy scalars as tensors, scalars of the dtype that the others imply."""
    signature = signature_of(step.op or "")
    assert signature is not None
    args = (*inputs, *step.attrs)

    def settled(i: int, value: Any) -> Any:
        if isinstance(value, list):
            return [settled(i, v) for v in value]
        if isinstance(value, np.generic):
            return make_constant(value, python_spec(signature, i, args, value).dtype)
        return value

    return _made([settled(i, value) for i, value in enumerate(inputs)])


def _made(inputs: list[Any]) -> list[Any]:
    """Returns the inputs with arrays as tensors of their own dtype."""
    return [
        _made(v) if isinstance(v, list) else make_constant(v, None) if isinstance(v, np.ndarray) else v for v in inputs
    ]


def _input(step: Step, i: int, slot: int, real: list[Any], feeds: list[Any]) -> Any:
    """Returns the value of input `i`: a constant, a tensor of the segment, a feed, or a list of these."""
    if slot == LIST:
        slots, consts = step.lists[i]
        return [
            _constant(const_at(consts[j], feeds), step, i, j) if j in consts else _tensor(s, real, feeds)
            for j, s in enumerate(slots)
        ]
    return _constant(const_at(step.consts[i], feeds), step, i) if i in step.consts else _tensor(slot, real, feeds)


def _constant(const: Const, step: Step, *path: int) -> Any:
    """Returns a constant, as a tensor where TensorFlow could not infer its dtype from the other inputs."""
    value = const.value
    if isinstance(value, (np.ndarray, np.generic)) or all(slot in (CONST, LIST) for slot in step.slots):
        spec = spec_of_constant(step, *path)
        if spec is not None:
            return make_constant(value, spec.dtype)
        if isinstance(value, np.ndarray):  # keep its dtype; TensorFlow might choose another
            return make_constant(value, None)
    return value


def _tensor(slot: int, real: list[Any], feeds: list[Any]) -> Any:
    return real[slot] if slot >= 0 else feeds[-1 - slot]
