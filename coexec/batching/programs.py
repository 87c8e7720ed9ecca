"""Programs: groups of operations whose instances correspond one to one, carried out as one function of stacked tensors.

A program runs operation by operation until that has taken as long as a trace would; then it is traced once for any
number of instances, forwards and backwards, and launched inline: a concatenation takes 10 us so, and 45 by the
function's name.

Relies on `ConcreteFunction.name`, by which TensorFlow's runtime launches it in a tenth of its own call's time.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.batching.kinds import OpKind
from coexec.batching.rules import CONSTANT
from coexec.compile import inline_call
from coexec.compile.inline_call import InlineCall
from tracer.intercept import handling
from tracer.private import config_pb2, context
from tracer.single_kernels import execute_function
from tracer.spec import Spec


class Wire(NamedTuple):
    """Where an input of a group comes from: an argument of the program, or an output of one of its groups."""

    group: int  # -1: an argument
    number: int


class ProgramPart(NamedTuple):
    """One group of a program: its kind, and the wires of its inputs that are no constants."""

    kind: OpKind
    wires: tuple[Wire, ...]


class Argument(NamedTuple):
    """One argument of a program: shared, rows, or rows of so `many` items each (-1: of any number, 0: of one)."""

    spec: Spec
    shared: bool
    many: int


class Program:
    """What a block of groups computes, for any number of instances."""

    def __init__(self, parts: Sequence[ProgramPart], arguments: Sequence[Argument]) -> None:
        self.parts = list(parts)
        self.arguments = list(arguments)
        self.outputs = [(g, n) for g, part in enumerate(parts) for n in range(len(part.kind.outputs))]
        self._plainly = 0.0  # seconds that it has taken operation by operation
        self._forward: _Traced | None = None
        self._backward: dict[tuple[Any, Any], _Backward] = {}

    def compute(self, given: Sequence[Any]) -> list[Any]:
        """Issues its operations on stacked arguments; returns the outputs of all groups, stacked."""
        made: list[list[Any]] = []
        for kind, wires in self.parts:
            left = iter(wires)
            values: list[Any] = []
            for operand in kind.call.operands:
                if operand.mode == CONSTANT:
                    values.append(operand.value)
                    continue
                wire = next(left)
                value = given[wire.number] if wire.group < 0 else made[wire.group][wire.number]
                if kind.alone:
                    value = tf.expand_dims(value, 0)
                values.append(value)
            results = kind.rule(kind.call, values)
            for result, shape in zip(results, kind.call.shapes, strict=True):
                assert tuple(result.shape[1:]) == shape, f"{kind.call.op} as a batch has another shape"
            made.append([tf.squeeze(result, 0) for result in results] if kind.alone else results)
        return [value for results in made for value in results]

    def forward(self, given: Sequence[Any]) -> list[Any]:
        """Returns the outputs of all groups, stacked."""
        if self._forward is None and self._plainly <= tuning.batching_worth:
            began = time.perf_counter()
            made = self.compute(given)
            self._plainly += time.perf_counter() - began
            return made
        if self._forward is None:
            self._forward = _Traced(self.compute, [self._spec(argument) for argument in self.arguments])
        return self._forward(given)

    def backward(
        self, given: Sequence[Any], wanted: tuple[int, ...], seeded: tuple[int, ...], cotangents: Sequence[Any]
    ) -> list[Any]:
        """Returns the gradients of the arguments `wanted`, None for one without, from those of the outputs `seeded`."""
        key = wanted, seeded
        found = self._backward.get(key)
        if found is None:
            found = self._backward[key] = _Backward(self, wanted, seeded)
        return found(given, cotangents)

    def _spec(self, argument: Argument) -> Any:
        shape: tuple[Any, ...] = argument.spec.shape
        if not argument.shared:
            items = () if not argument.many else (None,) if argument.many < 0 else (argument.many,)
            shape = (None, *items, *shape)
        return tf.TensorSpec(shape, argument.spec.dtype)

    def _spec_of_output(self, number: int) -> Any:
        group, n = self.outputs[number]
        kind = self.parts[group].kind
        spec = kind.outputs[n].spec
        return tf.TensorSpec(spec.shape if kind.alone else (None, *spec.shape), spec.dtype)

    def specs(self, seeded: tuple[int, ...]) -> list[Any]:
        """Returns the specs of its arguments, and of these outputs."""
        return [self._spec(a) for a in self.arguments] + [self._spec_of_output(n) for n in seeded]


class _Backward:
    """The gradient of a program for some of its outputs with respect to some of its arguments."""

    def __init__(self, program: Program, wanted: tuple[int, ...], seeded: tuple[int, ...]) -> None:
        self._program, self._wanted, self._seeded = program, wanted, seeded
        self._plainly = 0.0  # as in the program
        self._traced: _Traced | None = None
        self._forms: list[int] = []  # of each gradient: 0 none, 1 a tensor, 2 rows and their indices

    def __call__(self, given: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        if self._traced is None and self._plainly <= tuning.batching_worth:
            began = time.perf_counter()
            found = self._eagerly(given, cotangents)
            self._plainly += time.perf_counter() - began
            return found
        if self._traced is None:
            self._traced = _Traced(self._graph, self._program.specs(self._seeded))
        flat = iter(self._traced([*given, *cotangents]))
        found = []
        for number, form in zip(self._wanted, self._forms, strict=True):
            if form == 2:
                shape = tf.constant(self._program.arguments[number].spec.shape)
                found.append(tf.IndexedSlices(next(flat), next(flat), shape))
            else:
                found.append(next(flat) if form else None)
        return found

    def _eagerly(self, given: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            wanted = [tf.identity(given[n]) if n in self._wanted else given[n] for n in range(len(given))]
            for n in self._wanted:
                tape.watch(wanted[n])
            made = self._program.compute(wanted)
        outputs = [made[n] for n in self._seeded]
        return list(tape.gradient(outputs, [wanted[n] for n in self._wanted], list(cotangents)))

    def _graph(self, flat: Sequence[Any]) -> list[Any]:
        count = len(self._program.arguments)
        given, cotangents = flat[:count], flat[count:]
        made = self._program.compute(given)
        outputs = [made[n] for n in self._seeded]
        found = tf.gradients(outputs, [given[n] for n in self._wanted], list(cotangents))
        self._forms, results = [], []
        for gradient in found:
            self._forms.append(0 if gradient is None else 2 if isinstance(gradient, tf.IndexedSlices) else 1)
            if isinstance(gradient, tf.IndexedSlices):
                results += [gradient.values, gradient.indices]
            elif gradient is not None:
                results.append(gradient)
        return results


class _Traced:
    """A function of tensors, traced once and launched inline, or by name where there is a GPU."""

    def __init__(self, function: Any, specs: list[Any]) -> None:
        with handling(None), tf.init_scope():
            traced = tf.function(lambda *given: function(given), input_signature=specs, autograph=False)
            self._function = traced.get_concrete_function()  # its name dies with it
        assert not self._function.captured_inputs
        self._count = len(self._function.outputs)
        ctx = context.context()
        config = config_pb2.ConfigProto()
        config.ParseFromString(ctx.function_call_options.config_proto_serialized)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        settings = config.SerializeToString()
        self._name: Any = self._function.name
        self._inline: InlineCall | None = None
        self._attrs: tuple[Any, ...] = "executor_type", "SINGLE_THREADED_EXECUTOR", "config_proto", settings
        if ctx.num_gpus() or not self._count:
            return
        inline_call.tidy_up(ctx)
        signature = ctx.get_function_def(self._name).signature
        self._inline = InlineCall(signature, settings, len(self._function.graph.get_operations()))
        weakref.finalize(self, self._inline.drop, ctx).atexit = False

    def __call__(self, given: Sequence[Any]) -> list[Any]:
        ctx = context.context()
        if self._inline is None or not self._inline.takes_next():
            return list(
                execute_function(ctx._handle, ctx.device_name, self._name, list(given), self._attrs, self._count)
            )
        thread = inline_call.enter()
        try:
            attrs = self._inline.attrs
            return list(execute_function(ctx._handle, ctx.device_name, inline_call.OP, list(given), attrs, self._count))
        finally:
            inline_call.leave(thread)
