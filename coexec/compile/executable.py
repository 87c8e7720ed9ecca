"""Executable: a plan emitted, compiled and registered with TensorFlow's runtime under a name.

Launched by that name: `TFE_Py_Execute` takes 10-25 us, `tf.function`'s call path 170-280 us (TensorFlow 2.21, CPU).
Relies on `Context.add_function_def`, `remove_function` and `function_call_options`.
"""

from __future__ import annotations

import itertools
import os
import weakref
from typing import Any

import tensorflow as tf

from coexec.lowering.emit import Emitter
from coexec.lowering.plan import Plan
from tracer.intercept import execute
from tracer.private import config_pb2, context
from tracer.spec import RESOURCE

# XLA's minimum and maximum on CPU drop NaNs unless told otherwise, and it is told once, before it first compiles.
if "xla_cpu_enable_fast_min_max" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_min_max=false".strip()

_names = itertools.count()

# A run of small kernels is faster on the calling thread (an MLP step took 0.46 ms against 0.53 ms).
SINGLE_THREADED_OPS = 200


class Executable:
    """A segment, ready to launch: `backend` is "xla" or "graph"."""

    def __init__(self, plan: Plan, backend: str) -> None:
        self.backend = backend
        self.outputs = plan.outputs
        self.given = frozenset(plan.outputs)
        self.feeds = plan.feeds
        self.ops = plan.live
        self.name = f"coexec_segment_{next(_names)}"
        emitter = Emitter(plan, checks=backend == "xla", name=self.name)
        definition = emitter.build().definition
        self.checked = bool(emitter.predicates)
        self.count = len(definition.ret)
        if backend == "xla":
            definition.attr["_XlaMustCompile"].b = True
        ctx = context.context()
        ctx.add_function_def(definition)
        self._context = ctx
        small = plan.live <= SINGLE_THREADED_OPS and not plan.heavy
        executor = "SINGLE_THREADED_EXECUTOR" if small else ""
        # XLA needs none of these, and each takes a launch's time.
        self._attrs: Any = () if backend == "xla" else ("executor_type", executor, "config_proto", _config(ctx))
        self.launches = 0
        self._finalizer = weakref.finalize(self, _remove, ctx, self.name)
        self._finalizer.atexit = False

    def launch(self, feeds: list[Any]) -> list[Any] | None:
        """Runs the segment and returns its outputs; None if a check failed, and then nothing was written."""
        ctx = self._context
        results = execute(ctx._handle, ctx.device_name, self.name, feeds, self._attrs, self.count)
        self.launches += 1
        if self.checked and not results.pop():
            return None
        return results

    def prepare(self, device: str | None) -> None:
        """Has TensorFlow compile it for a device, by a launch on zeros and on variables of its own.

        The compiled code is kept by name and shapes: the program's first launch then takes as long as its second.
        """
        variables = []
        feeds: list[Any] = []
        with tf.device(device), tf.init_scope():
            for spec in self.feeds:
                if spec.enum == RESOURCE and spec.handle is not None:
                    enum, shape = spec.handle[0]
                    variables.append(tf.Variable(tf.zeros(shape, tf.dtypes.as_dtype(enum)), trainable=False))
                    feeds.append(variables[-1].handle)
                else:
                    feeds.append(tf.zeros(spec.shape, spec.dtype))
            ctx = self._context
            execute(ctx._handle, ctx.device_name, self.name, feeds, self._attrs, self.count)


def _config(ctx: Any) -> bytes:
    """Returns the session config of a launch: without Grappler.

    It changes values (x + 0.0 is not x for -0.0), and took two thirds of the first launch's time (2078 operations:
    1.2 s with it, 0.45 without) for nothing that could be measured later.
    """
    config = config_pb2.ConfigProto()
    config.ParseFromString(ctx.function_call_options.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config.SerializeToString()


def _remove(ctx: Any, name: str) -> None:
    if ctx.has_function(name.encode()):
        ctx.remove_function(name)
