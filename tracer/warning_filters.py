"""Warning filters: whether a warning that was not shown when a library issued it would not be shown now either.

With most filters Python shows a warning once for each text and place, until the filters are changed, and then once
more. So a call whose warnings were not shown has no effect by them as long as the filters stay.

Relies on `warnings`: it shows all warnings through `_showwarnmsg`, and calls `_filters_mutated` where filters change.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from types import CodeType
from typing import Any

from tracer import hooks
from tracer.faults import passes

# The C functions that issue warnings, and the code by which one is shown.
ISSUING = (warnings.warn, warnings.warn_explicit)
_SHOWING: CodeType = warnings._showwarnmsg.__code__  # type: ignore[attr-defined]

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


def version() -> int:
    """Returns a number that is another one once filters have changed."""
    if not _hooks.users:
        _hooks.hold_for_good()
    return _version


def shows(code: CodeType) -> bool:
    """Returns whether this code shows a warning."""
    return code is _SHOWING


def is_known() -> bool:
    """Returns whether warnings are shown as they are by default, and not by what the program has put there."""
    return getattr(warnings._showwarnmsg, "__code__", None) is _SHOWING  # type: ignore[attr-defined]
