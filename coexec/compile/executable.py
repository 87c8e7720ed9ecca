"""Executable: a plan, emitted and registered by name with TensorFlow's runtime.

It is launched by that name, or by an `inline_call` of it: `TFE_Py_Execute` takes 10-25 us, `tf.function`'s call path
170-280 us (TensorFlow 2.21, CPU).
Relies on `Context.add_function_def`, `remove_function` (which count references) and `function_call_options`.
"""

from __future__ import annotations

import itertools
import os
import weakref
from typing import Any

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.compile import inline_call, xla_code_cache
from coexec.compile.inline_call import InlineCall
from coexec.compile.platform_key import digest
from coexec.lowering.emit import Emitter
from coexec.lowering.function_body import Body
from coexec.lowering.functional_ops import Structures
from coexec.lowering.partition import outline
from coexec.lowering.plan import Plan
from coexec.lowering.reroll.reroll import fold
from coexec.lowering.xla.philox import words_of
from tracer import hooks, versions
from tracer.block import Block
from tracer.intercept import make_constant
from tracer.private import config_pb2, context, function_pb2
from tracer.seeds import Pair
from tracer.single_kernels import execute_function
from tracer.spec import RESOURCE, Spec

# By default XLA's minimum and maximum on CPU drop NaNs. The flag is read once, before the first compilation. (A version
# that does not know it would end the process.)
if "xla_cpu_enable_fast_min_max" not in os.environ.get("XLA_FLAGS", "") and not versions.UNTESTED:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_min_max=false".strip()
hooks.Hooks(__name__, "`XLA_FLAGS`", "XLA's minimum and maximum would drop NaNs on the CPU", hooks.LASTING)

_NAME = "coexec_segment_{}"
_UNNAMED = _NAME.format("0" * 32)


class Executable:
    """A segment, ready to launch: `backend` is "xla" or "graph"."""

    def __init__(self, plan: Plan, backend: str, varying: dict[Any, int] | None = None) -> None:
        """Emits and registers a plan; raises `NotImplementedError` if the backend cannot run it.

        `varying`: the constants to lift to arguments.
        """
        self.backend = backend
        self.outputs = plan.outputs
        self.given = frozenset(plan.outputs)
        self.feeds = plan.feeds
        self._words = () if plan.words is None else (plan.words,)  # an additional feed for seeds
        emitter = Emitter(plan, checks=backend == "xla", name=_UNNAMED, varying=varying)
        body = emitter.build()
        self.varying = list(body.varying)  # its lifted constants, by argument number and dtype
        self.ops = plan.live
        self.folded = 0  # operations saved by rerolling
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
        # If XLA compiles only parts: for each a function that calls it, the specs of its arguments, its result count.
        alone = [part.alone.signature.name.replace(_UNNAMED, self.name) for part in parts]
        self.parts = [(name, p.arguments, p.results) for name, p in zip(alone, parts, strict=True)]
        ctx = context.context()
        for function in functions:
            ctx.add_function_def(function)
        self._context = ctx
        xla_code_cache.tidy_up()  # also drops the code of functions that are not ours
        inline_call.tidy_up(ctx)
        small = plan.grain <= tuning.fine_grain and not plan.heavy
        executor = "SINGLE_THREADED_EXECUTOR" if small else ""
        # XLA needs none of these attributes, and each adds to the time of a launch.
        self._attrs: Any = () if whole else ("executor_type", executor, "config_proto", _config(ctx))
        self._inline: InlineCall | None = None
        if small and backend == "graph" and not ctx.num_gpus() and (self.count or emitter.written or emitter.late):
            self._inline = InlineCall(functions[-1].signature, _config(ctx), self.ops)
        self.launches = 0
        self.trusted = False  # whether it has been validated against its operations
        self.took = 0.0  # seconds that the last synchronous launch took
        self.audited_in = 0.0  # seconds that the last audit took
        self.audit_at = 0  # number of launches after which it may be audited again
        self.size = plan.size
        self.written = plan.written
        self.tables = plan.row_updates.size(plan.feeds)  # bytes of the variables that it updates in place
        self.loaded = False  # whether XLA's code for it was loaded from disk
        self._finalizer = weakref.finalize(self, _remove, ctx, names, self._inline)
        self._finalizer.atexit = False

    def launch(self, feeds: list[Any], seeds: list[Pair], into: list[Any] | None = None) -> list[Any] | None:
        """Runs the segment and returns its outputs; None if a predicate was false, in which case nothing was written.

        The raw results are also appended to `into`, in the form that `unpacked` takes, in the same C call as the
        launch: so an interrupt cannot lose the results of a launch that has run.
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

    def __str__(self) -> str:
        definition = self._context.get_function_def(self.name)
        signature = definition.signature
        lines = [f"executable {self.name}, {'by XLA' if self.backend == 'xla' else 'a graph'}"]
        lines[0] += f": {self.ops} operations, launched {self.launches} times"
        given = zip(signature.input_arg, self.feeds, strict=False)  # seeds come behind
        lines += [f"  {argument.name}: {spec!r}" for argument, spec in given]
        lines += [f"  {node.name} = {node.op}({', '.join(node.input)})" for node in definition.node_def]
        results = ", ".join(definition.ret[argument.name] for argument in signature.output_arg)
        return "\n".join([*lines, f"  gives {results or 'nothing'}"])

    def unpacked(self, results: list[Any]) -> list[Any] | None:
        """Returns the outputs among a launch's raw results; None if a predicate was false."""
        if not self.checked:
            return results
        return results[:-1] if results[-1] else None

    def prepare(self, device: str | None) -> None:
        """Has TensorFlow compile it for a device, by launching it on zeros and temporary variables.

        TensorFlow caches the code by name and shapes, so the program's first launch hits that cache.
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
            with xla_code_cache.kept(self.name) as code:  # one by one: the operations between may fail on zeros
                for name, arguments, count in self.parts:
                    ctx = self._context
                    execute_function(ctx._handle, ctx.device_name, name, [made(spec) for spec in arguments], (), count)
            self.loaded = code.loaded

    def call_inline(self) -> None:
        """Has it be launched on the calling thread from now on, if it ever is: at its best."""
        if self._inline is not None:
            self._inline.begin()

    def _execute(self, feeds: list[Any], into: list[Any]) -> None:
        """Launches it, and appends the list of raw results to `into`."""
        ctx, inline = self._context, self._inline
        if inline is None or not inline.takes_next():
            given = ctx._handle, ctx.device_name, self.name, feeds, self._attrs, self.count
            into.extend(itertools.starmap(execute_function, (given,)))
            return
        given = ctx._handle, ctx.device_name, inline_call.OP, feeds, inline.attrs, self.count
        thread = inline_call.enter()
        try:
            into.extend(itertools.starmap(execute_function, (given,)))
        finally:
            inline_call.leave(thread)

    def _first(self, feeds: list[Any], into: list[Any]) -> None:
        """Launches for the first time: XLA compiles, or reuses code on disk for an equal function."""
        with xla_code_cache.kept(self.name) as code:
            self._execute(feeds, into)
        self.loaded = code.loaded


class BoundGraph(Executable):
    """A graph shared by several executables, which is launched with arguments of this one's besides the feeds."""

    def __init__(self, shared: Executable, plan: Plan, name: str) -> None:
        self.backend = "graph"
        self.feeds, self.size = plan.feeds, plan.size
        self.tables, self.written = plan.row_updates.size(plan.feeds), plan.written
        self.outputs, self.given = shared.outputs, shared.given  # possibly more than the plan needs
        self.name = name
        self.ops = self.folded = 0  # it holds no operations of its own
        self.checked = self.loaded = self.trusted = False
        self.parts, self.varying = [], []
        self.launches = self.audit_at = 0
        self.took = self.audited_in = 0.0
        self.shared = shared

    def arguments(self, feeds: list[Any]) -> list[Any]:
        """Returns what the graph is given besides these feeds."""
        raise NotImplementedError

    def call_inline(self) -> None:
        self.shared.call_inline()

    def _execute(self, feeds: list[Any], into: list[Any]) -> None:
        self.shared._execute([*feeds, *self.arguments(feeds)], into)


class Alone:
    """A block as a graph function of its own: for recursion, which cannot be replayed operation by operation."""

    def __init__(self, block: Block, specs: tuple[Spec, ...]) -> None:
        """Emits and registers a block whose inputs have `specs`; raises `NotImplementedError` if it may fail."""
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
        """Runs it on these tensors; returns its results."""
        attrs = "executor_type", "", "config_proto", _config(self._context)
        return list(
            execute_function(self._context._handle, self._context.device_name, self._name, given, attrs, self._count)
        )


def _named(functions: list[Any], feeds: tuple[Spec, ...]) -> list[Any]:
    """Returns the functions renamed after their content, so that equal ones share names, also across processes.

    TensorFlow reference-counts functions of the same name and content.
    """
    plain = [function.SerializeToString(deterministic=True) for function in functions]
    name = _NAME.format(digest(b"\n".join([*plain, repr(feeds).encode()])))
    return [function_pb2.FunctionDef.FromString(p.replace(_UNNAMED.encode(), name.encode())) for p in plain]


def _config(ctx: Any) -> bytes:
    """Returns the serialized session config of a launch, with Grappler disabled.

    Grappler changes values (x + 0.0 is not x for -0.0), and took two thirds of the first launch's time (2078
    operations: 1.2 s with it, 0.45 without) for no measurable gain in later launches.
    """
    config = config_pb2.ConfigProto()
    config.ParseFromString(ctx.function_call_options.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return bytes(config.SerializeToString())


def _remove(ctx: Any, names: list[str], inline: InlineCall | None = None) -> None:
    """Unregisters functions; `inline`: how the last one may have been called."""
    for name in names:
        if ctx.has_function(name.encode()):
            ctx.remove_function(name)
    if inline is not None:
        inline.drop(ctx)
