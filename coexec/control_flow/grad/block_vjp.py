"""Block VJP: the gradient of a traced block, as another block.

The block's operations are issued again, on symbolic tensors and under a tape of their own, which computes the gradient:
so gradients are TensorFlow's. If only one path of a branch has a gradient, whether there is one depends on the path
taken: such a branch is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import tensorflow as tf

from tracer.block import BRANCH, CALL, LOOP, STRUCTURES, Block, Branch, blocks_of
from tracer.errors import Refused
from tracer.graph import CONST, LIST, Step
from tracer.inputs import input_enum
from tracer.intercept import handling, record_on_tapes
from tracer.lazy import LazyTensor
from tracer.op import Signature, signature_of
from tracer.private import EagerTensor, record
from tracer.spec import Spec
from tracer.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Collection

    from coexec.control_flow.program_types import Tensor, Value
    from tracer.op import Const

    Result = int | tuple[Const, Spec]  # of a block: a slot, or a constant with its spec
    Backward = Callable[[Tensor], list[Tensor]]  # of a result: maps its cotangent to those of inputs

_Found = TypeVar("_Found")


class BlockVjp(NamedTuple):
    """The gradient of some results of a block: its block takes that block's arguments and the results' cotangents."""

    block: Block
    connected: tuple[int, ...]  # the arguments whose cotangents it returns
    sparse: tuple[int, ...] = ()  # those for which the gradient would not be a tensor


def vjps_of(block: Block) -> list[BlockVjp]:
    """Returns the gradient of each of a block's results; raises `Refused` if one cannot be traced."""
    refuse_hidden(block)
    return unwatched(lambda: [dense(vjp_of(block, (n,), None)) for n in range(len(block.results))])


def refuse_hidden(block: Block) -> None:
    """Refuses a block that computes one result from another: the program may take that gradient, too."""
    seen = {r for r in block.results if has_gradient(spec_in(block, r))}
    if hides(block, seen) or any(not seen.isdisjoint(ancestors(block, result)) for result in block.results):
        raise Refused("it computes one result from another")


def unwatched(work: Callable[[], _Found]) -> _Found:
    """Returns the result of `work`, run on another thread, where this thread's tapes do not record it.

    Raises `Refused` for whatever it raises.
    """
    found: list[_Found | BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except (Refused, Exception) as error:
            found.append(error)

    thread = threading.Thread(target=run, name="coexec-gradients")
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise Refused(f"its gradient cannot be emitted: {found[0]}") from None
    return found[0]


def has_gradient(spec: Spec) -> bool:
    """Returns whether tapes watch tensors of this dtype."""
    return spec.dtype.is_floating or spec.dtype.is_complex  # type: ignore[no-any-return]


class Taped(Stage):
    """A stage that records what it traces on its thread's tape."""

    def __enter__(self) -> Stage:
        self._around = [handling(self)]
        self._around[0].__enter__()
        return self

    def fast(self, op: str, name: object, args: tuple[Value, ...]) -> Value:
        """Traces an operation and records it on the tape; returns its outputs."""
        result = super().fast(op, name, args)
        signature = signature_of(op)
        assert signature is not None
        count = len(signature.inputs)
        if op == "StridedSlice" and type(args[1]) is LazyTensor and args[1]._out.const is None:
            self._record_slice(result, args)
            return result
        inputs: list[Tensor | list[Tensor]] = []
        for i, (value, is_list) in enumerate(zip(args[:count], signature.lists, strict=True)):
            items = [_tensor(v, signature, i, args) for v in (value if is_list else (value,))]
            inputs.append(items if is_list else items[0])
        outputs = result if isinstance(result, list) else [result]
        record_on_tapes(op, tuple(args[count:]), inputs, [t for o in outputs for t in (o if type(o) is list else [o])])
        return result

    def _record_slice(self, result: LazyTensor, args: tuple[Value, ...]) -> None:
        """Records a slice whose start is symbolic: TensorFlow's own gradient would read its value, for a constant."""
        sliced, begin, end, strides, *masks = args

        def backward(back: Tensor) -> list[Tensor]:
            shape = list(sliced._out.spec.shape)
            return [self.fast("StridedSliceGrad", None, (shape, begin, end, strides, back, *masks))]

        if type(sliced) is LazyTensor:
            record.record_operation("StridedSlice", [result], [sliced], backward)


def _tensor(value: Value, signature: Signature, i: int, args: tuple[Value, ...]) -> Tensor:
    if isinstance(value, EagerTensor):
        return value
    return tf.convert_to_tensor(value, input_enum(signature, i, args, value))


def vjp_of(block: Block, numbers: tuple[int, ...], outer: Stage | None, cuts: tuple[int, ...] = ()) -> BlockVjp:
    """Returns the gradient of the results with these numbers; to be called on a thread where no tape records.

    The slots in `cuts` become further arguments, after the block's, that replace the values computed for them.
    """
    stage = Taped(outer)
    given = [stage.argument(spec) for spec in block.arguments]
    instead = {slot: stage.argument(spec_in(block, slot)) for slot in cuts}
    specs = [spec_in(block, block.results[n]) for n in numbers]
    backs = [stage.argument(spec) for spec in specs]
    if not all(map(has_gradient, specs)):
        return BlockVjp(stage.block([]), ())
    with stage, tf.GradientTape(watch_accessed_variables=False) as tape:
        sources = [*given, *instead.values()]
        asked = [n for n, source in enumerate(sources) if has_gradient(source._out.spec)]
        tape.watch([sources[n] for n in asked])
        results = issue_block(stage, block, given, instead)
        grads = tape.gradient([results[n] for n in numbers], [sources[n] for n in asked], output_gradients=backs)
        found = {n: grad for n, grad in zip(asked, grads, strict=True) if grad is not None}
        tensors = {n: grad for n, grad in found.items() if type(grad) is LazyTensor}
        sparse = tuple(n for n in found if n not in tensors)
        return BlockVjp(pruned(stage.block(list(tensors.values()))), tuple(tensors), sparse)


def dense(gradient: BlockVjp) -> BlockVjp:
    """Returns the gradient; raises `Refused` if it is sparse for some argument."""
    if gradient.sparse:
        raise Refused("a gradient is sparse")
    return gradient


def spec_in(block: Block, result: Result) -> Spec:
    """Returns the spec of a block's result, or of one of its slots."""
    if isinstance(result, tuple):
        return result[1]
    if result < 0:
        return block.arguments[-1 - result]
    return next(o.spec for s in block.steps for n, o in enumerate(s.outputs) if s.first + n == result)


def pruned(block: Block) -> Block:
    """Returns the block without operations that its results do not depend on."""
    needed = {r for r in block.results if isinstance(r, int)}
    kept: list[Step] = []
    for step in reversed(block.steps):
        if not needed.isdisjoint(range(step.first, step.end)):
            kept.append(step)
            needed.update(slots_of(step))
    return Block(block.arguments, tuple(reversed(kept)), block.results)


def used_arguments(block: Block) -> set[int]:
    """Returns which arguments a block's operations or results use."""
    slots = {slot for step in block.steps for slot in slots_of(step)}
    slots.update(r for r in block.results if isinstance(r, int))
    return {-1 - slot for slot in slots if CONST < slot < 0}


def ancestors(block: Block, result: Result) -> set[int]:
    """Returns the slots that a result of a block is computed from."""
    found = {result} if isinstance(result, int) else set()
    for step in reversed(block.steps):
        if not found.isdisjoint(range(step.first, step.end)):
            found.update(slots_of(step))
    return found - {result}


def slots_of(step: Step) -> list[int]:
    """Returns the slots that a step takes."""
    return [s for i, slot in enumerate(step.slots) for s in (step.lists[i][0] if slot == LIST else (slot,))]


def hides(block: Block, seen: Collection[Result]) -> bool:
    """Returns whether a branch or recursive call inside computes something from a value that is `seen` outside of it.

    A tape would not know that the two are related.
    """
    for step in block.steps:
        shown = [n for n in range(len(step.outputs)) if step.first + n in seen] if step.op in (BRANCH, CALL) else []
        for way in blocks_of(step) if shown else ():
            results = way.results
            for n in shown:
                others = [r for k, r in enumerate(results) if k != n and isinstance(results[n], int)]
                others = [r for r in others if has_gradient(spec_in(way, r))]
                if any(results[n] == r or results[n] in ancestors(way, r) for r in others):
                    return True
            if hides(way, {results[n] for n in shown}):
                return True
    return False


def issue_block(
    stage: Stage, block: Block, given: list[Tensor], instead: dict[int, Tensor] | None = None
) -> list[Tensor]:
    """Issues a block's operations again in a stage, with these arguments; returns its results.

    `instead` holds tensors by slot that replace what is computed for those slots.
    """
    instead = instead or {}
    values: dict[int, Tensor] = {**{-1 - n: v for n, v in enumerate(given)}, **instead}
    for step in block.steps:
        inputs = [input_of(step, i, slot, values) for i, slot in enumerate(step.slots)]
        outputs = _structure(stage, step, inputs) if step.op in STRUCTURES else issue_step(stage, step, inputs)
        for n, tensor in enumerate(outputs):
            values.setdefault(step.first + n, tensor)
    return [values[r] if isinstance(r, int) else stage.constant(r[0].value, r[1].dtype) for r in block.results]


def issue_step(stage: Stage, step: Step, inputs: list[Value]) -> list[Tensor]:
    """Issues an operation, not a structure, again in a stage; returns its outputs."""
    result = stage.fast(step.op or "", None, (*inputs, *step.attrs))
    found = result if isinstance(result, list) else [result]
    return [t for o in found for t in (o if type(o) is list else [o])]


def input_of(step: Step, i: int, slot: int, values: dict[int, Tensor]) -> Value:
    """Returns a step's input, given the values of slots."""
    if slot == LIST:
        slots, consts = step.lists[i]
        return [consts[j].value if j in consts else values[s] for j, s in enumerate(slots)]
    return step.consts[i].value if i in step.consts else values[slot]


def tensors_of(step: Step, inputs: list[Value]) -> list[Tensor]:
    """Returns a structure's inputs, as tensors."""
    assert step.variant is not None
    return [v if isinstance(v, EagerTensor) else tf.convert_to_tensor(v, spec.dtype)
            for v, spec in zip(inputs, step.variant.key, strict=True)]  # fmt: skip


def _structure(stage: Stage, step: Step, inputs: list[Value]) -> list[LazyTensor]:
    given = tensors_of(step, inputs)
    if not isinstance(stage, Taped):
        return stage.structure(step.op or "", step.attrs[1], given, [out.spec for out in step.outputs])
    if step.op != BRANCH:
        raise Refused("there is a loop in it" if step.op == LOOP else "a function in it calls itself")
    return _branch(stage, step, *given)


def _branch(stage: Stage, step: Step, condition: Tensor, *given: Tensor) -> list[LazyTensor]:
    """Issues a branch; records each result separately, as each has gradients for different arguments."""
    branch: Branch = step.attrs[1]
    results = stage.structure(BRANCH, branch, [condition, *given], [out.spec for out in step.outputs])
    for n, result in enumerate(results):
        if not has_gradient(result._out.spec):
            continue
        ways = [
            (dense(vjp_of(block, (n,), None)), places)
            for block, places in ((branch.then, branch.then_inputs), (branch.other, branch.other_inputs))
        ]
        connected = [{places[k] for k in way.connected} for way, places in ways]
        if connected[0] != connected[1]:
            raise Refused("one way has a gradient where the other has none")
        order = sorted(connected[0])
        if order:
            backward = _backward(stage, condition, list(given), ways, order)
            record.record_operation("Branch", [result], [given[k] for k in order], backward)
    return results


def _backward(
    stage: Stage,
    condition: Tensor,
    given: list[Tensor],
    ways: list[tuple[BlockVjp, tuple[int, ...]]],
    order: list[int],
) -> Backward:
    def backward(back: Tensor) -> list[Tensor]:
        blocks = []
        for gradient, places in ways:
            at = {places[k]: n for n, k in enumerate(gradient.connected)}
            results = tuple(gradient.block.results[at[k]] for k in order)
            blocks.append(Block(gradient.block.arguments, gradient.block.steps, results))
        last = len(given)
        part = Branch(blocks[0], blocks[1], (*ways[0][1], last), (*ways[1][1], last))
        specs = [given[k]._out.spec for k in order]
        return stage.structure(BRANCH, part, [condition, *given, tf.convert_to_tensor(back)], specs)

    return backward
