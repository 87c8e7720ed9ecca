"""Records: entries still to be put on tapes, of one operation each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from coexec.follow.tensor_names import TensorNames
from tracer.graph import CONST, LIST, Step
from tracer.inputs import python_spec
from tracer.intercept import as_tensors, flat_outputs, record_fast, record_gradient
from tracer.lazy import LazyTensor
from tracer.op import complete_attrs, freeze, signature_of
from tracer.private import EagerTensor, ops
from tracer.sizes import LEAST
from tracer.spec import Spec, spec_of

Constant = Callable[[Any, Any], Any]  # converts a Python value to a tensor of a dtype

# The dtypes that tapes follow, as TensorFlow's `backprop_util` has them.
_DIFFERENTIABLE = frozenset(
    each.as_datatype_enum
    for each in (
        tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.resource, tf.variant,
    )
)  # fmt: skip


class TapeEntry:
    """The entry of one operation: what entries of all kinds have in common."""

    __slots__ = ()

    def _tensors(self) -> list[Any]:
        """Returns its input and output tensors, numbered for `get`."""
        raise NotImplementedError

    def brief(self, names: TensorNames) -> Any:
        """Returns None: its tensors have to be compared."""

    def keep(self) -> None:
        """Does nothing: its tensors are there."""

    def goes_into(self, region: Any) -> None:
        """Does nothing: an operation is never invalidated."""

    def is_differentiable(self) -> bool:
        """Returns whether a gradient may go through it: not if it gives nothing but integers, say."""
        return True

    def results(self) -> list[Any]:
        """Returns the tensors that it gives."""
        raise NotImplementedError

    def constants(self) -> list[Any]:
        """Returns none: each is among `given`."""
        return []

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Yields each of its tensors with its key for `get`."""
        for number, tensor in enumerate(self._tensors()):
            yield from ((v, number) for v in identities(tensor))

    def get(self, number: Any) -> Any:
        """Returns an input or output tensor."""
        return self._tensors()[number]


class Entry(TapeEntry):
    """The entry of one followed operation: its step, arguments and result."""

    __slots__ = ("_made", "args", "op", "result", "step", "tapes")

    def __init__(self, step: Step, op: str, args: tuple[Any, ...], result: Any, tapes: tuple[int, ...]) -> None:
        self.step = step
        self.op = op
        # Copied, as the program may change lists that it passed or received.
        self.args = tuple([list(value) if isinstance(value, list) else value for value in args]) if step.lists else args
        self.result = list(flat_outputs(result))
        self.tapes = tapes
        self._made: list[Any] = []  # tensors recorded on tapes in place of Python constants
        if step.closed is None:
            step.closed = bool(self.result) and not step.lists and all(map(_is_inside, step.slots, args))

    def results(self) -> list[Any]:
        """Returns the results of the operation."""
        return self.result

    def is_differentiable(self) -> bool:
        """Returns whether a result is of a differentiable dtype."""
        return any(out.spec.enum in _DIFFERENTIABLE for out in self.step.outputs)

    def identity(self, names: TensorNames) -> Any:
        """Returns a key of the operation, apart from its tensors."""
        return self.step

    def brief(self, names: TensorNames) -> Any:
        """Returns a key that implies the tensors, if all inputs come from its own segment; else None."""
        # Fast, as a recurrent step of raw operations has some 700 of these.
        return (self.step, names.of(self.result[0]._key), self.tapes) if self.step.closed else None

    def given(self) -> list[Any]:
        """Returns the input tensors except constants, which the step determines."""
        step = self.step
        if step.lists:
            return [v for v, slot in self._inputs() if slot != CONST]
        pairs = zip(self.args, step.slots, strict=False)  # attributes follow
        return [v for v, slot in pairs if slot != CONST and isinstance(v, EagerTensor)]

    def constants(self) -> list[Any]:
        """Returns the input tensors that are constants."""
        return [*(v for v, slot in self._inputs() if slot == CONST), *self._made]

    def _inputs(self) -> list[tuple[Any, int]]:
        """Returns the input tensors, each with its slot in the step."""
        inputs: list[tuple[Any, int]] = []
        for i, (value, slot) in enumerate(zip(self.args, self.step.slots, strict=False)):  # attributes follow
            if slot == LIST:
                inputs += zip(value, self.step.lists[i][0], strict=True)
            else:
                inputs.append((value, slot))
        return [pair for pair in inputs if isinstance(pair[0], EagerTensor)]

    def _tensors(self) -> list[Any]:
        return [*(v for v, _ in self._inputs()), *self.result]

    def record(self, constant: Constant) -> None:
        """Puts the operation on the active tapes."""
        self._made = record_on_tapes(self.step, self.op, self.args, self.result, constant)


def identities(tensor: Any) -> Iterator[Any]:
    """Yields the objects that a tensor may be known as: itself, and the eager tensor that is its value."""
    yield tensor
    if type(tensor) is LazyTensor and tensor._value is not None:
        yield tensor._value


def _is_inside(slot: int, value: Any) -> bool:
    """Whether an input is determined by its step: a constant, or an output of an operation of its segment."""
    return slot == CONST or (slot >= 0 and type(value) is LazyTensor and value._out.const is None)


def without_sizes(identity: Any) -> Any:
    """Returns an entry's identity for a path that is followed at any size: there, the specs of feeds compare them."""
    if isinstance(identity, Spec):
        return identity.enum, tuple([size if size < LEAST else None for size in identity.shape]), identity.handle
    return tuple(map(without_sizes, identity)) if isinstance(identity, tuple) else identity


_SEEDS = frozenset({"seed", "seed2"})  # change in each call, but no gradient depends on them


class NamedEntry(TapeEntry):
    """The entry of an operation that ran on its own, issued by name: inputs, outputs and attributes."""

    __slots__ = ("_inputs", "attrs", "op", "outputs", "tapes")

    def __init__(self, op: str, inputs: Any, attrs: Any, outputs: Any, tapes: tuple[int, ...]) -> None:
        self.op = op
        self.attrs = tuple(attrs)
        self._inputs = list(inputs)
        self.outputs = list(flat_outputs(outputs))
        self.tapes = tapes

    def identity(self, names: TensorNames) -> Any:
        """Returns a key of the operation, apart from its tensors.

        It includes shapes, as no step has compared them. Raises TypeError if attributes cannot be compared.
        """
        named = zip(self.attrs[::2], self.attrs[1::2], strict=True)
        attrs = [pair for pair in named if pair[0] not in _SEEDS]
        return self.op, freeze(attrs), tuple([spec_of(v) for v in self._tensors()])

    def results(self) -> list[Any]:
        """Returns the outputs of the operation."""
        return self.outputs

    def given(self) -> list[Any]:
        """Returns its input and output tensors: the latter are feeds of later segments."""
        return self._tensors()

    def _tensors(self) -> list[Any]:
        return [*self._inputs, *self.outputs]

    def record(self, constant: Constant) -> None:
        """Puts the operation on the active tapes."""
        record_gradient(self.op, self._inputs, self.attrs, self.outputs, ops.get_name_scope())


class FastEntry(NamedEntry):
    """The entry of an operation that a wrapper ran on its own: inputs may be Python values and lists.

    Arrays are converted at once: the program may change them, and a gradient's key holds no values of tensors.
    """

    __slots__ = ("args",)

    def __init__(self, op: str, args: tuple[Any, ...], result: Any, tapes: tuple[int, ...]) -> None:
        taken = as_tensors(op, args, np.ndarray)
        self.args = (*taken, *args[len(taken) :])
        inputs = [v for value in self.args for v in (value if isinstance(value, (list, tuple)) else (value,))]
        super().__init__(op, [v for v in inputs if isinstance(v, EagerTensor)], (), result, tapes)

    def identity(self, names: TensorNames) -> Any:
        """Returns the same, including the Python values among the inputs."""
        signature = signature_of(self.op)
        assert signature is not None
        count = len(signature.inputs)
        given = tuple([None if isinstance(v, EagerTensor) else _without_tensors(v) for v in self.args[:count]])
        self.attrs = self.args[count:]
        return freeze(given), super().identity(names)

    def record(self, constant: Constant) -> None:
        """Puts the operation on the active tapes."""
        record_fast(self.op, self.args, self.outputs)


def _without_tensors(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    return tuple([None if isinstance(item, EagerTensor) else item for item in value])


def record_on_tapes(step: Step, op: str, args: tuple[Any, ...], result: Any, constant: Constant) -> list[Any]:
    """Puts a followed operation on the active tapes; returns the tensors that `constant` made of Python values.

    For a memoized call, `args` are the inputs only, and the attributes those with which the step was recorded before.
    """
    flat: list[Any] = []
    kinds: list[Any] = []
    made: list[Any] = []
    for i in range(step.arity):
        value = args[i]
        if i in step.lists:
            given, value = value, []
            for j, v in enumerate(given):
                if not isinstance(v, EagerTensor):
                    v = constant(v, _dtype(step, op, args, i, v, j))
                    made.append(v)
                value.append(v)
            flat.extend(value)
            kinds.append(tuple(v._datatype_enum() for v in value))
            continue
        if not isinstance(value, EagerTensor):
            value = constant(value, _dtype(step, op, args, i, value))
            made.append(value)
        flat.append(value)
        kinds.append(value._datatype_enum())
    if step.tape is None:
        step.tape = complete_attrs(op, step.attrs, tuple(kinds))
    record_gradient(op, flat, step.tape, flat_outputs(result), ops.get_name_scope())
    return made


def _dtype(step: Step, op: str, args: tuple[Any, ...], i: int, value: Any, item: int = 0) -> Any:
    """Returns the dtype of the tensor that a Python value was converted to, by the operation's attributes."""
    signature = signature_of(op)
    assert signature is not None
    attrs = args[step.arity :] if step.tape is None else step.tape
    kinds = signature.definition.input_arg[i].type_list_attr
    if not kinds:
        return python_spec(signature, i, (*args[: step.arity], *attrs), value).dtype
    given = dict(zip(attrs[::2], attrs[1::2], strict=True))
    return given[kinds][item] if kinds in given else None
