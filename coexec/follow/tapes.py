"""Tapes: followed operations on gradient tapes and forward accumulators, as if TensorFlow had run them.

Records may wait: what a library call would put on a tape is only needed if the tape is asked something that no known
call answers. From the first record that waits, all do, in order; `catch_up` puts them on the tapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from coexec.follow.backward import Backward, FunctionEntry
from coexec.follow.liveness import referenced
from coexec.follow.tape_entry import Constant, Entry, NamedEntry, record_on_tapes
from tracer.graph import CONST, LIST, Step
from tracer.intercept import flat_outputs, tape_is_empty, variable_accessed
from tracer.lazy import LazyTensor, Output
from tracer.private import EagerTensor, context, pywrap_tfe

_RUN_PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})


class Tapes:
    """The tapes of one call: which are active, and what has still to be put on them."""

    def __init__(self, constant: Constant) -> None:
        self._constant = constant
        self._owner = threading.get_ident()
        self.foreign = not tape_is_empty()  # whether somebody else's tapes record too
        self.known: list[Any] = []  # every tape that was opened in this call, in order
        self._numbers: dict[int, int] = {}  # of these, by their ids
        self.active: tuple[int, ...] = ()
        self.entries: list[Any] = []
        self._added: list[Any] = []  # those of library calls in the running segment
        self.waiting = False  # whether records wait
        self._done = 0  # entries that are on their tapes
        self._direct: set[int] = set()  # tapes with records that never were entries
        self._finished: set[int] = set()
        self._watches: list[tuple[int, Any, int]] = []  # by which tape, what, behind how many of its entries
        self.steps: list[Step] | None = None  # what a library call that is being observed has recorded
        self.variables: list[Any] | None = None  # and the variables that it has told tapes of
        self._told: dict[int, Any] = {}  # the variables, by id, that these tapes have heard of:
        self._told_by: tuple[int, ...] = ()
        # An operation that was answered by name: step, inputs, result. TensorFlow's Python records it next.
        self.answered: tuple[Step, tuple[Any, ...], Any] | None = None
        self.touched = False  # whether something has worked on the tapes past the handler
        self.functions = False  # whether some have backward functions of the program's
        # Who makes the calls of backward functions in the gradient that is being asked for; None: nobody cares.
        self.around: Callable[[Backward, tuple[Any, ...]], Any] | None = None

    # What happens to tapes.

    def opened(self, tape: Any) -> None:
        """A tape was made, and records."""
        self._numbers[id(tape)] = len(self.known)
        self.known.append(tape)
        self.active = (*self.active, len(self.known) - 1)

    def accumulates(self, accumulator: Any) -> None:
        """A forward accumulator was made: it wants to see every operation at once."""
        self._numbers[id(accumulator)] = len(self.known)
        self.known.append(accumulator)
        self._cannot_wait()

    def pushed(self, tape: Any) -> None:
        """A tape records from now on."""
        number = self.number(tape)
        if number >= 0:
            self.active = (*self.active, number)
        else:
            self._cannot_wait()

    def popped(self, tape: Any) -> None:
        """A tape records no more."""
        self.active = tuple(n for n in self.active if self.known[n] is not tape)

    def watched(self, tape: Any, tensor: Any) -> None:
        """A tape was told to watch a tensor; a constant is fed from now on: it is not any other of its value.

        The tape must know by then what it has recorded of the tensor before: that is not watched.
        """
        if type(tensor) is LazyTensor and tensor._out.const is not None:
            tensor.resolve()
            tensor._out = Output(tensor._out.spec, None, tensor._out.node)
        number = self.number(tape)
        before = len(self.entries_of(number))
        if before:
            self.catch_up()
        self._watches.append((number, tensor, before))

    def number(self, tape: Any) -> int:
        """Returns a tape's number; -1 for one of somebody else's."""
        number = self._numbers.get(id(tape), -1)
        return number if 0 <= number < len(self.known) and self.known[number] is tape else -1

    def accessed(self, variable: Any) -> None:
        """A variable was read, or written, where tapes may watch it for that."""
        if self.variables is not None and not any(known is variable for known in self.variables):
            self.variables.append(variable)

    def reads(self, variables: list[Any]) -> None:
        """Tells the active tapes that variables are read, of each once."""
        if self._told_by is not self.active:
            self._told_by, self._told = self.active, {}
        told = self._told
        for variable in variables:
            if id(variable) not in told:
                variable_accessed(variable)
                told[id(variable)] = variable

    def _cannot_wait(self) -> None:
        """Somebody wants to see every operation at once from now on."""
        self.asked()
        self._direct.update(self.active)
        self.foreign, self.waiting = True, False

    def bypassed(self, *_: Any) -> None:
        """Something is put on the active tapes past the handler: after what waits."""
        if not tape_is_empty():
            self.asked()
            self._direct.update(self.active)

    def noted(self, inputs: list[Any] | None) -> None:
        """An operation past the handler puts what becomes of these inputs (None: of any) on the active tapes.

        Nobody watches integers.
        """
        if inputs is None or not all(v.dtype.is_integer or v.dtype.is_bool for v in inputs):
            self.bypassed()

    def asked(self, *_: Any) -> None:
        """Something asks the tapes: they must know all there is."""
        self.touched = self.touched or not tape_is_empty()
        self.catch_up()

    def observe(self) -> None:
        """A library call begins that is to be memoized: what it records is listed, and put on the tapes at once."""
        self.steps, self.variables, self.touched = [], [], False

    def observed(self) -> tuple[list[Step], list[Any]]:
        """It has ended; returns the steps that it has recorded, and the variables that tapes have heard of."""
        steps, variables = self.steps or [], self.variables or []
        self.steps = self.variables = None
        return steps, variables

    # Records.

    def can_take(self, op: str) -> bool:
        """Returns whether an operation that runs on its own can be recorded later; Python inside asks its tapes now."""
        return self.waiting and op not in _RUN_PYTHON and not tape_is_empty()

    def takes(self, op: str, inputs: Any, attrs: Any, outputs: Any) -> bool:
        """Takes the record of an operation that TensorFlow has carried out by name; returns whether it waits here."""
        answered, self.answered = self.answered, None
        if answered is not None and outputs and flat_outputs(answered[2])[0] is flat_outputs(outputs)[0]:
            step, given, result = answered
            step.tape = step.tape or tuple(attrs)
            self.record(step, op, given, result, [])
            return True
        if not context.executing_eagerly():
            return self._of_a_graph()
        if self.can_take(op):
            self.record_alone(NamedEntry(op, inputs, attrs, outputs, self.active))
            return True
        self.bypassed()
        return False

    def takes_function(self, original: Any, op: str, outputs: Any, inputs: Any, function: Any, *forward: Any) -> bool:
        """Takes the record of an operation with a backward function of its own; returns whether it waits here.

        `original` is what puts it on the tapes, and `forward` what only accumulators ask for.
        """
        if not context.executing_eagerly():
            return self._of_a_graph()
        if not self.waiting or tape_is_empty():
            self.bypassed()
            return False
        self.record_alone(FunctionEntry(original, op, outputs, inputs, Backward(function), forward, self.active))
        self.touched = self.functions = True  # no library call that is being observed can do that later
        return True

    def _of_a_graph(self) -> bool:
        """Lets TensorFlow record a symbolic tensor, on which no gradient of this call's depends, behind what waits."""
        self.asked()
        return False

    def record_alone(self, entry: Any) -> None:
        """Lets the record of an operation wait that has run on its own."""
        self.entries.append(entry)
        if self.steps is not None:
            self._done = len(self.entries)
            entry.record(self._constant)

    def record(self, step: Step, op: str, args: tuple[Any, ...], result: Any, feeds: list[Any]) -> None:
        """Puts a followed operation on the active tapes, now or later; `feeds` are those of its segment."""
        args = _as_fed(step, args, feeds)
        if self.steps is not None:
            self.steps.append(step)
        if not self.waiting:
            self._direct.update(self.active)
            record_on_tapes(step, op, args, result, self._constant)
            return
        entry = Entry(step, op, args, result, self.active)
        self.entries.append(entry)
        if self.steps is not None:
            self._done = len(self.entries)
            entry.record(self._constant)

    def add(self, entry: Any) -> None:
        """Lets the records of a library call wait."""
        self.entries.append(entry)
        self._added.append(entry)

    def wait(self) -> None:
        """Lets records wait in this call from now on; the tapes know all that came before."""
        self.waiting = True

    def join(self, first: int, entry: Any) -> None:
        """Replaces the records from the `first` on, which are on their tapes, by one that stands for all of them."""
        self.entries[first:] = [entry]
        self._done = len(self.entries)

    def keep(self) -> None:
        """Makes what waiting records will need of the segment that ends now."""
        for entry in self._added:
            if not self._finished.issuperset(entry.tapes):
                entry.keep()
        self._added = []

    def catch_up(self) -> None:
        """Puts everything that waits on the tapes that were active when it was issued.

        What an error keeps from its tape goes on waiting.
        """
        first, self._done = self._done, len(self.entries)
        pending = self.entries[first:]
        if all(self._finished.issuperset(entry.tapes) for entry in pending):
            return
        stopped, done = 0, 0
        while pywrap_tfe.TFE_Py_TapeSetIsStopped():
            pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
            stopped += 1
        active = self.active if threading.get_ident() == self._owner else ()  # which tapes are is the thread's
        numbers = {*active, *(number for entry in pending for number in entry.tapes)} - self._finished
        tapes, now = [(number, self.known[number]) for number in numbers], None
        try:
            for entry in pending:
                if entry.tapes != now:
                    now = entry.tapes
                    _activate(tapes, now)
                if not self._finished.issuperset(entry.tapes):
                    entry.record(self._constant)
                done += 1
        finally:
            self._done -= len(pending) - done
            for number, tape in tapes:  # as `_activate` does: no call of ours, at which an interrupt could come
                _tape_set_add(tape)
                if number not in active:
                    _tape_set_remove(tape)
            for _ in range(stopped):
                pywrap_tfe.TFE_Py_TapeSetStopOnThread()

    def finished(self, number: int) -> None:
        """A tape has given what it had: it and its records are let go."""
        self._finished.add(number)
        self.known[number] = object()  # the tensors on it would be given out
        self._drop()

    def _drop(self) -> None:
        kept = [entry for entry in self.entries if not self._finished.issuperset(entry.tapes)]
        self._done -= sum(self._finished.issuperset(entry.tapes) for entry in self.entries[: self._done])
        self.entries = kept

    def alive(self) -> bool:
        """Returns whether somebody may still ask a tape about this call's tensors."""
        return not tape_is_empty() or bool(self.known and referenced(self.known))

    def end(self) -> None:
        """Ends the call: tapes that outlive it get all their records, the others none."""
        if self.entries:
            self._finished.update(set(range(len(self.known))).difference(self.active, referenced(self.known)))
            self._drop()
            self.catch_up()
            self.entries = []
            self._done = 0

    def close(self) -> None:
        """Lets go of everything."""
        self.known, self.entries, self._added, self._watches = [], [], [], []
        self._constant = _gone

    # What a tape has seen, in a form that can be compared from call to call.

    def history(self, number: int, place: Callable[[Any], Any], origin: int) -> tuple[Any, ...] | None:
        """Returns all that a tape has recorded and watched; `place` names tensors. None if that is not known.

        `origin`: the first key of the call's tensors.
        """
        if not self.waiting or number in self._direct or number in self._finished:
            return None
        seen: list[Any] = []
        for entry in self.entries:
            if number not in entry.tapes:
                continue
            brief = entry.brief(origin)
            if brief is not None:
                seen.append(brief)
                continue
            given = tuple([  # most are tensors of this call, which `place` would name by their keys
                v._key - origin if type(v) is LazyTensor and v._key >= origin and v._out.const is None else place(v)
                for v in entry.given()
            ])  # fmt: skip
            try:
                seen.append((entry.identity(), given, entry.tapes))
            except TypeError:  # attributes that cannot be compared
                return None
        watches = [(place(tensor), before) for n, tensor, before in self._watches if n == number]
        return number, tuple(seen), tuple(watches)

    def entries_of(self, number: int) -> list[Any]:
        """Returns what a tape was to record, in order."""
        return [entry for entry in self.entries if number in entry.tapes]


def _gone(value: Any, dtype: Any) -> Any:
    raise AssertionError("the call is over")


_tape_set_add = pywrap_tfe.TFE_Py_TapeSetAdd
_tape_set_remove = pywrap_tfe.TFE_Py_TapeSetRemove


def _activate(tapes: list[tuple[int, Any]], numbers: tuple[int, ...]) -> None:
    """Has of these tapes those of the `numbers` record, and no others, whichever did.

    Each is added first, which does nothing where it is there: in removing one that is not, TensorFlow would give up a
    reference that it never took.
    """
    for number, tape in tapes:
        _tape_set_add(tape)
        if number not in numbers:
            _tape_set_remove(tape)


def _as_fed(step: Step, args: tuple[Any, ...], feeds: list[Any]) -> tuple[Any, ...]:
    """Returns the arguments with Python values that are fed replaced by what is fed for them.

    So a gradient that is followed as one finds them among what the tape has seen.
    """
    changed: list[Any] | None = None
    for i, slot in enumerate(step.slots):
        value = args[i]
        if slot == LIST:
            if not all(isinstance(v, EagerTensor) for v in value):
                changed = changed or list(args)
                changed[i] = [_fed(s, v, feeds) for v, s in zip(value, step.lists[i][0], strict=True)]
        elif CONST < slot < 0 and not isinstance(value, EagerTensor):
            changed = changed or list(args)
            changed[i] = _fed(slot, value, feeds)
    return args if changed is None else tuple(changed)


def _fed(slot: int, value: Any, feeds: list[Any]) -> Any:
    return feeds[-1 - slot] if CONST < slot < 0 and not isinstance(value, EagerTensor) else value
