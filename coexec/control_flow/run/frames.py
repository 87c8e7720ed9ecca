"""Frames: moves Python on to where the device is, and checks the preconditions.

No code of the program runs between a frame's test of a tensor and the place where it resumes. There are five cases:

* An `if` without `else` gets the answer with which Python skips it.
* Any other `if` gets an answer that ends its test at once, and the frame jumps to the statement after it.
* An assignment gets an answer that leaves only variables to evaluate; then its targets are set. (`y = a if t else f(b)`
  gets True, `y = a and f(b)` False.)
* The decorated function ends by `EarlyReturn`, which propagates through the functions that are running inside it.
* Any other function ends by a `return` of nothing but variables, which are set to the return value.

All preconditions are in this file; `Refused` is raised if one is not met:

* No debugger or coverage tool traces lines (`may_move`), and the function does not inspect its own variables
  (`looks_at_variables`).
* The variables to set are the function's own; those shared with inner functions are refused while tracing.
* The place where a frame resumes begins a line, and is reached before anything else runs.
* From 3.12 on, a jump binds unbound variables to None: all must be bound, unless the slots of a frame are known.
* No frame leaves a `try`, or a `with` that may swallow exceptions.

Relies on what debuggers use: a frame's local trace function is called for each line that the frame reaches, and may set
the frame's line and variables there; and on `PyFrame_LocalsToFast`, before 3.13.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, NamedTuple

from coexec.base.tuning import tuning
from tracer import hooks
from tracer.errors import Refused
from tracer.frame_slots import READABLE, jumping
from tracer.guards import is_guarded, start_of
from tracer.location import is_entry, is_user
from tracer.source import function_of
from tracer.syntax import Decision, asks_identity, call_at, is_plain, line_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from _typeshed import TraceFunction

    from coexec.control_flow.program_types import Value
    from coexec.control_flow.trace.conditionals import Form
    from tracer.syntax import Simple

# Code that uses these inspects the variables of a running function, which are rebuilt here.
_LOOKING = frozenset({"locals", "vars", "eval", "exec", "dir", "_getframe"})

_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

# Preconditions.


def may_move() -> bool:
    """Returns whether no debugger or coverage tool traces lines, by a trace function or (from 3.12 on) by events."""
    return sys.gettrace() is None and (_MONITORING is None or not any(map(_MONITORING.get_tool, range(6))))


_MONITORING: ModuleType | None = getattr(sys, "monitoring", None)


def looks_at_variables(code: CodeType) -> bool:
    """Returns whether a function inspects its own variables."""
    return not _LOOKING.isdisjoint(code.co_names)


def identity_is_asked(frame: FrameType | None) -> bool:
    """Returns whether a function or one of its callers tests whether two values are the same object."""
    while frame is not None and not is_entry(frame.f_code):
        if is_user(frame.f_code) and asks_identity(frame.f_code, frame.f_globals):
            return True
        frame = frame.f_back
    return False


def is_decorated(frame: FrameType) -> bool:
    """Returns whether a frame is that of the decorated function, called by the runtime."""
    return frame.f_back is not None and is_entry(frame.f_back.f_code)


def answer_for(test: ast.expr, wanted: bool) -> bool | None:
    """Returns the answer that, for any tensor in a test, makes the test `wanted` at once; None if there is none."""
    if is_plain(test):
        return wanted
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return answer_for(test.operand, not wanted)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) is wanted:
        answers = {answer_for(part, wanted) for part in test.values}
        return answers.pop() if len(answers) == 1 else None
    compares = isinstance(test, ast.Compare) and all(map(is_plain, (test.left, *test.comparators)))
    return False if compares and not wanted else None


class Past(NamedTuple):
    """How a frame gets past a statement: by which answer, and where it resumes if that is not enough."""

    answer: bool
    line: int | None = None


def way_past(decision: Decision, code: CodeType, bound: Iterable[str]) -> Past:
    """Returns how to keep Python from running either branch of an `if`; raises `Refused` if there is no way.

    `bound` holds the names of the variables that are bound there.
    """
    branch: ast.If = decision.statement  # type: ignore[assignment]  # nothing else is asked for
    no = answer_for(branch.test, False)
    if no is not None and not branch.orelse:
        return Past(no)
    if decision.next is None:
        raise Refused("there is no one statement behind it")
    return Past(_answer_in_front(branch, bool(branch.orelse)), _line_to(decision.next, code, bound))


def _answer_in_front(branch: ast.If, goes_on: bool) -> bool:
    """Returns an answer that takes a frame to a line of a branch; `goes_on`: False leads to one, too.

    Raises `Refused` if there is none.
    """
    no, yes = answer_for(branch.test, False), answer_for(branch.test, True)
    if no is not None and goes_on:
        return no
    if yes is None:
        raise Refused("its test asks for more, whatever the answer")
    if branch.body[0].lineno == (branch.test.end_lineno or branch.test.lineno):
        raise Refused("its test and what it decides about are on one line")
    return yes


def way_into_else(loop: ast.For, code: CodeType, bound: Iterable[str]) -> int | None:
    """Returns the line where Python resumes after a range loop that ran to its end, if that has an `else`."""
    return _line_to(loop.orelse[0], code, bound) if loop.orelse else None


def _line_to(statement: ast.stmt, code: CodeType, bound: Iterable[str]) -> int:
    if sys.version_info >= (3, 12) and not READABLE and not set(code.co_varnames).issubset(bound):
        raise Refused("Python would give a value to variables that have none yet, where a frame goes on elsewhere")
    line = line_of(code, statement)
    if line is None:
        raise Refused("the statement behind it has no line of its own")
    return line


def answer_at_once(statement: Simple) -> bool:
    """Returns the answer that leaves an assignment only variables to evaluate; raises `Refused` if there is none."""
    value = statement.value
    found = None
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if isinstance(value, ast.IfExp) and is_plain(value.body) and is_plain(value.orelse):
            ways = [(True, value.body), (False, value.orelse)]
            answers = [answer_for(value.test, yes) for yes, way in ways if _fits(way, targets)]
            found = next((answer for answer in answers if answer is not None), None)
        elif all(isinstance(target, ast.Name) for target in targets):
            if isinstance(value, ast.BoolOp) and all(map(is_plain, value.values)):
                found = isinstance(value.op, ast.Or)
            elif isinstance(value, ast.Compare):
                found = answer_for(value, False)
    if found is None:
        raise Refused("whatever the answer, Python has more of the statement to evaluate than variables")
    return found


def _fits(way: ast.expr, targets: Sequence[ast.expr]) -> bool:
    """Whether evaluating `way` and assigning it to `targets` runs no code of the program."""
    for target in targets:
        if isinstance(target, ast.Name):
            continue
        names = isinstance(target, (ast.Tuple, ast.List)) and all(isinstance(t, ast.Name) for t in target.elts)
        if (
            not names
            or not isinstance(way, (ast.Tuple, ast.List))
            or len(way.elts) != len(target.elts)  # type: ignore[attr-defined]
        ):
            return False
    parts = way.elts if isinstance(way, (ast.Tuple, ast.List)) else [way]
    return all(isinstance(part, (ast.Name, ast.Constant)) for part in parts)


# How functions other than the decorated one are left.


class Exit(NamedTuple):
    """A `return` of nothing but variables, and the answer that takes the frame to it."""

    names: str | tuple[str, ...]
    answer: bool
    statement: ast.Return | None = None  # where the frame jumps to; None where the answer is enough


def exits(decision: Decision, frame: FrameType) -> list[Exit]:
    """Returns the exits by which a function can be left at a statement that may return, whatever the value."""
    code, statement = frame.f_code, decision.statement
    if code.co_flags & _LATER:
        return []
    found: list[Exit] = []
    if isinstance(statement, ast.Return) and isinstance(statement.value, ast.IfExp):
        value = statement.value
        if is_plain(value.body) and is_plain(value.orelse):
            for yes, way in ((True, value.body), (False, value.orelse)):
                names, answer = _names_of(way, code), answer_for(value.test, yes)
                if names is not None and answer is not None:
                    found.append(Exit(names, answer))
    elif isinstance(statement, ast.If):
        function = function_of(code, frame.f_globals)
        try:
            answer = _answer_in_front(statement, bool(statement.orelse or decision.rest))
        except Refused:
            return []
        for returned in _plain_returns(getattr(function, "body", [])):
            names = _names_of(returned.value, code)
            if names is not None and line_of(code, returned) is not None:
                found.append(Exit(names, answer, returned))
    return found


def exit_for(ways: list[Exit], form: Form) -> Exit | None:
    """Returns the exit that can return a value of this form: a tuple, or anything else."""
    fitting = [
        way for way in ways if isinstance(way.names, str) or (type(form) is tuple and len(form) == len(way.names))
    ]
    return fitting[0] if fitting else None


def _names_of(value: ast.expr | None, code: CodeType) -> str | tuple[str, ...] | None:
    """Returns the function's own variables that an expression consists of: one, or a tuple; else None."""
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    own = set(code.co_varnames).difference(code.co_cellvars)
    if not names or len(names) != len(parts) or len(set(names)) != len(names) or not own.issuperset(names):
        return None
    return tuple(names) if isinstance(value, ast.Tuple) else names[0]


def _plain_returns(body: list[ast.stmt] | ast.expr) -> list[ast.Return]:
    """Returns a function's `return` statements that are nested in nothing but `if`s."""
    found: list[ast.Return] = []
    for statement in body if isinstance(body, list) else []:
        if isinstance(statement, ast.Return):
            found.append(statement)
        elif isinstance(statement, ast.If):
            found += [*_plain_returns(statement.body), *_plain_returns(statement.orelse)]
    return found


def line_of_exit(way: Exit, code: CodeType, bound: Iterable[str]) -> int | None:
    """Returns the line where the frame resumes to leave the function; None if the answer is enough."""
    return None if way.statement is None else _line_to(way.statement, code, bound)


class Callers:
    """A cache of call sites: the statements that call functions, and whether a failure there may be caught."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[CodeType, Decision | None, bool]] = {}  # by code and instruction

    def returning(self, frame: FrameType) -> tuple[FrameType, Decision] | None:
        """Returns the decorated function's frame and its `return` statement, if that calls what is running.

        None if an exception could be caught on the way there.
        """
        decision, guarded = self._at(frame)
        while frame.f_back is not None and is_user(frame.f_back.f_code) and not is_entry(frame.f_back.f_code):
            frame = frame.f_back
            decision, guards = self._at(frame)
            guarded = guarded or guards
        if guarded or decision is None or not isinstance(decision.statement, ast.Return) or not is_decorated(frame):
            return None
        return frame, decision

    def _at(self, frame: FrameType) -> tuple[Decision | None, bool]:
        """Returns the statement in which a frame is calling, and whether a failure there may be caught."""
        code, namespace = frame.f_code, frame.f_globals
        offset = start_of(code, frame.f_lasti)
        found = self._known.get((id(code), offset))
        if found is None:
            if len(self._known) >= tuning.max_callers:
                self._known.clear()
            found = code, call_at(code, offset, namespace), is_guarded(code, offset, namespace)
            self._known[id(code), offset] = found
        return found[1:]


def refuse_guarded(frame: FrameType) -> None:
    """Raises `Refused` if a frame is within a `try` or `with`."""
    if is_guarded(frame.f_code, frame.f_lasti, frame.f_globals):
        raise Refused("a way through it returns from within a `try` or `with`")


# Moves.


def locals_of(frame: FrameType) -> dict[str, Value]:
    """Returns the variables of a running function."""
    variables = frame.f_locals
    found = dict(variables)
    if _COPIED and not _is_kept(variables):
        variables.clear()
    return found


def set_locals(frame: FrameType, values: dict[str, Value]) -> None:
    """Sets local variables of a running function; variables shared with inner functions must not be among them."""
    variables = frame.f_locals
    if not _COPIED:
        variables.update(values)
        return
    shown = dict(variables) if _is_kept(variables) else {}
    variables.clear()  # only what is in the dict is written back: the other variables keep their values
    variables.update(values)
    _write_back(frame, 0)
    variables.clear()
    variables.update(shown)


def _is_kept(variables: dict[str, Value]) -> bool:
    """Returns whether somebody else holds the dict of `f_locals`, which is the frame's and the caller's local one."""
    return sys.getrefcount(variables) > 4  # those two, the parameter, the argument


_COPIED = sys.version_info < (3, 13)  # `f_locals` is a copy that the frame keeps, with all its values

hooks.Hooks(
    __name__,
    "`sys.settrace` on the calling thread, `f_trace` of a frame",
    "Python goes on behind what the device has done; not where a debugger traces",
    "a frame comes to the end of a statement",
)

_write_back = ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.c_int)(("PyFrame_LocalsToFast", ctypes.pythonapi))


class Moves:
    """The frames that are being moved, and the answers to their further tests."""

    def __init__(self) -> None:
        self._answers: dict[int, tuple[object, bool]] = {}  # by the id of the frame: the site, and the answer there

    def answer(self, frame: FrameType, site: object) -> bool | None:
        """Returns the answer for a frame that is being moved past a site; None for any other frame."""
        found = self._answers.get(id(frame)) if self._answers else None
        return found[1] if found is not None and found[0] is site and sys.gettrace() is _nothing else None

    def lead(
        self, frame: FrameType, site: object, answer: bool, *,
        lines: range = range(0), line: int | None = None, values: dict[str, Value] | None = None,
    ) -> bool:  # fmt: skip
        """Returns `answer`, which all tests of `site` get until the frame reaches a line outside of `lines`.

        There its variables are set to `values`, and it resumes at `line`.
        """
        before = frame.f_trace

        def tracing(at: FrameType, event: str, _: object) -> TraceFunction | None:
            if event == "line" and at.f_lineno not in lines:
                try:
                    if line is not None:
                        with jumping(at):
                            at.f_lineno = line  # type: ignore[misc]  # only while a line is traced
                    if values:
                        at.f_locals.update(values)  # written back after this call
                finally:
                    end()
                return None
            if event in ("exception", "return"):  # the statement does not complete, because of an interrupt for example
                end()
                return None
            return tracing

        def end() -> None:
            sys.settrace(None)
            frame.f_trace = before
            self._answers.pop(id(frame), None)

        self._answers[id(frame)] = site, answer
        frame.f_trace = tracing
        sys.settrace(_nothing)
        return answer


def _nothing(*_: object) -> None:
    """Traces no other function."""
