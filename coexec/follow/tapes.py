"""Tapes: records followed operations on gradient tapes and forward accumulators, as if TensorFlow had run them.

Records may be deferred: what a library call would put on a tape is needed only for a gradient that is not memoized.
From the first deferred record on, all are, in order; `catch_up` puts them on the tapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from coexec.follow.backward import Backward, FunctionEntry, LibraryEntry, closed
from coexec.follow.liveness import referenced
from coexec.follow.tape_entry import Constant, Entry, NamedEntry, record_on_tapes, without_sizes
from coexec.follow.tensor_names import TensorNames
from tracer.graph import CONST, LIST, Step
from tracer.intercept import flat_outputs, tape_is_empty, variable_accessed
from tracer.lazy import LazyTensor, Output
from tracer.private import EagerTensor, context, pywrap_tfe

_RUN_PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})


class Tapes:
    """The tapes of one call: which are active, and what is still to be put on them."""

    def __init__(self, constant: Constant, sizes: Sequence[Any] = ()) -> None:
        """`sizes`: of the feeds of ended segments that are for any size, to which others are added."""
        self._constant, self._sizes = constant, sizes
        self._owner = threading.get_ident()
        self.foreign = not tape_is_empty()  # whether tapes from outside the call record, too
        self.known: list[Any] = []  # every tape that was opened in this call, in order
        self._began: list[int] = []  # how many segments for any size had ended when each was opened
        # Those with records of a library call that was learnt in this call: once it is known, these are one record.
        self.unsettled: set[int] = set()
        self._numbers: dict[int, int] = {}  # indices in `known`, by id
        self.active: tuple[int, ...] = ()
        self.entries: list[Any] = []
        self._added: list[Any] = []  # entries of library calls in the running segment
        self.waiting = False  # whether records are deferred
        self._done = 0  # number of entries already on their tapes
        self._direct: set[int] = set()  # tapes with records that were never entries
        self._finished: set[int] = set()
        self._watches: list[tuple[int, Any, int]] = []  # the tape, the tensor, after how many of its entries
        self.steps: list[Step | LibraryEntry] | None = None  # recorded by the library call being observed
        self.variables: list[Any] | None = None  # variables it has accessed under tapes
        self._told: dict[int, Any] = {}  # variables, by id, already reported to these tapes:
        self._told_by: tuple[int, ...] = ()
        # An operation issued by name and answered: step, inputs, result. TensorFlow's Python records it next.
        self.answered: tuple[Step, tuple[Any, ...], Any] | None = None
        self.touched = False  # whether something has used the tapes directly
        self.functions = False  # whether any entry has a backward function of the program
        # Calls the backward functions of the running gradient; None: they are called directly.
        self.around: Callable[[Backward, tuple[Any, ...]], Any] | None = None
        self.told: Callable[[Any], None] | None = None  # who is told what tapes begin to watch
        self.settle: Callable[[], None] | None = None  # raises what has failed, or would at the next operation

    # Events of tapes.

    def opened(self, tape: Any) -> None:
        """Notes a new tape that records."""
        self._add(tape)
        self.active = (*self.active, len(self.known) - 1)

    def accumulates(self, accumulator: Any) -> None:
        """Notes a new forward accumulator, which must see every operation at once."""
        self._add(accumulator)
        self._cannot_wait()

    def _add(self, tape: Any) -> None:
        self._numbers[id(tape)] = len(self.known)
        self.known.append(tape)
        self._began.append(len(self._sizes))

    def pushed(self, tape: Any) -> None:
        """Notes that a tape starts recording."""
        number = self.number(tape)
        if number >= 0:
            self.active = (*self.active, number)
        else:
            self._cannot_wait()

    def popped(self, tape: Any) -> None:
        """Notes that a tape stops recording."""
        self.active = tuple(n for n in self.active if self.known[n] is not tape)

    def watched(self, tape: Any, tensor: Any) -> None:
        """Notes that a tape watches a tensor; a constant becomes a feed, distinct from others of the same value.

        The tape must be up to date by then: earlier uses of the tensor are not watched.
        """
        if self.told is not None:
            self.told(tensor)
        if type(tensor) is LazyTensor and tensor._out.const is not None:
            tensor.resolve()
            tensor._out = Output(tensor._out.spec, None, tensor._out.node)
        number = self.number(tape)
        before = len(self.entries_of(number))
        if before:
            self.catch_up()
        self._watches.append((number, tensor, before))

    def number(self, tape: Any) -> int:
        """Returns a tape's number; -1 for a foreign tape."""
        number = self._numbers.get(id(tape), -1)
        return number if 0 <= number < len(self.known) and self.known[number] is tape else -1

    def accessed(self, variable: Any) -> None:
        """Notes that a variable was read or written, so that tapes may watch it."""
        if self.variables is None:
            return
        for known in self.variables:  # not a generator: while a call is observed, each of its items is an event
            if known is variable:
                return
        self.variables.append(variable)

    def reads(self, variables: list[Any]) -> None:
        """Reports to the active tapes that variables are read, each once."""
        if self._told_by is not self.active:
            self._told_by, self._told = self.active, {}
        told = self._told
        for variable in variables:
            if id(variable) not in told:
                variable_accessed(variable)
                told[id(variable)] = variable

    def _cannot_wait(self) -> None:
        """Ends deferring, as every operation must be recorded at once from now on."""
        self.asked()
        self._direct.update(self.active)
        self.foreign, self.waiting = True, False

    def bypassed(self, *_: Any) -> None:
        """Prepares for a record put on the active tapes directly: deferred ones go first."""
        if not tape_is_empty():
            self.asked()
            self._direct.update(self.active)

    def noted(self, inputs: list[Any] | None) -> None:
        """Prepares for an operation on these inputs (None: any) that TensorFlow records directly.

        Tapes do not watch integers.
        """
        if inputs is None or not all(v.dtype.is_integer or v.dtype.is_bool for v in inputs):
            self.bypassed()

    def asked(self, *_: Any) -> None:
        """Brings the tapes up to date, as something is using them directly."""
        self.touched = self.touched or not tape_is_empty()
        self.catch_up()

    def gradient(self, tape: Any, target: Any, sources: Any, given: Any, *others: Any) -> Any:
        """Returns the gradients that a tape is asked for, if they can be had without it; None if not.

        The ones that a gradient begins with must not raise what failed before: TensorFlow does not look, and crashes.
        """
        if self.settle is not None and (not given or any(gradient is None for gradient in given)):
            self.settle()
        return None

    def observe(self) -> None:
        """Begins to observe a library call: its records are listed, and put on the tapes at once."""
        self.steps, self.variables, self.touched = [], [], False

    def observed(self) -> tuple[list[Step | LibraryEntry], list[Any]]:
        """Ends that; returns the steps that it recorded, and the variables that it accessed."""
        steps, variables = self.steps or [], self.variables or []
        self.steps = self.variables = None
        return steps, variables

    # Records.

    def can_take(self, op: str) -> bool:
        """Returns whether an operation that runs on its own can be recorded later: not if it runs Python."""
        return self.waiting and op not in _RUN_PYTHON and not tape_is_empty()

    def takes(self, op: str, inputs: Any, attrs: Any, outputs: Any) -> bool:
        """Takes over the record of an operation that was issued by name; False if TensorFlow must record it itself."""
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
        """Takes over the record of an operation with its own backward function; False if TensorFlow must record it.

        `original` puts it on the tapes; `forward` is used by accumulators only.
        """
        if not context.executing_eagerly():
            return self._of_a_graph()
        if not self.waiting or tape_is_empty():
            self.bypassed()
            return False
        held: list[Any] = []
        known = closed(function, held) if all(part is None for part in forward) else None
        if known is not None:
            entry = LibraryEntry(original, op, outputs, inputs, function, forward, self.active, known, held)
            if self.steps is not None:
                self.steps.append(entry)
            self.record_alone(entry)
            return True
        self.record_alone(FunctionEntry(original, op, outputs, inputs, Backward(function), forward, self.active))
        self.touched = self.functions = True  # a library call being observed cannot be memoized with that
        return True

    def _of_a_graph(self) -> bool:
        """Lets TensorFlow record symbolic tensors, on which no gradient of this call depends."""
        self.asked()
        return False

    def record_alone(self, entry: Any) -> None:
        """Defers the record of an operation that has run on its own."""
        self.entries.append(entry)
        if self.steps is not None:
            self._done = len(self.entries)
            entry.record(self._constant)

    def record(self, step: Step, op: str, args: tuple[Any, ...], result: Any, feeds: list[Any]) -> None:
        """Records a followed operation on the active tapes, now or later; `feeds` are those of its segment."""
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
        """Defers the records of a library call."""
        self.entries.append(entry)
        self._added.append(entry)

    def wait(self) -> None:
        """Defers records in this call from now on; earlier ones are on the tapes."""
        self.waiting = True

    def join(self, first: int, entry: Any) -> None:
        """Replaces the entries from `first` on, which are on their tapes, by one that stands for all of them."""
        self.entries[first:] = [entry]
        self._done = len(self.entries)

    def keep(self) -> None:
        """Creates the tensors of the segment ending now that deferred records will need."""
        for entry in self._added:
            if not self._finished.issuperset(entry.tapes):
                entry.keep()
        self._added = []

    def catch_up(self) -> None:
        """Puts every deferred record on the tapes that were active when it was issued.

        After an error the remaining ones stay deferred.
        """
        first, self._done = self._done, len(self.entries)
        pending = self.entries[first:]
        if all(self._finished.issuperset(entry.tapes) for entry in pending):
            return
        stopped, done = 0, 0
        while pywrap_tfe.TFE_Py_TapeSetIsStopped():
            pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
            stopped += 1
        active = self.active if threading.get_ident() == self._owner else ()  # active tapes are thread-local
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
            for number, tape in tapes:  # `_activate`, inlined: a Python call could be interrupted
                _tape_set_add(tape)
                if number not in active:
                    _tape_set_remove(tape)
            for _ in range(stopped):
                pywrap_tfe.TFE_Py_TapeSetStopOnThread()

    def finished(self, number: int) -> None:
        """Releases a used tape and its records."""
        self._finished.add(number)
        self.known[number] = object()  # its tensors would be kept alive
        self._drop()

    def _drop(self) -> None:
        kept = [entry for entry in self.entries if not self._finished.issuperset(entry.tapes)]
        self._done -= sum(self._finished.issuperset(entry.tapes) for entry in self.entries[: self._done])
        self.entries = kept

    def alive(self) -> bool:
        """Returns whether a tape may still be asked about this call's tensors."""
        return not tape_is_empty() or bool(self.known and referenced(self.known))

    def end(self) -> None:
        """Ends the call: only tapes that outlive it get their deferred records."""
        if self.entries:
            self._finished.update(set(range(len(self.known))).difference(self.active, referenced(self.known)))
            self._drop()
            self.catch_up()
            self.entries = []
            self._done = 0

    def close(self) -> None:
        """Releases everything."""
        self.known, self.entries, self._added, self._watches = [], [], [], []
        self._constant, self.settle = _gone, None

    # A tape's history, in a form that can be compared across calls.

    def history(
        self, number: int, entries: Iterable[Any], place: Callable[[Any], Any], names: TensorNames, any_size: bool
    ) -> tuple[Any, ...] | None:
        """Returns a key of all that a tape has recorded and watched, or None if that is not known.

        `entries`: those of the tape, see `entries_of`; `place` names all tensors, `names` those of the call without
        values; `any_size`: leave out sizes.
        """
        if not self.waiting or number in self._direct or number in self._finished:
            return None
        seen: list[Any] = []
        base = names.base
        for entry in entries:
            brief = entry.brief(names)
            if brief is not None:
                seen.append(brief)
                continue
            given = tuple([  # most are tensors of this segment, which `place` would name by their numbers
                v._key - base if type(v) is LazyTensor and v._key >= base and v._out.const is None else place(v)
                for v in entry.given()
            ])  # fmt: skip
            try:
                identity = entry.identity(names)
                seen.append((without_sizes(identity) if any_size else identity, given, entry.tapes))
            except TypeError:  # attributes that cannot be compared
                return None
        watches = [(place(tensor), before) for tensor, before in self.watched_by(number)]
        return number, tuple(seen), tuple(watches)

    def sizes_of(self, number: int) -> Sequence[Any]:
        """Returns the sizes of ended segments that a tape may have recorded, which its history does not tell."""
        return self._sizes[self._began[number] :]

    def entries_of(self, number: int) -> list[Any]:
        """Returns a tape's entries through which gradients may go, in order."""
        return [entry for entry in self.entries if number in entry.tapes and entry.is_differentiable()]

    def watched_by(self, number: int) -> list[tuple[Any, int]]:
        """Returns the tensors that a tape was asked to watch, each with the number of such entries before."""
        return [(tensor, before) for n, tensor, before in self._watches if n == number]


def _gone(value: Any, dtype: Any) -> Any:
    raise AssertionError("the call is over")


_tape_set_add = pywrap_tfe.TFE_Py_TapeSetAdd
_tape_set_remove = pywrap_tfe.TFE_Py_TapeSetRemove


def _activate(tapes: list[tuple[int, Any]], numbers: tuple[int, ...]) -> None:
    """Makes exactly those of these tapes record whose numbers are in `numbers`.

    Each is added first, a no-op if it is active: removing an inactive one would make TensorFlow release a reference
    that it never took.
    """
    for number, tape in tapes:
        _tape_set_add(tape)
        if number not in numbers:
            _tape_set_remove(tape)


def use_up(tape: Any) -> None:
    """Puts a tape into the state in which `gradient` leaves it."""
    if not tape._persistent and tape._tape is not None:
        if tape._recording:
            tape._pop_tape()
        tape._watched_variables = tape._tape.watched_variables()
        tape._tape = None


def _as_fed(step: Step, args: tuple[Any, ...], feeds: list[Any]) -> tuple[Any, ...]:
    """Returns the arguments with Python values that are feeds replaced by the tensors fed for them.

    So a memoized gradient finds them in the tape's history.
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
