"""Following: answers a call's operations with lazy tensors while the cursor matches them, and launches segments.

Nothing is speculative: only operations that the running Python has issued, and that matched, are launched. So a
divergence needs no rollback: pending operations are run, and a recorder takes over in the same Python frame.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from coexec.base.options import Options
from coexec.base.stats import EventLog, Kind
from coexec.base.tuning import tuning
from coexec.follow.assertions import ASSERTIONS, assume, assume_statement
from coexec.follow.call_state import CallState, Event, LateLaunch, Phase, after, lock
from coexec.follow.device_control import DeviceControl, Places
from coexec.follow.flush import (
    admit,
    carry_out,
    cut_at_join,
    diverge,
    flush,
    flush_for,
    is_forced,
    launch_behind,
    may_fail,
    memoized,
    settle_failures,
    settle_risk,
)
from coexec.follow.liveness import referenced
from coexec.follow.tape_entry import FastEntry
from coexec.launch.executor import SegmentExecutor
from tracer import intercept, keras_variables, operators
from tracer.callees import CALLED, Callee, name_in, named
from tracer.constants import constant_output, index_outputs
from tracer.cursor import Mismatch
from tracer.errors import FailedTensor
from tracer.faults import absorbs, is_fault, reraise
from tracer.graph import Node, Step, TraceGraph
from tracer.host_ops import MAKES_VARIABLE
from tracer.inputs import as_spelled, settle, small, spelled
from tracer.intercept import tape_is_empty
from tracer.lazy import LazyTensor, Output, has_pending, new_lazy, unwrap
from tracer.location import is_cleaning_up, place_of
from tracer.op import function_name, plain_name, signature_of
from tracer.open_sizes import close
from tracer.private import EagerTensor
from tracer.shape_sources import decide_early
from tracer.sizes import settled
from tracer.spec import INTEGERS, spec_of

_new = LazyTensor.__new__

assert operators  # imported for what they install
assert keras_variables

# Makes one of the program's library calls: function, positional and keyword arguments.
LibraryCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Follower(CallState):
    """The handler of one followed call; after a divergence it delegates to a recorder."""

    __slots__ = ("_places", "control", "library")

    def __init__(
        self,
        graph: TraceGraph,
        segments: SegmentExecutor,
        ledger: EventLog,
        options: Options,
        call_site: Callable[[Follower], LibraryCall],
        control: DeviceControl | None,
        before: LateLaunch | None = None,
        places: Places | None = None,
    ) -> None:
        super().__init__(graph, segments, ledger, options, before, self.constant)
        self.control, self._places = control, places
        self.joins = self.cursor.cuts_at_joins = control is None or control.is_idle
        self.cursor.opens = self.joins and options.jit_compile is not True
        if control is not None:
            self.tapes.told = control.watched
        self.tapes.settle = lambda: settle_failures(self, self._raise_deferred)
        self.library = call_site(self)

    def expected(self, op: str, args: tuple[Any, ...]) -> Any:
        """Handles an operation if it is the one expected next, and has one output; else returns None."""
        with lock:
            cursor = self.cursor
            step = cursor.step.hot
            if step is None or self.recorder is not None or self.forced >= 0:
                return None
            if step.spelled is not None:
                args = as_spelled(step.spelled, args, self)
            if step.plain:
                if not cursor.is_next(step, op, args):
                    return None
            elif not self._takes(step, op, args):
                return None
            lazy: LazyTensor = _new(LazyTensor)  # `new_lazy`, without the call
            out = step.outputs[0]
            lazy._out = out if out.__class__ is Output else settled(out, cursor.externals)
            lazy._key = cursor.base + step.first
            lazy._run = self
            lazy._value = None
            before = cursor.step
            self.values.append(lazy)
            cursor.step = step
            if not tape_is_empty():  # accumulators issue operations on the output
                try:
                    self.tapes.record(step, op, args, lazy, cursor.externals)
                except Exception:
                    self._retract(before, op)
                    raise
            return lazy

    def _takes(self, step: Step, op: str, args: tuple[Any, ...]) -> bool:
        """Returns whether an operation with one output is this step, and notes with which attributes tapes record it.

        TensorFlow issues it by name for inputs that its C++ code does not take, such as NumPy's scalars. What else it
        names then are dtypes, if only inputs are given here; they follow from these.
        """
        if step.host or step.risky is not False:
            return False
        if step.fast:
            return step.single and self.cursor.match(step, op, args, None)
        if len(args) != step.arity or len(step.outputs) != 1 or not self.cursor.match(step, op, args, step.attrs):
            return False
        step.tape = step.tape or step.attrs
        return True

    def fast(self, op: str, name: Any, args: tuple[Any, ...]) -> Any:
        """Handles an operation issued by a generated wrapper."""
        if self.recorder is not None:
            if self.phase is Phase.FAILED:
                self._raise_deferred()
            return self.recorder.fast(op, name, args)
        issued = args
        with lock:
            cursor = self.cursor
            before = cursor.step
            step = before.hot
            try:
                if step is None or step.host or self.forced >= 0 or self.recorder is not None:
                    step, args = self._step_of(op, args, None)
                else:  # `_step_of` for the last time's step, which is not compared again if it does not match
                    given = args if step.spelled is None else as_spelled(step.spelled, args, self)
                    if cursor.is_next(step, op, given) if step.plain else cursor.match(step, op, given, None):
                        if step.plain or (step.single and step.risky is False):
                            lazy: LazyTensor = _new(LazyTensor)  # `_answer`, without its calls
                            out = step.outputs[0]
                            lazy._out = out if out.__class__ is Output else settled(out, cursor.externals)
                            lazy._key = cursor.base + step.first
                            lazy._run = self
                            lazy._value = None
                            self.values.append(lazy)
                            cursor.step = step
                            if not tape_is_empty():  # accumulators issue operations on the output
                                self.tapes.record(step, op, given, lazy, cursor.externals)
                            return lazy
                        args = given
                        cursor.step = step
                    else:
                        step, args = self._step_of(op, args, None, step)
                result = self._answer(step) if step is not None and not step.host else None
                if step is not None and not step.host and not tape_is_empty():
                    self.tapes.record(step, op, args, result, cursor.externals)
            except Exception:
                self._retract(before, op)
                raise
            if step is not None and not step.host:
                try:
                    if step.risky is not False and settle_risk(self, step):
                        launch_behind(self, step)
                except Exception as error:  # by now the operation is part of the call
                    if not self.fault(error, step):
                        raise
                return result
        # Not under the lock: the operation may run Python on other threads, and wait for them.
        if step is None and self.recorder is not None:
            return self.recorder.fast(op, name, args, issued)
        return self._run_fast(step, op, name, args, issued)

    def _run_fast(self, step: Step | None, op: str, name: Any, args: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
        """Runs an operation issued by a generated wrapper, with the `given` arguments, that is not part of a segment.

        Not inlined in `fast`, whose arguments would become cells of the closures here.
        """
        if step is not None and self.tapes.can_take(op):
            run = intercept.run_unrecorded
            result = self.run_alone(lambda: intercept.run_settled(op, name, args, given, run), step)
            try:
                self.tapes.record_alone(FastEntry(op, args, result, self.tapes.active))
            except Exception as error:
                if not self.fault(error):
                    raise
                intercept.record_fast(op, args, intercept.flat_outputs(result))
            return result
        inputs = [v for v in args if isinstance(v, tf.Tensor)] if step is not None and step.early else None
        self.tapes.noted(inputs)
        return self.run_alone(lambda: intercept.run_settled(op, name, args, given), step)

    def run_alone(self, operation: Callable[[], Any], step: Step | None = None) -> Any:
        """Runs an operation that is not part of a segment; notes its results as made by the call."""
        try:
            result = intercept.without_handler(operation)
        except Exception:
            # Those before it have to run, or fail, before it does. (An interrupt is not its failure: the call ends.)
            if step is not None and step.early:
                self.flush()
            raise
        try:
            made = [t for t in intercept.flat_outputs(result) if isinstance(t, tf.Tensor)]
            node = step.node if step is not None else None
            self.cursor.made.update((t._id, node) for t in made)
            if node is not None and node.decides:
                self.cursor.decide(made)
        except Exception as error:
            if not self.fault(error):
                raise
        return result

    def _step_of(
        self, op: str, args: tuple[Any, ...], attrs: tuple[Any, ...] | None, tried: Step | None = None
    ) -> tuple[Step | None, tuple[Any, ...]]:
        """Moves the cursor to an operation's step, and cuts before one that runs on its own.

        Returns the step and its arguments; no step after a divergence, and for what is not part of the program. Each
        known step is compared once, `tried` not at all, unless variables or lists become tensors in between.

        `attrs`: None if they are at the end of `args`; see `Cursor.advance`.
        """
        cursor = self.cursor
        if self.recorder is not None or not admit(self, op, args):
            return None, args
        here, step = cursor.step, cursor.advance(op, args, attrs, tried)
        if attrs is None and (step is None or step.host):
            signature = signature_of(op)
            if signature is None:
                diverge(self, Mismatch("new operation", "a registered operation", op, ""))
                return None, args
            found, cursor.step = step, here  # operations issued by settling come before this one
            given, args = args, settle(signature, args)
            if self.recorder is not None or is_forced(self):  # those diverged
                return None, args
            if args is given and cursor.step is here:
                step, cursor.step = found, found or here
            else:
                step = cursor.advance(op, args, None)
            if step is None:
                count = len(signature.inputs)
                step = cursor.adopt("fast", op, args[:count], args[count:], args)
            if step is not None and args is not given:
                step.spelled = spelled(given, args) or None
            if step is None and cursor.mismatch is not None and cursor.mismatch.kind == "unsupported input":
                # TensorFlow most likely raises an error, which the program sees; it is not part of the graph.
                text = f"{op} refuses its input: {cursor.mismatch.seen}"
                self.ledger.cause(Kind.INPUT, text, cursor.mismatch.location)
                flush_for(self, args)
                return None, args
        elif step is None:
            assert attrs is not None
            step = cursor.adopt("execute", op, args, attrs, ())
        if step is None:
            diverge(self, cursor.mismatch)
        elif step.join:
            self._cut_at_join(step, op)
            return self._step_of(op, args, attrs)
        elif step.host and (not step.early or has_pending(args) or (op == MAKES_VARIABLE and may_fail(step.parent))):
            self._cut_for(step, op, args, attrs)
        return step, args

    def execute(self, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any) -> Any:
        """Handles an operation or function issued by name."""
        recorder = self.recorder
        if recorder is not None:
            if self.phase is Phase.FAILED:
                self._raise_deferred()
            return recorder.execute(device, op, inputs, attrs, outputs, cancel)
        name = plain_name(op)
        control = self.control
        if control is not None and self.forced < 0 and (found := control.call_function(self, op, inputs)) is not None:
            return found
        function = function_name(op)
        if function is not None and cancel is not None:
            return self._run_cancelable(lambda: intercept.run_execute(device, op, inputs, attrs, outputs, cancel))
        with lock:
            before = self.cursor.step
            try:
                given = tuple(attrs or ())
                step, _ = self._step_of(name, tuple(inputs), given if function is None else named(given, function))
                result = self._answer(step) if step is not None and not step.host else None
                if step is not None and step.node is not None and step.node.callee is not None:
                    result = self._completed(step.node, step.node.callee, result, inputs)
            except Exception:
                self._retract(before, name)
                raise
            if step is not None and not step.host:
                try:
                    if function is None and not tape_is_empty():  # TensorFlow records a function in another way
                        self.tapes.answered = step, tuple(inputs), result
                    if step.risky is not False and settle_risk(self, step):
                        launch_behind(self, step)
                except Exception as error:  # by now the operation is part of the call
                    if not self.fault(error, step):
                        raise
                return result
        if step is None and self.recorder is not None:
            return self.recorder.execute(device, op, inputs, attrs, outputs, cancel)
        return self.run_alone(lambda: intercept.run_execute(device, op, inputs, attrs, outputs, cancel), step)

    def _completed(self, node: Node, callee: Callee, computed: Any, inputs: Any) -> list[Any]:
        """Returns all results of a function: besides those that it computes, those that are known without a call."""
        results: list[Any] = [None] * len(callee.results)
        for number, tensor in zip(callee.computed, computed, strict=True):
            results[number] = tensor
        for number, (kind, found, *enum) in callee.known.items():
            if kind == "handle":  # another tensor, as it has a record of its own on tapes
                handle = unwrap(inputs[found])
                lazy = results[number] = new_lazy(Output(self.graph.handle_spec(handle)), -1, self)
                lazy._value = handle
            else:
                if kind == "shape":
                    ((_, shape),) = self.graph.handle_spec(unwrap(inputs[found])).handle
                    found = np.array(shape, tf.dtypes.as_dtype(enum[0]).as_numpy_dtype)
                results[number] = lazy = new_lazy(node.constant(number, found), -1, self)
            self.constants.append(lazy)
        return results

    def _run_cancelable(self, run: Callable[[], Any]) -> Any:
        """Runs a function that the program may cancel, after all that is pending; it is not part of the graph."""
        self.flush()
        self.tapes.noted(None)
        return self.run_alone(run)

    def constant(self, value: Any, dtype: Any) -> Any:
        """Returns a lazy tensor for a Python value; a small one is converted only on demand.

        All tensors that a call makes are of one class, as eagerly: Keras' tests compare that of two of them.
        """
        if self.recorder is not None:
            return self.recorder.constant(value, dtype)
        out, tensor = constant_output(value, dtype) if small(value) else (None, intercept.make_constant(value, dtype))
        if out is None:
            if type(tensor) is not EagerTensor:
                return tensor
            lazy = new_lazy(Output(spec_of(tensor)), -1, self)
            lazy._value = tensor
            self.note_array(tensor)
            return lazy
        lazy = new_lazy(out, -1, self)
        lazy._value = tensor
        self.constants.append(lazy)
        return lazy

    def index(self, index: tuple[tuple[int, ...], ...]) -> list[Any]:
        """Returns lazy tensors for the parts of an index."""
        lazies = [new_lazy(out, -1, self) for out in index_outputs(index)]
        self.constants += lazies
        return lazies

    def aside(self, inputs: Any, run: Callable[[], Any]) -> Any:
        """Runs an operation that the program has placed on a device; it is not part of the graph."""
        if self.recorder is not None:
            return self.recorder.aside(inputs, run)
        flush_for(self, inputs)
        self.tapes.noted(None)
        return self.run_alone(run)

    def answer(self, step: Step) -> list[LazyTensor]:
        """Returns lazy tensors for the outputs of the step that the cursor has just moved to."""
        key = self.cursor.base + step.first
        feeds = self.cursor.externals
        lazies = [new_lazy(settled(out, feeds), key + n, self) for n, out in enumerate(step.outputs)]
        self.values += lazies
        return lazies

    def _answer(self, step: Step) -> Any:
        lazies = self.answer(step)
        return lazies[0] if step.single else step.arrange(lazies)

    def _retract(self, before: Step, op: str) -> None:
        """Moves the cursor back over an operation that was matched, but not answered because of an error.

        Not over those issued to convert its inputs: they are answered, also if it goes TensorFlow's slow path instead.
        And not over a cut, behind which the earlier operations are carried out.
        """
        step = self.cursor.step
        if step.parent is before and step.node is not before.node and step.op == op and not step.host:
            self.cursor.step = before
            del self.values[before.end :]

    # Cuts.

    def __enter__(self) -> None:
        phase = after(self.phase, Event.BEGIN)
        intercept.enter_run(self)
        self.phase = phase

    def __exit__(self, kind: object, raised: object, *_: object) -> None:
        """Ends the call: runs what is pending, and raises an error that the program has not seen yet."""
        try:
            try:
                self.tapes.end()
                self.flush()
            except Exception as error:
                if not self.fault(error):
                    raise
                self.tapes.end()
            unseen = self.unseen
            if unseen is not None and unseen is not raised and (raised is None or isinstance(raised, Exception)):
                reraise(unseen)
        except BaseException:
            self.flush()  # carries out what the interrupt deferred
            raise
        finally:
            intercept.leave_run(self)
            self.move(Event.END)

    def flush(self) -> None:
        """Runs all pending operations; tensors that are still referenced have values afterwards."""
        flush(self)

    def settle_for(self, handles: list[Any]) -> None:
        """Runs all pending operations if they use one of these variables; their errors are left for the call itself."""
        with lock:
            try:
                if any(id(h) in self.cursor.handles for h in handles):
                    self.flush()
            except Exception as error:  # raised in the call's own thread later
                if is_fault(error):
                    with contextlib.suppress(Exception):
                        self.flush()

    def settle_tape(self, tape: Any) -> None:
        """Brings one of this call's tapes up to date, as another thread is using it."""
        with lock:
            if self.tapes.number(tape) >= 0:
                self.tapes.catch_up()

    def force(self, lazy: LazyTensor) -> None:
        """Computes the value of one of this call's tensors; raises `FailedTensor` if its operation failed."""
        with lock:
            if lazy._value is None:
                step = self.cursor.step
                if lazy._out.spec.enum in INTEGERS:
                    self.measure(lazy)
                if step.parent is not None:
                    if step.visits == 0:  # finding the place takes time
                        hint = "read it later, or together with others, if the program does not need it here"
                        step.reading = self.ledger.cause(Kind.READ, "a value was read", place_of(), hint)
                    elif step.reading is not None:
                        step.reading.count += 1
                self.flush()
            if lazy._value is None:
                raise FailedTensor("the operation that makes this tensor failed, or one before it did") from self.error

    def measure(self, lazy: LazyTensor) -> None:
        """Notes that the program asks for an open size (`tracer/open_sizes`), or an integer that depends on one."""
        with lock:
            if lazy._value is None and self.recorder is None:
                last = self.cursor.step if self.flight is None else self.flight[0]
                self.cursor.closing |= close(last, {lazy._key - self.cursor.base})

    def decide(self, lazy: LazyTensor, frame: FrameType) -> bool:
        """Returns the truth value of a tensor that the code of `frame` tests."""
        if frame.f_code in ASSERTIONS and assume(self, lazy, frame):
            return True
        if self.control is not None:
            return self.control.decide(self, lazy, frame)
        self.ledger.count("decisions")
        if (places := self._places) is not None and len(places) < tuning.max_decisions:
            key = frame.f_code, frame.f_lasti
            places[key] = places.get(key, (0,))[0] + 1, frame.f_globals
        return lazy.truth()

    def assume(self, condition: LazyTensor, message: list[str]) -> bool:
        """Assumes that the condition of an `assert` statement holds; see `assertions.assume_statement`."""
        return assume_statement(self, condition, message)

    def _cut_for(self, step: Step, op: str, args: tuple[Any, ...], attrs: tuple[Any, ...] | None) -> None:
        """Ends the segment before an operation that runs on its own; the next one begins after it."""
        assert step.parent is not None
        assert step.node is not None
        if step.parent.parent is not None:
            reason = step.node.host or "a shape depends on a number of Python's, which is a constant from now on"
            if step.node.host == CALLED and attrs is not None and (function := name_in(attrs)) is not None:
                reason = self.graph.callees.why(function)
            self.ledger.cause(Kind.CUT, f"{op} runs on its own: {reason}", step.node.location)
            base = self.cursor.base
            carry_out(self, step.parent)
            if step.node.host is not None:  # else what decides it will be a constant
                decide_early(step, args, base, self.cursor.made, memoized)
        else:
            self.cursor.cut()

    def _cut_at_join(self, step: Step, op: str) -> None:
        """Ends the segment before an operation that calls reach by ever other ways."""
        assert step.parent is not None
        assert step.node is not None
        self.cursor.step = step.parent
        text = f"calls reach {op} by ever other ways: what comes before it is launched on its own"
        if step.node.callee is not None:
            text = f"{op} reads variables that are written before it, or calls reach it by ever other ways"
        self.ledger.cause(Kind.CUT, text, step.node.location)
        cut_at_join(self, step.onward)

    def cut_where_ways_meet(self, cut: bool) -> None:
        """Sets whether segments end where ways meet, for operations that the cursor has no steps for."""
        self.cursor.meets = cut

    def _raise_deferred(self) -> None:
        if is_cleaning_up():  # as it would eagerly; what it raises is reported, and lost
            return
        error, self.refused = self.deferred, self.refused + 1
        assert error is not None
        # Eagerly nothing runs after such an operation, so an `except` entered later must not write state. But a retry
        # loop has to terminate, and after an interrupt the program may clean up.
        if self.refused >= tuning.max_raised_again or not isinstance(error, Exception):
            self.move(Event.RELENT)
            self.deferred = None
        reraise(error)

    def close(self) -> list[LazyTensor]:
        """Releases everything that the call needed; returns its lazy tensors that are still referenced."""
        constants, self.constants = self.constants, []
        self.tapes.close()
        self.open = False
        if hasattr(self, "library"):
            del self.library
        held = [reference() for reference in self.survivors]
        self.survivors, self.telling, self.deferred, self.unseen, self.arrays = [], [], None, None, {}
        if isinstance(self.error, tf.errors.OpError):  # its traceback's frames would keep it, and what they hold
            self.error = copy.copy(self.error)
        self.cursor.close()
        return [v for v in held if v is not None] + [constants[i] for i in referenced(constants)]

    # Faults, and early ends of the call.

    def fault(self, error: BaseException, awaited: Step | None = None) -> bool:
        """Continues the call imperatively if an error is a fault of the runtime; see `Handler.fault`.

        Returns False if the error must propagate. `awaited`: the operation that is already part of the call, and was
        about to be launched where the program issued it.
        """
        if self.options.strict or not absorbs(error):
            return False
        with lock:
            self.faults.append(error)
            if self.recorder is None or self.recorder.failed is None:
                try:
                    flush(self, awaited)
                    self.tapes.catch_up()
                except Exception as failure:
                    if not is_fault(failure):
                        failure.__suppress_context__ = True
                        self.record_plainly(error)
                        raise
                    flush(self, awaited)
                    self.tapes.catch_up()
                self.record_plainly(error)
        return True

    def is_under_way(self) -> bool:
        """Returns whether the call has begun but not ended, so that other threads may flush it."""
        return self.phase is not Phase.NEW and self.phase is not Phase.ENDED

    def finish(self) -> None:
        """Does what the end of the call would have done, if that was prevented."""
        if self.is_under_way():
            with lock:
                try:
                    self.flush()
                    self.tapes.end()
                finally:
                    if self in intercept.runs():
                        intercept.leave_run(self)
                    self.move(Event.END)

    def give_way(self) -> None:
        """Completes the end of a call that a fault of the runtime interrupted."""
        with lock:
            self.finish()
            if self.ahead is not None:
                self.ahead.land()
            else:
                if self.before is not None:
                    self.before.land()
                for lazy in self.close():
                    intercept.keep_while_alive(lazy)
