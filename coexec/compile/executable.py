"""Executable: a plan emitted, compiled and registered with TensorFlow's runtime under a name.

Launched by that name, or in a `wrappers` call of it: `TFE_Py_Execute` takes 10-25 us, `tf.function`'s call path 170-280
us (TensorFlow 2.21, CPU).
Relies on `Context.add_function_def`, `remove_function` (which count) and `function_call_options`.
"""

from __future__ import annotations

import itertools
import os
import weakref
from typing import Any

import tensorflow as tf

from coexec.compile import machine_code, wrappers
from coexec.compile.environment import digest
from coexec.lowering.body import Body
from coexec.lowering.control_flow import Structures
from coexec.lowering.emit import Emitter
from coexec.lowering.fold import fold
from coexec.lowering.outline import outline
from coexec.lowering.plan import Plan
from coexec.lowering.randomness import words_of
from tracer.block import Block
from tracer.intercept import execute, make_constant
from tracer.private import config_pb2, context, function_pb2
from tracer.seeds import Pair
from tracer.spec import RESOURCE, Spec

# XLA's minimum and maximum on CPU drop NaNs unless told otherwise, and it is told once, before it first compiles.
if "xla_cpu_enable_fast_min_max" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_min_max=false".strip()

_NAME = "coexec_segment_{}"
_UNNAMED = _NAME.format("0" * 32)

# A run of small kernels is faster on the calling thread, up to this mean size of what they give, in bytes: of the
# steps of `make bench`, launched in turns on two cores, an MLP's (2 KiB) took 0.86 of the time, a DQN's (2) 0.81,
# an LSTM's (9) 0.87, and a GPT's (109) 1.16.
FINE_GRAIN = 1 << 14


class Executable:
    """A segment, ready to launch: `backend` is "xla" or "graph"."""

    def __init__(self, plan: Plan, backend: str, varying: dict[Any, int] | None = None) -> None:
        self.backend = backend
        self.outputs = plan.outputs
        self.given = frozenset(plan.outputs)
        self.feeds = plan.feeds
        self._words = () if plan.words is None else (plan.words,)  # what is fed besides, for seeds
        emitter = Emitter(plan, checks=backend == "xla", name=_UNNAMED, varying=varying)
        body = emitter.build()
        self.varying = list(body.varying)  # the constants that it takes as arguments, by number and dtype
        self.ops = plan.live
        self.folded = 0  # operations that loops save, of those and others that go with them
        if backend == "xla":
            there, left = fold(body, emitter.functions, emitter.outside)
            if left < there:
                self.ops, self.folded = left, there - left
        definition = body.definition
        self.checked = bool(emitter.predicates)
        self.count = len(definition.ret)
        parts = outline(emitter.body, emitter.outside) if emitter.outside else []
        if emitter.outside and not parts:
            raise NotImplementedError(next(iter(plan.outside.values())))
        whole = backend == "xla" and not parts
        if whole:
            definition.attr["_XlaMustCompile"].b = True
        inner = [function.definition for function in emitter.functions]
        inner += [definition for part in parts for definition in (part.definition, part.alone)]
        functions = _named([*inner, definition], (*plan.feeds, *self._words))
        names = [function.signature.name for function in functions]
        self.name = names[-1]
        # What XLA compiles, where that is not the whole: functions that call it, what they take, how much they give.
        alone = [part.alone.signature.name.replace(_UNNAMED, self.name) for part in parts]
        self.parts = [(name, p.arguments, p.results) for name, p in zip(alone, parts, strict=True)]
        ctx = context.context()
        for function in functions:
            ctx.add_function_def(function)
        self._context = ctx
        machine_code.tidy_up()  # of functions that are not ours, too
        wrappers.tidy_up(ctx)
        small = plan.grain <= FINE_GRAIN and not plan.heavy
        executor = "SINGLE_THREADED_EXECUTOR" if small else ""
        # XLA needs none of these, and each takes a launch's time.
        self._attrs: Any = () if whole else ("executor_type", executor, "config_proto", _config(ctx))
        self._op = self.name
        wrapped = None
        if small and backend == "graph" and not ctx.num_gpus() and (self.count or emitter.written):
            signature = functions[-1].signature
            self._op, self._attrs = wrappers.OP, wrappers.attributes(signature, _config(ctx))
            wrapped = len(signature.input_arg), len(signature.output_arg), self.ops
            wrappers.hold(*wrapped)
        self._direct = wrapped is not None
        self.launches = 0
        self.trusted = False  # whether it was compared with its operations
        self.size = plan.size
        self.loaded = False  # whether XLA's code for it was left by an earlier process
        self._finalizer = weakref.finalize(self, _remove, ctx, names, wrapped)
        self._finalizer.atexit = False

    def launch(self, feeds: list[Any], seeds: list[Pair], into: list[Any] | None = None) -> list[Any] | None:
        """Runs the segment and returns its outputs; None if a check failed, and then nothing was written.

        What came of it is in `into` then, too, as `unpacked` takes it: no interrupt comes between the launch and that,
        as it would before Python has the results.
        """
        if seeds:
            feeds = [*feeds, make_constant(words_of(seeds), None)]
        held = [] if into is None else into
        if self.launches or self.backend != "xla":
            self._execute(feeds, held)
        else:
            self._first(feeds, held)
        self.launches += 1
        return self.unpacked(held[0])

    def unpacked(self, results: list[Any]) -> list[Any] | None:
        """Returns the outputs among what a launch gave; None if a check failed."""
        if not self.checked:
            return results
        return results[:-1] if results[-1] else None

    def prepare(self, device: str | None) -> None:
        """Has TensorFlow compile it for a device, by a launch on zeros and on variables of its own.

        The compiled code is kept by name and shapes: the program's first launch then takes as long as its second.
        """
        variables = []

        def made(spec: Spec) -> Any:
            if spec.enum != RESOURCE or spec.handle is None:
                return tf.zeros(spec.shape, spec.dtype)
            enum, shape = spec.handle[0]
            variables.append(tf.Variable(tf.zeros(shape, tf.dtypes.as_dtype(enum)), trainable=False))
            return variables[-1].handle

        with tf.device(device), tf.init_scope():
            if not self.parts:
                self._first([made(spec) for spec in (*self.feeds, *self._words)], [])
                return
            with machine_code.kept(self.name) as code:  # each on its own: what is between them may fail on zeros
                for name, arguments, count in self.parts:
                    ctx = self._context
                    execute(ctx._handle, ctx.device_name, name, [made(spec) for spec in arguments], (), count)
            self.loaded = code.loaded

    def _execute(self, feeds: list[Any], into: list[Any]) -> None:
        ctx = self._context
        given = ctx._handle, ctx.device_name, self._op, feeds, self._attrs, self.count
        if not self._direct:
            into.extend(itertools.starmap(execute, (given,)))
            return
        thread = wrappers.enter()
        try:
            into.extend(itertools.starmap(execute, (given,)))
        finally:
            wrappers.leave(thread)

    def _first(self, feeds: list[Any], into: list[Any]) -> None:
        """Launches, for which XLA compiles; unless what it once made of equal code is still there."""
        with machine_code.kept(self.name) as code:
            self._execute(feeds, into)
        self.loaded = code.loaded


class Alone:
    """A block as a graph function of its own: for a program that calls itself, which cannot be run piece by piece."""

    def __init__(self, block: Block, specs: tuple[Spec, ...]) -> None:
        body = Body(_UNNAMED)
        functions: list[Body] = []
        given = [body.argument(spec) for spec in specs]
        results, fine = Structures(_UNNAMED, body, functions, False).block(block, given)
        if fine is not None:
            raise NotImplementedError("it may fail")
        for value in results:
            body.give(body.make("Identity", [value], value.spec.enum, value.spec.shape))
        self._context = ctx = context.context()
        definitions = _named([*(function.definition for function in functions), body.definition], specs)
        for definition in definitions:
            ctx.add_function_def(definition)
        names = [definition.signature.name for definition in definitions]
        self._name, self._count = names[-1], len(results)
        weakref.finalize(self, _remove, ctx, names).atexit = False

    def run(self, given: list[Any]) -> list[Any]:
        """Runs it on these tensors."""
        attrs = "executor_type", "", "config_proto", _config(self._context)
        return list(execute(self._context._handle, self._context.device_name, self._name, given, attrs, self._count))


def _named(functions: list[Any], feeds: tuple[Spec, ...]) -> list[Any]:
    """Returns the functions with names that follow from their content: equal ones are found again, on disk, too.

    TensorFlow counts how often a function of the same name and content is added and removed.
    """
    plain = [function.SerializeToString(deterministic=True) for function in functions]
    name = _NAME.format(digest(b"\n".join([*plain, repr(feeds).encode()])))
    return [function_pb2.FunctionDef.FromString(p.replace(_UNNAMED.encode(), name.encode())) for p in plain]


def _config(ctx: Any) -> bytes:
    """Returns the session config of a launch: without Grappler.

    It changes values (x + 0.0 is not x for -0.0), and took two thirds of the first launch's time (2078 operations:
    1.2 s with it, 0.45 without) for nothing that could be measured later.
    """
    config = config_pb2.ConfigProto()
    config.ParseFromString(ctx.function_call_options.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config.SerializeToString()


def _remove(ctx: Any, names: list[str], wrapped: tuple[int, int, int] | None = None) -> None:
    for name in names:
        if ctx.has_function(name.encode()):
            ctx.remove_function(name)
    if wrapped is not None:
        wrappers.drop(ctx, *wrapped)
