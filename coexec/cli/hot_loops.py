"""HotLoops: finds the functions of a running script in which its eager operations run, and has them followed.

The stacks of all threads are looked at every few milliseconds, which costs the script next to nothing. A function that
is on them in ever new calls, while those around it are in one and the same, is what a loop calls: the step. It is
replaced where the loop looks it up, in its module or class, and so followed from the next turn on.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import coexec
from coexec.base.tuning import tuning
from tracer.effects import is_programs
from tracer.location import files_of

_log = logging.getLogger("coexec")
_OURS, _EAGER = (
    tuple(path for name in names for path in files_of(name))
    for names in (("coexec", "tracer"), ("tensorflow", "keras", "tf_keras"))
)
_GRAPHS = os.path.join("eager", "polymorphic_function", "")
_INSTALLED = tuple(os.path.join(folder, "") for folder in ("site-packages", "dist-packages"))
_FITS = tuple(os.path.join(*path) for path in (("tensorflow", "trainer.py"), ("engine", "training.py")))
_CALL = coexec.Function.__call__.__code__
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass
class Seen:
    """What was seen of a function: calls that were told apart, samples in eager operations, and where it was then."""

    code: types.CodeType
    calls: int = 0
    samples: int = 0
    lines: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class HotLoop:
    """A hot loop: where it is, its share of the eager time that was seen, and the function that is followed, if any."""

    place: str
    share: float
    function: coexec.Function | None
    why_not: str = ""


class HotLoops:
    """Looks at the threads' stacks until so many samples were in eager operations; `found` has what came of it."""

    def __init__(self, entry: types.CodeType) -> None:
        self._entry = entry  # outside of it nothing is the script's
        self._seen: dict[types.CodeType, Seen] = {}
        self._held: dict[tuple[int, types.CodeType], types.FrameType] = {}  # so that no later one has its address
        self._eager = 0  # samples
        self._given_up: set[types.CodeType] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="coexec-search", daemon=True)
        self.found: list[HotLoop] = []

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the search; tells of a loop whose turns are no function's calls, if that is all there was."""
        self._ended.set()
        self._thread.join()
        if not self.found:
            self.found += self._bare_loop()

    def _work(self) -> None:
        try:
            while self._eager < tuning.search_samples and not self._ended.wait(tuning.search_interval):
                self._look_at_all()
        except Exception:  # the script goes on
            _log.exception("the search for hot loops failed")
        self._held.clear()

    def _look_at_all(self) -> None:
        held, self._held = self._held, {}
        for thread, frame in sys._current_frames().items():
            if thread != threading.get_ident():
                self._look(thread, frame, held)

    def _look(self, thread: int, innermost: types.FrameType, held: dict[Any, types.FrameType]) -> None:
        """Counts one sample of a thread's stack, and has a function followed that turns out to be a loop's."""
        chain, eager = self._programs(innermost)
        found = None
        for frame in chain:
            code = frame.f_code
            if (thread, code) in self._held:  # recursion
                continue
            self._held[thread, code] = frame
            seen = self._seen.setdefault(code, Seen(code))
            seen.calls += held.get((thread, code)) is not frame
            if eager:
                seen.samples += 1
                seen.lines[frame.f_lineno] += 1
                if found is None and seen.calls > 1:  # the outermost: what it calls may come again, too
                    found = seen, frame.f_back
        self._eager += eager
        if found is not None and self._is_hot(*found):
            self._follow(found[0])

    def _programs(self, frame: types.FrameType | None) -> tuple[list[types.FrameType], bool]:
        """Returns the script's frames of a stack, outermost first, and whether it is in an eager operation.

        What is traced, imported, in Keras' training loop or in a followed call is none.
        """
        chain: list[types.FrameType] = []
        eager = set_aside = False
        while frame is not None and frame.f_code is not self._entry:
            name = frame.f_code.co_filename
            if frame.f_code is _CALL or name.startswith("<frozen importlib") or _GRAPHS in name or name.endswith(_FITS):
                set_aside = True
            elif name.startswith(_OURS) or frame.f_code.co_name in _COMPREHENSIONS:
                pass
            elif name.startswith(_EAGER):
                eager = eager or not chain
            elif is_programs(frame.f_code, frame.f_globals) and not any(part in name for part in _INSTALLED):
                chain.append(frame)
            frame = frame.f_back
        return chain[::-1], eager and bool(chain) and not set_aside

    def _is_hot(self, seen: Seen, caller: types.FrameType | None) -> bool:
        """Returns whether a function is a loop's step: called often, by other code than a layer's, for eager's time."""
        called_by = "" if caller is None else caller.f_code.co_filename
        return (
            not called_by.startswith(_EAGER)
            and seen.code not in self._given_up
            and seen.calls >= tuning.search_calls
            and seen.samples >= tuning.search_calls
            and seen.samples >= tuning.search_share * self._eager
            and not seen.code.co_flags & _LATER
        )

    def _follow(self, seen: Seen) -> None:
        """Replaces a function wherever the program's modules and classes have it."""
        code = seen.code
        self._given_up.add(code)
        place = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        function = None
        for owner, name in list(_holders(code)):
            function = follow(owner, name)
        why_not = "" if function else "it is made in another function, and looked up there: decorate it"
        self.found.append(HotLoop(place, seen.samples / self._eager, function, why_not))

    def _bare_loop(self) -> Iterator[HotLoop]:
        """Yields the innermost code that was in one call all the time, if its loop takes most of eager's time."""
        around = [seen for seen in self._seen.values() if seen.calls == 1 and 2 * seen.samples > self._eager]
        if not around or self._eager < tuning.search_bare:
            return
        inner = around[-1]  # seen later than those around it
        lines = sorted(line for line, count in inner.lines.items() if 20 * count >= inner.samples)
        place = f"{inner.code.co_filename}:{lines[0]}" + (f"-{lines[-1]}" if lines[-1] > lines[0] else "")
        why_not = "the body of its loop is no function: make it one, and call that"
        yield HotLoop(place, inner.samples / self._eager, None, why_not)


def _holders(code: types.CodeType) -> Iterator[tuple[Any, str]]:
    """Yields the program's modules and classes that have a function of this code, with the name that it has there."""
    for module in list(sys.modules.values()):
        if type(module) is not types.ModuleType or not _is_the_programs(vars(module)):
            continue  # a subclass may import something when it is asked
        for owner in _with_classes(module):
            for name, value in list(vars(owner).items()):
                function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                if isinstance(function, types.FunctionType) and function.__code__ is code:
                    yield owner, name


def _is_the_programs(namespace: dict[str, Any]) -> bool:
    file = namespace.get("__file__")
    if not isinstance(file, str):
        return namespace.get("__name__") == "__main__"
    return not file.startswith((*_OURS, *_EAGER, os.path.dirname(os.__file__))) and not any(
        part in file for part in _INSTALLED
    )


def _with_classes(owner: Any) -> Iterator[Any]:
    """Yields a module, and the classes of its own that it or these have: each once, as they may have one another."""
    found, waiting = {id(owner)}, [owner]
    while waiting:
        owner = waiting.pop()
        yield owner
        module = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
        for value in list(vars(owner).values()):
            if isinstance(value, type) and value.__module__ == module and id(value) not in found:
                found.add(id(value))
                waiting.append(value)


def follow(owner: Any, name: str) -> coexec.Function:
    """Replaces a function of a module or class by a followed one, which is returned; static and class methods stay so.

    Raises:
      LookupError: if there is no function of this name.
    """
    found = vars(owner).get(name) if isinstance(owner, (types.ModuleType, type)) else None
    if isinstance(found, coexec.Function):
        return found
    if isinstance(found, (staticmethod, classmethod)):
        function = _followed(found.__func__)
        setattr(owner, name, type(found)(function))
    elif isinstance(found, types.FunctionType):
        function = _followed(found)
        setattr(owner, name, function)
    else:
        raise LookupError("it is not there" if found is None else f"it is no function, but {found!r}")
    return function


@functools.cache
def _followed(function: Callable[..., Any]) -> coexec.Function:
    """Returns the followed function for one that several modules may have; the same each time."""
    followed: coexec.Function = coexec.function(function)
    return followed
