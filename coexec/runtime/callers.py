"""Callers: the statements in whose midst functions are running, for decisions that only those can be spared.

A function that returns on a way cannot be left where it stands, unless the runtime itself has called it. But the whole
statement that has called it may be written down, be it in the caller or in the caller's caller.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from coexec.staging.endings import calls_itself, calls_of
from coexec.staging.statements import returns
from tracer.guards import is_guarded, start_of
from tracer.location import is_entry, is_user
from tracer.source import function_of
from tracer.syntax import Decision, Simple, asks_identity, assigned_names, call_at


def asks_for_caller(decision: Decision, code: CodeType, namespace: dict[str, Any]) -> bool:
    """Returns whether what has called a function is to be taken on the device, rather than what the function asks."""
    return leaves_function(decision) or calls_itself(code, namespace)


def leaves_function(decision: Decision) -> bool:
    """Returns whether a way through a statement returns."""
    return isinstance(decision.statement, (ast.If, Simple)) and returns(decision.statement)


def identity_is_asked(frame: FrameType | None) -> bool:
    """Returns whether a function, or one that has called it, asks if two values are one object."""
    while frame is not None and not is_entry(frame.f_code):
        if is_user(frame.f_code) and asks_identity(frame.f_code, frame.f_globals):
            return True
        frame = frame.f_back
    return False


MAX_CALLS = 4096


class Calls:
    """The statements of functions that call others, as far as they are known."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[CodeType, Decision | None, bool]] = {}  # by code and instruction

    def around(self, frame: FrameType) -> Iterator[tuple[FrameType, Decision]]:
        """Gives the frames whose statements have called what is running, innermost first, each with the statement.

        Of a function that calls itself, only what has called it from outside; and none that waits in a `return`, but
        for what the runtime has called.
        """
        chain: list[FrameType] = []
        at = frame
        while at.f_back is not None and is_user(at.f_back.f_code) and not is_entry(at.f_back.f_code):
            at = at.f_back
            chain.append(at)
        whole = at.f_back is not None and is_entry(at.f_back.f_code)
        last = {caller.f_code: number for number, caller in enumerate(chain)}
        guarded = self._at(frame)[1]
        for number, caller in enumerate(chain):
            decision, guards = self._at(caller)
            guarded = guarded or guards
            if decision is None or last[caller.f_code] != number:
                continue
            if leaves_function(decision) and (guarded or not whole or caller is not chain[-1]):
                continue
            yield caller, decision

    def _at(self, frame: FrameType) -> tuple[Decision | None, bool]:
        """Returns the statement that a frame is in the midst of, and whether a failure there may be caught."""
        code, namespace = frame.f_code, frame.f_globals
        offset = start_of(code, frame.f_lasti)
        found = self._known.get((id(code), offset))
        if found is None:
            if len(self._known) >= MAX_CALLS:
                self._known.clear()
            decision = call_at(code, offset, namespace)
            if decision is not None:
                decision = decision._replace(unread=_unread(function_of(code, namespace), decision.statement))
            found = code, decision, is_guarded(code, offset, namespace)
            self._known[id(code), offset] = found
        return found[1:]


def _unread(function: Any, statement: Any) -> frozenset[str]:
    """Returns the names that a statement assigns to and nothing in the function reads."""
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store)]
    return frozenset(assigned_names([statement]).difference(n.id for n in names))


def least(decision: Decision | None, called: set[Any]) -> bool:
    """Returns the answer to what a function asks that is carried out for nothing: it is to call least, and to end.

    `called` are the codes of what it may call, itself among them.
    """
    if decision is None:
        return False
    statement = decision.statement
    if isinstance(statement, ast.While):
        return decision.negated
    if isinstance(statement, ast.For):
        return not decision.negated
    names = _turning(frozenset(called))
    if isinstance(statement, ast.If):
        rest = list(decision.rest or ())
        ways = [[*way, *([] if _ends(way) else rest)] for way in (statement.body, statement.orelse)]
        costs = [(sum(calls_of(node, names) for node in way), not _ends(way)) for way in ways]
        return (costs[0] < costs[1]) is not decision.negated
    asking = [n for n in ast.walk(statement) if isinstance(n, ast.IfExp)]
    if len(asking) == 1 and not isinstance(statement, ast.Assert):
        body, other = calls_of(asking[0].body, names), calls_of(asking[0].orelse, names)
        if body != other:
            return body < other
    return decision.answer


@functools.lru_cache(maxsize=256)
def _turning(called: frozenset[CodeType]) -> set[str]:
    """Returns the names of those functions that may come to call themselves, or of all if none does."""
    calls: dict[str, set[str]] = {}
    for code in called:
        calls.setdefault(code.co_name, set()).update(code.co_names, code.co_freevars)
    found = set()
    for name in calls:
        known, ahead = set[str](), [name]
        while ahead:
            more = {other for other in calls[ahead.pop()] if other in calls and other not in known}
            known |= more
            ahead += more
        if name in known:
            found.add(name)
    return found or set(calls)


def _ends(way: list[ast.stmt]) -> bool:
    return bool(way) and isinstance(way[-1], (ast.Return, ast.Raise))
