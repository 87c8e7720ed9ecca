"""Batch: the handler of a batched call. Operations wait, grouped by kind and depth, until a value is needed.

An operation that has a rule and cannot fail is appended to the group of its kind at its depth, and answered with a lazy
tensor whose key says in which buffer and row its value will be. A read launches all groups that wait. Any other
operation runs at once, as it would eagerly, on values; so what waits never changes state, and never fails.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coexec.base.causes import Kind as Cause
from coexec.base.stats import EventLog
from coexec.base.tuning import tuning
from coexec.batching.batch_sites import BatchSite, Knowledge, in_range, site_of
from coexec.batching.batch_tapes import BatchedEntry, BatchTapes
from coexec.batching.buffers import CONST_KEY, SHIFT, Buffers, shared_key
from coexec.batching.kinds import Folded, OpKind
from coexec.batching.launches import Launch, launch
from coexec.batching.plain_launch import launch_plainly, wrong_groups
from coexec.batching.rules import INDEXED, MANY, RULES
from coexec.batching.schedule import Group, GroupBlock, blocks_of
from coexec.follow.call_state import lock
from coexec.follow.liveness import Reference, referenced
from coexec.follow.tape_entry import FastEntry
from tracer import intercept
from tracer.constants import constant_output, index_outputs
from tracer.errors import FailedTensor
from tracer.faults import OURS, absorbs, call
from tracer.inputs import PLAIN, Unsupported, python_spec, settle, small
from tracer.intercept import tape_is_empty
from tracer.lazy import LazyTensor, Output, has_pending, new_lazy
from tracer.op import Signature, array_in, freeze, signature_of
from tracer.private import EagerTensor, context, record
from tracer.spec import RESOURCE, Spec, describe_handle, spec_of

_new = LazyTensor.__new__
_MISSING = object()


class Batch:
    """The handler of one batched call."""

    open = records = False
    watches = None

    def __init__(self, knowledge: Knowledge, ledger: EventLog, strict: bool) -> None:
        self.device = intercept.device_in_scope()
        self.ledger = ledger
        self.buffers = Buffers()
        self.launches: list[Launch] = []
        self.handles: dict[int, tuple[Any, tuple[int, ...]]] = {}  # by buffer: the variable read, under which tapes
        self.tapes = BatchTapes(self.constant, self)
        self.resting = False  # whether operations on values run at once, as after a gradient
        self.faults: list[BaseException] = []
        self.batched = 0  # operations that waited
        self.gradients = 0  # gradients taken through launches
        self._off = self.tapes.foreign
        self._knowledge = knowledge
        self._strict = strict
        self._sites: dict[Any, Any] = {}
        self._pending: list[Group] = []
        self._blocks: list[GroupBlock] = []  # still to be launched
        self.whole = True  # whether gradients may be taken through the launches
        self._reads: dict[Any, Any] = {}  # keys of variables' values, by handle and tapes
        self._values: list[LazyTensor] = []
        self._constants: list[LazyTensor] = []
        self._left: list[Reference] = []

    # The handler protocol.

    def expected(self, op: str, args: tuple[Any, ...]) -> Any:
        """Answers an operation of a kind that TensorFlow's Python has issued before; else returns None."""
        if self._off:
            return None
        with lock:
            return self._read(args[0]) if op == "ReadVariableOp" else self._take(op, args, None)

    def fast(self, op: str, name: Any, args: tuple[Any, ...]) -> Any:
        """Handles an operation issued by a generated wrapper."""
        if not self._off:
            if op == "ReadVariableOp":
                with lock:
                    found = self._read(args[0])
                if found is not None:
                    return found
            elif op in RULES or op in _FOLDING:
                signature = signature_of(op)
                assert signature is not None
                given, args = args, settle(signature, args)
                with lock:
                    found = self._take(op, args, signature)
                if found is not None:
                    return found
                return self._run_fast(op, name, args, given)
        return self._run_fast(op, name, args, args)

    def execute(self, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any) -> Any:
        """Handles an operation or function issued by name: it runs at once."""
        self._reads.clear()
        return intercept.without_handler(lambda: intercept.run_execute(device, op, inputs, attrs, outputs, cancel))

    def constant(self, value: Any, dtype: Any) -> Any:
        """Returns a lazy tensor for a small Python value, which is converted only on demand."""
        if self._off or not small(value):
            return intercept.make_constant(value, dtype)
        out, tensor = constant_output(value, dtype)
        if out is None:
            return tensor
        lazy = new_lazy(out, CONST_KEY, self)
        lazy._value = tensor
        self._constants.append(lazy)
        return lazy

    def index(self, index: tuple[tuple[int, ...], ...]) -> list[Any] | None:
        """Returns lazy tensors for the parts of an index."""
        if self._off:
            return None
        lazies = [new_lazy(out, CONST_KEY, self) for out in index_outputs(index)]
        self._constants += lazies
        return lazies

    def library(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a library call; its operations wait one by one."""
        return call(function, args, kwargs)

    def aside(self, inputs: Any, run: Any) -> Any:
        """Runs an operation that the program has placed on a device."""
        self._reads.clear()
        self.tapes.noted(None)
        return intercept.without_handler(run)

    def fault(self, error: BaseException) -> bool:
        """Continues the call imperatively if an error is a fault of the runtime; see `Handler.fault`."""
        if self._strict or not absorbs(error):
            return False
        with lock:
            self.faults.append(error)
            self._off = True
            with contextlib.suppress(Exception):
                self.flush()
            if self.tapes.waiting:
                self.tapes.catch_up()
                self.tapes.waiting = False
        return True

    def stop(self) -> None:
        """Launches what waits; from now on all operations run at once, recorded on the tapes as they run."""
        self._off = True
        self.flush()

    # Operations that run at once.

    def _run_fast(self, op: str, name: Any, args: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
        signature = signature_of(op)
        if signature is None or signature.stateful:
            self._reads.clear()
        if self.tapes.can_take(op):
            if signature is not None:
                args = settle(signature, args)
            run = functools.partial(intercept.run_settled, op, name, args, given, intercept.run_unrecorded)
            result = intercept.without_handler(run)
            try:
                self.tapes.record_alone(FastEntry(op, args, result, self.tapes.active))
            except Exception as error:
                if not self.fault(error):
                    raise
                intercept.record_fast(op, args, intercept.flat_outputs(result))
            return result
        self.tapes.noted([v for v in args if isinstance(v, tf.Tensor)])
        return intercept.without_handler(lambda: intercept.run_settled(op, name, args, given))

    def finish(self) -> None:
        """Does what the end of the call would have done, if that was prevented."""
        with lock:
            if self in intercept.runs():
                self.__exit__()

    def give_way(self) -> None:
        """Completes the end of a call that a fault of the runtime interrupted."""
        self.finish()
        for lazy in self.close():
            intercept.keep_while_alive(lazy)

    def _read(self, handle: Any) -> Any:
        """Returns the value of a variable as a lazy tensor; None if it is not to be batched."""
        if type(handle) is not EagerTensor or (tape_is_empty() and self.resting):
            return None
        key = self._value_of(handle, "ReadVariableOp")
        if key is None:
            return None
        spec = self.buffers.specs[shared_key(key)]
        lazy = new_lazy(_output(spec), key, self)
        self._values.append(lazy)
        if self.tapes.active:
            dtype = "dtype", spec.dtype
            self.tapes.entries.append(BatchedEntry("ReadVariableOp", (handle, *dtype), lazy, self.tapes.active))
        return lazy

    def _value_of(self, handle: Any, op: str) -> int | None:
        """Returns the key of a variable's value as it is now."""
        place = id(handle), self.tapes.active, op
        found = self._reads.get(place)
        if found is not None:
            return int(found[0])
        held = describe_handle(handle)
        if held is None or len(held) != 1 or held[0][1] is None or None in held[0][1]:
            return None
        dtype = tf.dtypes.as_dtype(held[0][0])
        value = intercept.without_handler(
            lambda: intercept.run_unrecorded("ReadVariableOp", None, (handle, "dtype", dtype))
        )
        key = self.buffers.share(value, spec_of(value))
        self._reads[place] = key, handle
        self.handles[shared_key(key)] = handle, self.tapes.active
        return key

    # Operations that wait.

    def _take(self, op: str, args: tuple[Any, ...], signature: Signature | None) -> Any:
        """Lets an operation wait, and returns its result; None if it cannot. `signature`: given if it may be new."""
        if op not in RULES and signature is None:
            return None
        if self.resting and not has_pending(args):
            return None
        frame = sys._getframe(2)  # of the program: where it issues the operation
        while (inside := _CODES.get(id(frame.f_code), _CODES)) is None or (inside is _CODES and _is_library(frame)):
            frame = frame.f_back  # type: ignore[assignment]
        place = id(frame.f_code), frame.f_lasti
        if op == "StridedSlice":
            rows = self._knowledge.positions.rows(place, args)
            if rows is not None:
                given = args[0], self.constant(rows, tf.int32), 0, "batch_dims", 0
                return self._wait("GatherV2", given, signature_of("GatherV2"), place, (op, args))
        return self._wait(op, args, signature, place, (op, args))

    def _wait(
        self, op: str, args: tuple[Any, ...], signature: Signature | None, place: tuple[Any, ...], issued: Any
    ) -> Any:
        """Does the same for an operation issued at a place; `issued`: what tapes record, the operation or another."""
        known = signature_of(op)
        assert known is not None
        count, lists = len(known.inputs), known.lists
        indexed = INDEXED.get(op)
        structural = RULES[op][1] if op in RULES else ()
        key: list[Any] = [op, self.tapes.active, *place]
        rows: list[Any] = []
        pending = floating = 0  # inputs of this call or from outside, and those of them that may be part of a gradient
        at = -1
        for value in args:
            at += 1
            if at >= count:
                key.append(value)
                continue
            kind = type(value)
            if kind is LazyTensor:
                out = value._out
                if out.const is None:
                    number = value._key
                    if value._run is self and number != CONST_KEY:
                        if number >= 0:
                            key.append(out.spec)
                            rows.append(number)
                        else:
                            key.append(number)
                        pending += 1
                        floating += 1
                        continue
                    value = value.resolve()
                elif at in structural or (not out.spec.shape and indexed is None):
                    key.append(out)
                    continue
                else:
                    key.append(out.spec)
                    rows.append(out)
                    continue
            elif kind is not EagerTensor:
                if lists[at]:
                    if not self._listed(value, key, rows):
                        return None
                    floating += 1
                    continue
                if kind is float or kind is int or kind is bool:
                    key.append((kind, value if value else repr(value)))
                    continue
                if signature is None or value is None or not isinstance(value, (*PLAIN, list, tuple)):
                    return None
                try:
                    value = self.constant(value, python_spec(signature, at, args, value).dtype)
                except (Unsupported, TypeError, ValueError):
                    return None
                if type(value) is LazyTensor and (at in structural or not value._out.spec.shape):
                    key.append(value._out)
                    args = (*args[:at], value, *args[at + 1 :])
                    continue
                args = (*args[:at], value, *args[at + 1 :])
                if type(value) is LazyTensor:
                    key.append(value._out.spec)
                    rows.append(value._out)
                    continue
            if at in structural:
                key.append((at, freeze(array_in(value))))
                continue
            if value._datatype_enum() == RESOURCE:
                number = self._value_of(value, op) if op == "ResourceGather" else None
                if number is None:
                    return None
                key.append(number)
                pending += 1
                floating += 1
                continue
            pending += 1
            floating += not (value.dtype.is_integer or value.dtype.is_bool)
            self._outside(op, at, value, key, rows)
        # On constants, or on whole numbers from outside, it runs at once: its result may be an index.
        if (not pending and rows and all(type(row) is Output for row in rows)) or (pending and not floating):
            return None
        if indexed is not None and not in_range(indexed, args):
            return None
        try:
            site = self._sites.get(tuple(key), _MISSING)
        except TypeError:
            key = key[: 4 + count] + [freeze(v) for v in key[4 + count :]]
            site = self._sites.get(tuple(key), _MISSING)
        if site is _MISSING:
            site = self._sites[tuple(key)] = site_of(
                self._knowledge, self.buffers, op, args, known, key, signature is not None
            )
            if site is None and signature is None:
                del self._sites[tuple(key)]
        if site is None:
            return None
        return self._append(site, issued, rows)

    def _listed(self, values: Any, key: list[Any], rows: list[Any]) -> bool:
        """Adds a list input to a key and to the rows; returns False if it is not one of tensors."""
        if not isinstance(values, (list, tuple)) or not values:
            return False
        specs: list[Any] = []
        keys: list[Any] = []
        for value in values:
            kind = type(value)
            if (
                kind is LazyTensor and value._run is self and value._key != CONST_KEY and value._out.const is None
            ):
                specs.append(value._out.spec if value._key >= 0 else value._key)
                keys.append(value._key)
            elif kind is LazyTensor and value._out.const is not None:
                specs.append(value._out.spec)
                keys.append(value._out)
            elif kind is LazyTensor or kind is EagerTensor:
                value = value.resolve() if kind is LazyTensor else value
                specs.append(spec_of(value))
                keys.append(value)
            elif kind is np.ndarray and any(isinstance(v, tf.Tensor) and v.dtype == value.dtype for v in values):
                value = intercept.make_constant(value.copy(), None)  # the program may change it
                specs.append(spec_of(value))
                keys.append(value)
            else:
                return False
        if len(values) > tuning.batching_items and all(s is specs[0] for s in specs) and type(specs[0]) is not int:
            key.append((MANY, specs[0], len(values)))
            rows.append([self._row(k) for k in keys])
        else:
            key.append(tuple(specs))
            rows += [k for k in keys if type(k) is not int or k >= 0]
        return True

    def _outside(self, op: str, at: int, value: Any, key: list[Any], rows: list[Any]) -> None:
        """Adds a tensor from outside to a key: as a shared one if it is large, or the weight of a product."""
        number = self.buffers.known(value)
        spec = spec_of(value)
        if number is None and (
            (at == 1 and op in ("MatMul", "BiasAdd", "BatchMatMulV2"))
            or (at == 0 and op == "GatherV2")
            or value._num_elements() > tuning.batching_row
        ):
            if spec.dtype.is_floating or spec.dtype.is_integer:
                number = self.buffers.share(value, spec)
        if number is not None and number < 0:
            key.append(number)
            return
        key.append(spec)
        rows.append(value if number is None else number)

    def _row(self, value: Any) -> int:
        """Returns the key of a row: of this call, or from outside."""
        if type(value) is int:
            return value
        key = self.buffers.known(value)
        if key is None:
            spec = spec_of(value) if isinstance(value, tf.Tensor) else value.spec
            key = self.buffers.feed(value, spec)
        return key

    def _append(self, site: BatchSite, issued: tuple[str, tuple[Any, ...]], rows: list[Any]) -> Any:
        """Adds an instance to the group of its depth; returns its lazy tensors. `issued`: the operation for tapes."""
        kind = site.kind
        if isinstance(kind, Folded):
            lazies = [new_lazy(out, CONST_KEY, self) for out in kind.outputs]
            self._constants += lazies
            return lazies[0] if kind.single else lazies
        buffers = self.buffers
        depths = buffers.depths
        depth = 0
        for i, row in enumerate(rows):
            if type(row) is int:
                below = depths[row >> SHIFT]
                if below > depth:
                    depth = below
            elif type(row) is list:
                depth = max(depth, *(depths[k >> SHIFT] for k in row))
            else:
                rows[i] = self._row(row)
        for key in site.shared:
            below = depths[-2 - key]
            if below > depth:
                depth = below
        depth += 1
        group = site.groups.get(depth)
        if group is None:
            group = self._group(site, depth, len(rows))
        inputs = group.inputs
        for i, row in enumerate(rows):
            inputs[i].append(row)
        values = self._values
        if kind.alone:
            group.count = 1
            keys = [-2 - group.first - n for n in range(len(kind.outputs))]
        else:
            row = group.count
            group.count = row + 1
            if kind.single:
                lazy: LazyTensor = _new(LazyTensor)  # `new_lazy`, without the call
                lazy._out = kind.outputs[0]
                lazy._key = group.first << SHIFT | row
                lazy._run = self
                lazy._value = None
                values.append(lazy)
                if site.tapes:
                    self.tapes.entries.append(BatchedEntry(*issued, lazy, site.tapes))
                return lazy
            keys = [(group.first + n) << SHIFT | row for n in range(len(kind.outputs))]
        lazies = [new_lazy(out, k, self) for out, k in zip(kind.outputs, keys, strict=True)]
        values += lazies
        if site.tapes:
            self.tapes.entries.append(BatchedEntry(*issued, list(lazies), site.tapes))
        return lazies[0] if kind.single else lazies

    def _group(self, site: BatchSite, depth: int, inputs: int) -> Group:
        kind = site.kind
        assert isinstance(kind, OpKind)
        buffers = self.buffers
        first = buffers.count
        for out in kind.outputs:
            buffers.new(out.spec, depth, kind.alone)
        group = site.groups[depth] = Group(kind, depth, first, site)
        group.inputs = [[] for _ in range(inputs)]
        self._pending.append(group)
        return group

    # Values.

    def flush(self) -> None:
        """Launches everything that waits. What an interrupt leaves is launched by the next call."""
        with lock, intercept.handling(None), record.stop_recording(), _eagerly():
            buffers = self.buffers
            buffers.close_feeds()
            groups = self._pending
            blocks = blocks_of(groups, buffers, self._knowledge.programs)
            self._blocks += blocks
            self._pending = []
            for site in self._sites.values():
                if site is not None:
                    site.groups = {}
            while self._blocks:
                self._launch(self._blocks[0])
                self._blocks.pop(0)
            for group in groups:
                self.batched += group.count
                for n in range(len(group.kind.outputs)):
                    buffers.depths[group.first + n] = 0
            self.ledger.count(launches=len(blocks))

    def _launch(self, block: GroupBlock) -> None:
        buffers = self.buffers
        if any(group.kind.wrong for group in block.groups):
            self.whole = False
            launch_plainly(block, buffers)
            return
        try:
            launched = launch(block, buffers)
            wrong = wrong_groups(block, buffers) if tuning.validates_new else []
        except Exception as error:
            if self._strict or not absorbs(error):
                raise
            self.faults.append(error)
            self._off, self.whole = True, False
            launch_plainly(block, buffers)
            return
        self.launches.append(launched)
        for group in wrong:
            self._knowledge.refuse(group.kind)
            text = f"{group.kind.call.op} gave other values as a batch than one by one"
            self.ledger.cause(Cause.VALIDATION, text, self.ledger.name, "report it; it is not batched any more")
        if wrong:
            self.whole = False
            launch_plainly(block, buffers)

    def force(self, lazy: LazyTensor) -> None:
        """Computes the value of one of this call's tensors."""
        with lock:
            if lazy._value is not None:
                return
            key = lazy._key
            buffer = key >> SHIFT if key >= 0 else shared_key(key)
            if self.buffers.values[buffer] is None:
                self.flush()
            if self.buffers.values[buffer] is None:
                raise FailedTensor("the operations before it could not be carried out")
            with intercept.handling(None), record.stop_recording(), _eagerly():
                lazy._value = self.buffers.at(key)

    def decide(self, lazy: LazyTensor, frame: Any) -> bool:
        """Returns the truth value of a tensor that the code of `frame` tests."""
        return lazy.truth()

    # Begin and end.

    def __enter__(self) -> None:
        intercept.enter_run(self)

    def __exit__(self, *_: object) -> None:
        """Ends the call: launches what waits, and brings tapes up to date that outlive it."""
        try:
            self.tapes.end()
            self.flush()
        finally:
            intercept.leave_run(self)
            values, self._values = self._values, []
            self._left = [Reference(values[i]) for i in referenced(values)]
            self._sites, self._reads = {}, {}

    def settle_for(self, handles: list[Any]) -> None:
        """Forgets what variables held, as another thread uses some."""
        self._reads.clear()

    def settle_tape(self, tape: Any) -> None:
        """Brings one of this call's tapes up to date, as another thread is using it."""
        with lock:
            if self.tapes.number(tape) >= 0:
                self.tapes.catch_up()

    def close(self) -> list[LazyTensor]:
        """Computes and returns the tensors that are still referenced; releases the buffers."""
        self.tapes.close()
        constants, self._constants = self._constants, []
        left = [lazy for reference in self._left if (lazy := reference()) is not None]
        for lazy in left:
            lazy.resolve()
        left += [constants[i] for i in referenced(constants)]
        self.buffers, self.launches, self.handles = Buffers(), [], {}
        return left


def _eagerly() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which operations run, also where the program is tracing a graph."""
    return contextlib.nullcontext() if context.executing_eagerly() else tf.init_scope()


# By the id of code: the code, if it is the program's; None of a library's.
_CODES: dict[int, Any] = {}
_KEPT: list[Any] = []  # so that ids are not used again
_LIBRARIES = (*OURS, *(os.path.join(os.path.dirname(module.__file__ or ""), "") for module in (tf, keras)))


def _is_library(frame: FrameType) -> bool:
    """Returns whether a frame is a library's, and notes that."""
    code = frame.f_code
    inside = code.co_filename.startswith(_LIBRARIES) and frame.f_back is not None
    _CODES[id(code)] = None if inside else code
    _KEPT.append(code)
    return inside


_FOLDING = frozenset({"Shape", "ShapeN", "Size", "Rank", "Range", "Fill", "BroadcastGradientArgs"})  # by shapes


@functools.lru_cache(1024)
def _output(spec: Spec) -> Output:
    return Output(spec)
