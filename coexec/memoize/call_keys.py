"""Call keys: what the library calls of one followed call are known by, where their argument guards do not tell."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from coexec.follow.follower import Follower
from coexec.follow.tape_entry import Entry
from coexec.follow.tensor_names import TensorNames
from coexec.guards.call_key import CallArguments, CannotMemoize
from coexec.memoize.fed_tensors import FedTensors
from coexec.memoize.region_tape_entry import RegionEntry
from coexec.memoize.tape_form import TapeForm
from tracer.intercept import tape_is_empty
from tracer.lazy import LazyTensor
from tracer.library import Surroundings, gradient
from tracer.private import EagerTensor
from tracer.spec import RESOURCE


class CallKeys:
    """The keys of one followed call's library calls."""

    def __init__(self, run: Follower) -> None:
        self.surroundings = Surroundings()
        self.kept: list[Any] = []  # objects whose ids are in the last key, besides arguments
        self.number = -1  # the tape that the last gradient was asked of,
        self.entries: Any = []  # and its entries, or those that stand for them, by number
        self._run = run
        self._origin = run.cursor.base
        self._names = TensorNames(run.cursor)
        self._outsiders: dict[int, tuple[int, Any]] = {}  # eager tensors by id, numbered in order of appearance

    def of(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: CallArguments) -> Any:
        """Returns the key of a call, and collects its tensors in `arguments`; raises `CannotMemoize`."""
        self.kept = []
        taped = not tape_is_empty()
        around = self.surroundings.environment(self.kept)
        if function is not gradient:
            given = arguments.key(args), arguments.key(kwargs) if kwargs else None
            return function, taped, around, given
        kind, history = self.seen(args[0], functools.partial(self.place, arguments))
        given = arguments.key(args[1:]), arguments.key(kwargs)
        places = [self.place(arguments, v) for v in arguments.given]
        if self.knows_handles():  # else none can be a source of the gradient
            places += [self.place(arguments, v) for v in arguments.anchors]
        return function, (kind, history, tuple(places)), around, given

    def seen(self, tape: Any, place: Any) -> tuple[Any, Any]:
        """Returns the kind of a gradient's tape and its history; `place` names tensors. Raises `CannotMemoize`."""
        tapes = self._run.tapes
        if tape._tape is None:
            raise CannotMemoize("its tape has been used")
        number = self.number = tapes.number(tape._tape._tape)
        if tape._persistent and number in tapes.active:
            raise CannotMemoize("its tape records the gradient")
        cursor = self._run.cursor
        entries = self.entries = tapes.entries_of(number)
        history = tapes.history(number, entries, place, self._names, cursor.step.dynamic)
        if history is None or number < 0:
            raise CannotMemoize("its tape has records of operations outside of known library calls")
        if cursor.externals:
            history = (*history, self._fed(entries))
        if cursor.sizes and not cursor.step.dynamic:
            history = (*history, tuple(tapes.sizes_of(number)))  # the steps of earlier segments do not tell
        watched = tuple(map(id, tape._tape.watched_variables()))  # 0.7 us for six
        return (tape._persistent, tape._watch_accessed_variables, watched), history

    def _fed(self, entries: list[Any]) -> tuple[Any, ...]:
        """Returns which feeds of the running segment are tensors that a tape has recorded outside of it, or constants.

        The path tells which feed an operation takes, but not which of such tensors an operation before was fed.
        """
        base, found = self._run.cursor.base, FedTensors(self._run.cursor)
        constants = found.may_be_constants
        for at, entry in enumerate(entries):
            if type(entry) is Entry:
                is_inside = entry.result[0]._key >= base
            else:
                is_inside = type(entry) is RegionEntry and entry.base >= base
            if not is_inside:
                found.add(at, entry.places())
            if constants:
                found.add_constants(at, entry)
        return found.all()

    def form(self, key: Any, args: Any, kwargs: dict[str, Any], arguments: CallArguments) -> TapeForm | None:
        """Returns the form of the tape of a gradient with this key; None if there is none."""
        cursor = self._run.cursor
        if cursor.step.dynamic or cursor.step.opened or cursor.sizes:
            return None
        try:
            targets = tf.nest.flatten(args[1] if len(args) > 1 else kwargs.get("target"))
            form = TapeForm(cursor, self.entries, self._run.tapes.watched_by(self.number), targets)
            form.ask((self.number, key[1][0][:2], key[2]), args[1:], kwargs, arguments.anchors, args[0]._tape)
        except CannotMemoize:
            return None
        return form

    def without_sizes(self, key: Any, args: Any, kwargs: dict[str, Any], arguments: CallArguments) -> Any:
        """Returns the key of a call that may begin a segment for any size without its sizes; else None."""
        function = key[0]
        start = self._run.cursor.step
        if start.dynamic or start.end or start.external:
            return None
        return self.of(function, args, kwargs, arguments.anew(any_size=True))

    def knows_handles(self) -> bool:
        """Returns whether a variable's handle is on a tape that was asked for a gradient."""
        return any(v._datatype_enum() == RESOURCE for _, v in self._outsiders.values())

    def place(self, arguments: CallArguments, value: Any) -> Any:
        """Names a tensor or variable by where in the call it comes from.

        Constants are keyed like arguments, as the gradient's operations may depend on their values.
        """
        if type(value) is LazyTensor:
            if value._out.const is not None:
                return arguments.key(value)
            if value._key >= self._origin:
                return self._names.of(value._key)
        elif isinstance(value, EagerTensor):
            if self._run.cursor.constant_of(value) is not None:
                return arguments.key(value)
        else:
            value = getattr(value, "handle", None)
        if value is None:
            return None
        return "outside", self._outsiders.setdefault(id(value), (len(self._outsiders), value))[0]
