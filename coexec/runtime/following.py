"""Following: answers a call's operations with lazy tensors while the cursor knows them, and launches segments.

Nothing runs before it is validated: what is launched has been issued by the running Python and matched. So a
divergence needs no way back: what is pending is carried out, and a recorder takes over in the same Python frame.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coexec.events import Kind, Ledger
from coexec.options import Divergence, Options
from coexec.runtime.flight import Flight
from coexec.runtime.library import LibraryCalls
from coexec.runtime.pending import carry_out, is_urgent, launch_beside
from coexec.runtime.references import Reference, referenced
from coexec.runtime.segments import Segments
from coexec.runtime.structures import is_function
from coexec.runtime.tapes import Tapes
from tracer import intercept, operators
from tracer.constants import constant_output, index_outputs
from tracer.cursor import FORCED, Cursor, Mismatch
from tracer.errors import FailedTensor
from tracer.graph import Step, TraceGraph
from tracer.inputs import as_spelled, settle, small, spelled
from tracer.intercept import tape_is_empty
from tracer.lazy import LazyTensor, has_pending, new_lazy
from tracer.library import has_strategy
from tracer.location import place_of
from tracer.op import plain_name, signature_of
from tracer.recorder import FINALIZERS, Recorder
from tracer.trace import Trace

_new = LazyTensor.__new__

# So many operations of a call raise a failure again that nobody could have caught.
REFUSALS = 1000

# Set by `coexec.testing`: the number of the operation at which the cursor reports a mismatch.
forced_event: int = -1
assert operators  # imported for what it installs

# One for all calls: they may use each other's tensors and variables, in any order. In a forked child it is free.
_lock = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class Following:
    """The handler of one call that is followed; after a divergence it passes on to a recorder."""

    # Each call makes one, and objects with more than 30 attributes do not share what a dict of them takes.
    __slots__ = ("__dict__", "_refused", "ahead", "assertions", "awaited", "before", "constants", "cursor", "deferred",
                 "device", "error", "flight", "forced", "graph", "jumped", "launched", "ledger", "library", "notes",
                 "open", "options", "owner", "recorder", "regions", "replayed", "segments", "survivors", "tapes",
                 "telling", "trial", "unseen", "values")  # fmt: skip
    lock = _lock

    def __init__(self, graph: TraceGraph, segments: Segments, ledger: Ledger, options: Options) -> None:
        self.graph, self.segments, self.ledger, self.options = graph, segments, ledger, options
        self.cursor = Cursor(graph)
        self.values: list[LazyTensor] = []  # the tensors of the running segment
        self.constants: list[LazyTensor] = []  # those that were made of Python values
        self.forced = forced_event
        self.recorder: Recorder | None = None
        self.error: BaseException | None = None
        self.owner, self.device = threading.get_ident(), intercept.device_in_scope()
        self.deferred: BaseException | None = None  # an error that the next operations are to raise
        self._refused = 0  # how many have
        self.unseen: BaseException | None = None  # an error that the call is to end with
        self.survivors: list[Reference] = []
        self.telling: list[LazyTensor] = []  # those that are not to end before the call
        self.tapes = Tapes(self.constant)
        self.open = self.tapes.waiting = self.options.regions and not self.tapes.foreign and not has_strategy()
        self.library = LibraryCalls(self).call
        self.assertions: dict[Step, Any] = {}  # what those of the running segment say that say something else each time
        self.notes: dict[Step, Any] = {}  # the same of what Keras adds to errors
        self.awaited: Step | None = None  # what is carried out while its place in the program waits for that
        self.regions = self.jumped = 0  # library calls that were jumped over, and their operations
        self.launched = self.replayed = 0  # segments, as a whole and operation by operation
        self.flight: tuple[Step, Flight] | None = None  # what is being launched beside Python, up to which step
        self.trial: Any = None  # what the call is timed for: a decision that the device takes, or Python
        self.before: Any = None  # what the call before has left under way
        self.ahead: Any = None  # what this one leaves

    def expected(self, op: str, args: tuple[Any, ...]) -> Any:
        """Answers an operation if it is the one that comes next, and one tensor comes out; else returns None."""
        with _lock:
            cursor = self.cursor
            step = cursor.step.hot
            if step is None or self.recorder is not None or self.forced >= 0:
                return None
            if step.spelled is not None:
                args = as_spelled(step.spelled, args, self)
            if step.plain:
                if not cursor.is_next(step, op, args):
                    return None
            elif not step.single or step.host or step.risky is not False or not cursor.fits(step, op, args, None):
                return None
            lazy: LazyTensor = _new(LazyTensor)  # `new_lazy`, without the call
            lazy._out = step.outputs[0]
            lazy._key = cursor.base + step.first
            lazy._run = self
            lazy._value = None
            self.values.append(lazy)
            cursor.step = step
            if not tape_is_empty():
                self.tapes.record(step, op, args, lazy, cursor.externals)
            return lazy

    def fast(self, op: str, name: Any, args: tuple[Any, ...]) -> Any:
        """Answers an operation issued by a generated wrapper."""
        if self.recorder is not None:
            if self.deferred is not None:
                self._raise_deferred()
            return self.recorder.fast(op, name, args)
        result = self.expected(op, args)
        if result is not None:
            return result
        with _lock:
            cursor = self.cursor
            step = cursor.step.hot
            known = args if step is None or step.spelled is None else as_spelled(step.spelled, args, self)
            if step is not None and not step.host and self.forced < 0 and cursor.fits(step, op, known, None):
                args, result = known, self._answer(step)
                cursor.step = step
            else:
                step, args = self._match_fast(op, args)
                result = self._answer(step) if step is not None and not step.host else None
            if step is not None and not step.host:
                if not tape_is_empty():
                    self.tapes.record(step, op, args, result, cursor.externals)
                if step.risky is not False and is_urgent(self, step):
                    self._launch_behind(step)
                return result
        # Not under the lock: the operation may run Python on other threads, and wait for them.
        if step is None and self.recorder is not None:
            return self.recorder.fast(op, name, args)
        inputs = [v for v in args if isinstance(v, tf.Tensor)] if step is not None and step.early else None
        return self._run(lambda: intercept.run_fast(op, name, args), inputs)

    def _run(self, operation: Callable[[], Any], inputs: list[Any] | None = None) -> Any:
        """Runs an operation that is no part of a segment; `inputs`: all that tapes could watch, where that is known."""
        self.tapes.noted(operation, inputs)
        with intercept.handling(None):
            result = operation()
        self.cursor.made.update(t._id for t in intercept.flat_outputs(result) if isinstance(t, tf.Tensor))
        return result

    def _match_fast(self, op: str, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Returns the step that the operation is; None after a divergence, or if it is no part of the program."""
        cursor = self.cursor
        if self._is_no_step(op, args):
            return None, args
        step = cursor.advance(op, args, None)
        if step is not None and step.host:
            args = settle(signature_of(op), args)  # type: ignore[arg-type]  # only known operations have such steps
        elif step is None:
            signature = signature_of(op)
            if signature is None:
                self._diverge(Mismatch("new operation", "a registered operation", op, ""))
                return None, args
            given, args = args, settle(signature, args)
            if self.recorder is not None or self._is_forced():  # what settling issued was not known
                return None, args
            step = cursor.advance(op, args, None) if args is not given else None
            if step is None:
                count = len(signature.inputs)
                step = cursor.adopt("fast", op, args[:count], args[count:], args)
            if step is not None and args is not given:
                step.spelled = spelled(given, args) or None
            if step is None and cursor.mismatch is not None and cursor.mismatch.kind == "unsupported input":
                # TensorFlow refuses it, most likely, and the program hears so; it is no part of the graph.
                self.ledger.cause(Kind.CUT, f"{op} refuses its input: {cursor.mismatch.seen}", cursor.mismatch.location)
                self._finalize(args)
                return None, args
            if step is None:
                self._diverge(cursor.mismatch)
                return None, args
        if step.host and (not step.early or has_pending(args)):
            self._cut_for(step, op)
        return step, args

    def _is_no_step(self, op: str, inputs: tuple[Any, ...]) -> bool:
        """Whether an operation is no part of the program, or ends the following; lands what is in flight."""
        if op in FINALIZERS:
            self._finalize(inputs)
            return True
        if self.flight is not None:
            self.flush()
        return self._is_forced()

    def _is_forced(self) -> bool:
        if not 0 <= self.forced <= self.cursor.count():
            return False
        self._diverge(FORCED)
        return True

    def execute(self, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any) -> Any:
        """Answers an operation or function issued by name."""
        recorder = self.recorder
        if recorder is not None:
            if self.deferred is not None:
                self._raise_deferred()
            return recorder.execute(device, op, inputs, attrs, outputs, cancel)
        name = plain_name(op)
        call = self.segments.functions.call
        if self.forced < 0 and is_function(op) and (found := call(self, op, inputs)) is not None:
            return found
        with _lock:
            step = self._match_execute(name, tuple(inputs), tuple(attrs or ()))
            if step is not None and not step.host:
                result = self._answer(step)
                if step.risky is not False and is_urgent(self, step):
                    self._launch_behind(step)
                return result
        if step is None and self.recorder is not None:
            return self.recorder.execute(device, op, inputs, attrs, outputs, cancel)
        return self._run(lambda: intercept.run_execute(device, op, inputs, attrs, outputs, cancel))

    def _match_execute(self, name: str, inputs: tuple[Any, ...], attrs: tuple[Any, ...]) -> Any:
        if self._is_no_step(name, inputs):
            return None
        step = self.cursor.advance(name, inputs, attrs) or self.cursor.adopt("execute", name, inputs, attrs, ())
        if step is None:
            self._diverge(self.cursor.mismatch)
        elif step.host:
            self._cut_for(step, name)
        return step

    def constant(self, value: Any, dtype: Any) -> Any:
        """Answers with a lazy tensor of a small Python value: its conversion waits until somebody needs it."""
        if self.recorder is not None:
            return self.recorder.constant(value, dtype)
        if not small(value):
            return intercept.make_constant(value, dtype)
        out, tensor = constant_output(value, dtype)
        if out is None:
            return tensor
        lazy = new_lazy(out, -1, self)
        lazy._value = tensor
        self.constants.append(lazy)
        return lazy

    def index(self, index: tuple[tuple[int, ...], ...]) -> list[Any]:
        """Answers with lazy tensors of what an index consists of."""
        lazies = [new_lazy(out, -1, self) for out in index_outputs(index)]
        self.constants += lazies
        return lazies

    def aside(self, inputs: Any, run: Any) -> Any:
        """Runs an operation that the program has placed on a device; it is no part of the graph."""
        if self.recorder is not None:
            return self.recorder.aside(inputs, run)
        self._finalize(inputs)
        return self._run(run)

    def _answer(self, step: Step) -> Any:
        key = self.cursor.base + step.first
        if step.single:
            lazy = new_lazy(step.outputs[0], key, self)
            self.values.append(lazy)
            return lazy
        lazies = [new_lazy(out, key + n, self) for n, out in enumerate(step.outputs)]
        self.values.extend(lazies)
        return step.arrange(lazies)

    def _launch_behind(self, step: Step) -> None:
        """Launches up to an operation that may fail where user code could catch it, or behind which Python pauses."""
        if step.pause and self.cursor.step is step:  # accumulators issue operations of their own behind it
            launch_beside(self)
            return
        self.awaited = step
        try:
            self.flush()
        finally:
            self.awaited = None

    # Cuts.

    def __enter__(self) -> None:
        intercept.enter_run(self)

    def __exit__(self, kind: object, raised: object, *_: object) -> None:
        """Ends the call: everything is carried out, and an error that nobody could have caught is raised."""
        try:
            self.tapes.end()
            self.flush()
            unseen = self.unseen
            if unseen is not None and unseen is not raised and (raised is None or isinstance(raised, Exception)):
                raise unseen
        except BaseException:
            self.flush()  # what an interrupt has put off
            raise
        finally:
            intercept.leave_run(self)

    def flush(self) -> None:
        """Carries out what is pending; the tensors that somebody still holds have values afterwards."""
        with _lock:
            cursor = self.cursor
            cursor.step, flight = self.flight or (cursor.step, None)
            if flight is not None:
                cursor.step.pause = flight.is_worth_it()
            while cursor.step.parent is not None and cursor.step.end > len(self.values):
                cursor.step = cursor.step.parent  # matched and not answered: an interrupt came in between
            if self.recorder is None and cursor.step.parent is not None:
                carry_out(self, cursor.step)
                if flight is not None:
                    flight.resume()

    def settle_for(self, handles: list[Any]) -> None:
        """Carries out what is pending if that reads or writes one of these variables."""
        with _lock:
            if any(id(h) in self.cursor.handles for h in handles):
                with contextlib.suppress(Exception):  # the owner hears of it
                    self.flush()

    def settle_tape(self, tape: Any) -> None:
        """Puts on one of this call's tapes what waits for it: another thread asks it."""
        with _lock:
            if self.tapes.number(tape) >= 0:
                self.tapes.catch_up()

    def force(self, lazy: LazyTensor) -> None:
        """Gives one of this call's tensors its value."""
        with _lock:
            if lazy._value is None:
                step = self.cursor.step
                if step.parent is not None and step.visits == 0:
                    hint = "read it later, or together with others, if the program does not need it here"
                    self.ledger.cause(Kind.CUT, "a value was read", place_of(), hint)
                self.flush()
            if lazy._value is None:
                raise FailedTensor("the operation that makes this tensor failed, or one before it did") from self.error

    def decide(self, lazy: LazyTensor, frame: Any) -> bool:
        """Returns the truth of a tensor, for which the code of `frame` asks."""
        return self.segments.decisions.decide(self, lazy, frame)

    def _cut_for(self, step: Step, op: str) -> None:
        """Ends the segment before an operation that runs on its own, and goes on behind it."""
        assert step.parent is not None
        assert step.node is not None
        if step.parent.parent is not None:
            reason = step.node.host or "a shape depends on a number of Python's, which is a constant from now on"
            self.ledger.cause(Kind.CUT, f"{op} runs on its own: {reason}", step.node.location)
            carry_out(self, step.parent)
        else:
            self.cursor.cut()

    def _finalize(self, inputs: Any) -> None:
        if any(e is v for v in inputs for e in self.cursor.externals):
            self.flush()

    def _raise_deferred(self) -> None:
        error, self._refused = self.deferred, self._refused + 1
        assert error is not None
        # Eagerly nothing runs behind such an operation, so a handler that began later writes no state. But who tries
        # until something works is to come to an end, and who has interrupted the call may clean up.
        if self._refused >= REFUSALS or not isinstance(error, Exception):
            self.deferred = None
        raise error

    def close(self) -> list[LazyTensor]:
        """Lets go of everything that the call needed; returns its lazy tensors that somebody still holds."""
        constants, self.constants = self.constants, []
        self.tapes.close()
        self.open = False
        del self.library
        held = [reference() for reference in self.survivors]
        self.survivors, self.telling, self.deferred, self.unseen = [], [], None, None
        self.cursor.close()
        return [v for v in held if v is not None] + [constants[i] for i in referenced(constants)]

    # Divergence.

    def _diverge(self, mismatch: Mismatch | None) -> Recorder:
        """Carries out what is pending and lets a recorder take over."""
        self.flush()
        assert mismatch is not None
        self.ledger.cause(Kind.DIVERGENCE, str(mismatch), mismatch.location, mismatch.hint)
        recorder = self.record_from_here()
        if self.options.strict:
            raise Divergence(f"{mismatch}, at {mismatch.location}")
        return recorder

    def record_from_here(self) -> Recorder:
        cursor = self.cursor
        self.open = False
        self.tapes.catch_up()
        self.tapes.waiting = False
        self.recorder = Recorder(Trace(start=cursor.last), cursor.counts())
        return self.recorder
