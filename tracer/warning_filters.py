"""Warning filters: whether a warning that was not shown when a library issued it would not be shown now either.

With most filters Python shows a warning once for each text and place, until the filters are changed, and then once
more. So a call whose warnings were not shown has no effect by them as long as the filters, and Python's notes of what
it has shown, stay.

Relies on `warnings`: it shows all warnings through `_showwarnmsg`, calls `_filters_mutated` where filters change, and
keeps its notes in `__warningregistry__` of the module from which a warning comes.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from types import CodeType, FrameType
from typing import Any

from tracer import hooks
from tracer.faults import passes

# The C functions that issue warnings, and the code by which one is shown.
ISSUING = (warnings.warn, warnings.warn_explicit)
_SHOWING: CodeType = warnings._showwarnmsg.__code__  # type: ignore[attr-defined]

_NOTED = "__warningregistry__"
_LEVELS = 6  # frames above the one that issues a warning of which it may be said to come

_numbers = itertools.count(1)
_version = 0
_hooks = hooks.HookSet(
    __name__,
    "`warnings._filters_mutated`",
    "a warning that was not shown may be shown once filters have changed",
    hooks.PROCESS,
)


def _counted(change: Any) -> Any:
    @passes
    @functools.wraps(change)
    def counted() -> None:
        global _version
        _version = next(_numbers)
        change()

    return counted


_hooks.add(warnings, "_filters_mutated", _counted(warnings._filters_mutated))  # type: ignore[attr-defined]


class Silence:
    """What has kept the warnings of a call from being shown."""

    def __init__(self) -> None:
        if not _hooks.users:
            _hooks.hold_for_good()
        self._state = _state()
        # Where Python notes what it has shown, and how much that was: of modules from which one may be said to come.
        self._registries: dict[int, tuple[dict[str, Any], Any, int]] = {}

    def add(self, frame: FrameType) -> None:
        """Adds a warning that this frame issues."""
        at: FrameType | None = frame
        for _ in range(_LEVELS):
            if at is None:
                return
            noted: Any = at.f_globals.get(_NOTED)
            if noted is not None:
                self._registries[id(at.f_globals)] = at.f_globals, noted, len(noted)
            at = at.f_back

    def holds(self) -> bool:
        """Returns whether the same warnings would not be shown now either."""
        known = self._registries.values()
        return self._state == _state() and all(
            len(noted) >= count and space.get(_NOTED) is noted for space, noted, count in known
        )


def _state() -> Any:
    """Returns what decides which warnings are shown, but for those that were shown before."""
    return _version, id(warnings.filters), [*warnings.filters], warnings.defaultaction, warnings.warn, _showing()  # type: ignore[attr-defined]


def _showing() -> Any:
    return getattr(warnings._showwarnmsg, "__code__", None)  # type: ignore[attr-defined]


def shows(code: CodeType) -> bool:
    """Returns whether this code shows a warning."""
    return code is _SHOWING


def is_known() -> bool:
    """Returns whether warnings are shown as they are by default, and not by what the program has put there."""
    return _showing() is _SHOWING
