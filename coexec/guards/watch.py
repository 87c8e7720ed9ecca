"""Watch: one run of a call, observed opcode by opcode, to find which earlier state it reads and changes.

A call that reads the same does the same: its code is deterministic apart from what it reads, and what cannot be guarded
(clocks, random states, files, internal state of C code) is refused. Code is not rewritten; the trace function inspects
each instruction's operands on the value stack before it runs. TensorFlow's and Keras' own code is trusted if its
arguments are plain values, and watched like the program's if they are objects of the program.
"""

from __future__ import annotations

import gc
import inspect
import math
import os
import sys
import time
import types
import weakref
from collections.abc import Callable, Container
from typing import Any

from coexec.guards.flat_guards import FlatGuards
from coexec.guards.watched_calls import WatchedCalls
from coexec.guards.watched_opcodes import is_call, todo
from coexec.guards.watched_state import Effect, WatchedState
from tracer import hooks
from tracer.effects import is_of_the_standard_library
from tracer.errors import Refused
from tracer.faults import OURS, is_passing
from tracer.location import is_user
from tracer.value_stack import function_of_frame, local, top

_TRUSTED, _WATCHED, _ASKS, _OURS = "trusted", "watched", "asks", "ours"
# Modules of the standard library that only inspect classes and their methods.
_ASKING = frozenset({"abc", "typing", "_weakrefset", "collections.abc", "_collections_abc"})
# Run whenever an object ends that is held weakly; it only leaves the container.
_ENDS = frozenset(
    const
    for kind in (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)
    for const in kind.__init__.__code__.co_consts
    if isinstance(const, types.CodeType)
)
_PACKAGES = ("coexec.", "tracer.")  # including generated code
_FROZEN = "<frozen importlib"

hooks.Hooks(
    __name__,
    "`sys.settrace` on the calling thread",
    "what a call of the program's reads and changes is watched; not where another trace function is set",
    "such a call is learnt or confirmed",
)


class Watch:
    """Observes one call; `reason` says why its reads and effects cannot be known.

    Has the interface of `PurityProof`. `original` returns the original of a twin; `most` is how many seconds it may
    take.
    """

    is_needed = True

    def __init__(self, original: Callable[[Any], Any], most: float = math.inf) -> None:
        self.reason: str | None = None
        self.effects: list[Effect] = []  # what it has changed, after `end`
        self._refused: Callable[[str], None] | None = None  # called with the first reason
        self._state = WatchedState(original)
        self._calls = WatchedCalls(self._state)
        self.state_guards = self._state.guards
        self._kinds: dict[int, tuple[types.CodeType, str]] = {}
        self._running = False
        self._most, self._until = most, math.inf
        self._away: types.FrameType | None = None  # the running frame of the runtime

    # Called by `Effects`, which observes the same call.

    def admits(self, frame: types.FrameType) -> bool:
        """Returns whether the call is still watched, as a function of the program is about to run."""
        return self.reason is None

    asks: tuple[int, ...] = ()  # codes for which to call `admits_call`: none, as it sees calls itself

    def admits_call(self, frame: types.FrameType, function: Any) -> bool:
        """Returns whether the call is still watched."""
        return self.reason is None

    def start(self, refused: Callable[[str], None]) -> None:
        """Begins to watch this thread; `refused` is called with the first reason."""
        self._refused = refused
        gc.collect(0)
        self._running = True
        self._until = time.perf_counter() + self._most
        sys.settrace(self._event)

    def stop(self) -> None:
        """Stops watching; may be called again."""
        if self._running:
            self._running = False
            sys.settrace(None)
        # Cycles and frames would keep the call's tensors alive.
        self._refused = self._away = self._calls.makes = None

    def suspend(self) -> None:
        """Stops watching temporarily, while the runtime itself runs."""
        if self._running:
            sys.settrace(None)

    def resume(self) -> None:
        """Continues to watch."""
        if self._running:
            sys.settrace(self._event)

    def end(self, ran: Container[int]) -> tuple[FlatGuards, list[Any], list[Any]]:
        """Returns the guards of what was read, whatever code ran, no variables, and the Keras objects among that.

        Raises:
          Refused: if it changes earlier state in a way that cannot be repeated, or reads what cannot be guarded.
        """
        self.stop()
        if self.reason is not None:
            raise Refused(self.reason)
        self.effects = self._state.effects()
        self.state_guards.finish()
        return self.state_guards, [], list(self._state.keras.values())

    # Events.

    def _event(self, frame: types.FrameType, event: str, _: Any) -> Any:
        if not self._running:
            return None
        if time.perf_counter() > self._until:
            self._refuse(Refused("watching it takes too long"), frame)
            return None
        code = frame.f_code
        kind = self._kinds.get(id(code))
        if kind is None:
            kind = self._kinds[id(code)] = code, _kind_of(frame)
        if self._away is not None or kind[1] is _OURS:
            return self._event_of_runtime(frame, kind[1])
        if kind[1] is _ASKS:
            return None
        try:
            if kind[1] is _TRUSTED and self._calls.is_plain_call(frame):
                return None
            function = function_of_frame(frame)
            if type(function) is types.FunctionType:
                function = self._state.original(function)
                if not self._state.is_new(function):
                    self.state_guards.ran(function)
            if code.co_flags & inspect.CO_VARKEYWORDS and not code.co_flags & inspect.CO_GENERATOR:
                at = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
                self._state.made(local(frame, at))
        except (Refused, Exception) as error:
            self._refuse(error, frame)
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _event_of_runtime(self, frame: types.FrameType, kind: str) -> Any:
        """Ignores the runtime's own code, and library code that it calls; refuses if it calls the program's."""
        if self._away is None:
            if is_passing(frame.f_code):
                return None
            self._away = frame
            frame.f_trace_lines = False
            return self._return_of_runtime
        generated = frame.f_code.co_filename == "<string>"  # for instance a named tuple's
        if kind is _WATCHED and not generated and not is_of_the_standard_library(frame):
            self._refuse(Refused(f"the runtime calls {frame.f_code.co_name}"), frame)
        return None

    def _return_of_runtime(self, frame: types.FrameType, event: str, _: Any) -> Any:
        if event == "return" and frame is self._away:
            self._away = None
        return self._return_of_runtime

    def _opcode(self, frame: types.FrameType, event: str, _: Any) -> Any:
        if event != "opcode" or not self._running:
            return self._opcode
        try:
            code = frame.f_code
            if self._calls.makes is frame and not is_call(code, frame.f_lasti):
                self._calls.makes = None
                self._state.made(top(frame))
            due = todo(code).get(frame.f_lasti)
            if due is not None:
                due[0](self._calls, frame, due[1], due[2])
        except (Refused, Exception) as error:  # errors of inspected objects must not reach the program
            self._refuse(error, frame)
        return self._opcode

    def _refuse(self, error: BaseException, frame: types.FrameType) -> None:
        if self.reason is None:
            text = str(error) if isinstance(error, Refused) else f"it cannot be watched: {type(error).__name__} {error}"
            name = os.path.basename(frame.f_code.co_filename)
            self.reason = f"{text} ({frame.f_code.co_name}, {name}:{frame.f_lineno})"
            refused = self._refused
            self.stop()
            if refused is not None:
                refused(self.reason)


def _kind_of(frame: types.FrameType) -> str:
    code = frame.f_code
    if code.co_filename.startswith(OURS) or str(frame.f_globals.get("__name__")).startswith(_PACKAGES):
        return _OURS
    # An import statement is guarded where it is run; a module that it loads would be watched.
    if code.co_filename.startswith(_FROZEN) or frame.f_globals.get("__name__") in _ASKING:
        return _ASKS
    if code in _ENDS:
        return _ASKS
    if not is_user(code):
        return _TRUSTED
    return _WATCHED
