"""Syntax: the loop, branch or other statement that an instruction decides.

Relies on `co_positions` (Python 3.11) for the expression that an instruction belongs to.
"""

from __future__ import annotations

import ast
import dis
import functools
import sys
from types import CodeType
from typing import Any, NamedTuple

from tracer.source import function_of

# Statements in which an expression may test a truth value; the decision is that of the whole statement.
Simple = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return


class Decision(NamedTuple):
    """A place where Python tests a truth value: the statement it decides, and how.

    For an `if` that leaves the enclosing loop, the statement is that loop, rotated to start at the `if`.
    """

    statement: ast.While | ast.For | ast.If | ast.Assert | Simple
    negated: bool  # whether the opposite of the truth decides (`while not x`)
    rest: tuple[ast.stmt, ...] | None = None  # of a branch: what runs after it; None inside a loop, `try` or `with`
    next: ast.stmt | None = None  # of a branch: the statement that follows, if there is only one
    leaves: ast.If | None = None  # of a loop over a range: the `if` that tests, and only leaves the loop
    unread: frozenset[str] = frozenset()  # of a branch: names it assigns that nothing else reads

    @property
    def asks_often(self) -> bool:
        """Whether several truth values may be tested before the decision is made."""
        test = getattr(self.statement, "test", None)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test = test.operand
        return test is None or not is_plain(test)

    @property
    def compares_on(self) -> bool:
        """Whether the test has a chained comparison, whose next operand is on Python's stack already."""
        test = getattr(self.statement, "test", None)
        return test is not None and any(isinstance(n, ast.Compare) and len(n.ops) > 1 for n in ast.walk(test))


def decision_at(code: CodeType, offset: int, namespace: dict[str, Any]) -> Decision | None:
    """Returns what the instruction at byte `offset` decides: whether a loop continues, which branch an `if` takes, the
    value of an expression, or whether an assertion holds.

    The test of a loop must be a plain expression, several joined by one of `and` and `or`, or negations of such.
    Whichever operand is tested, its truth then decides whether the loop continues. (The instruction does not reliably
    identify the operand.)
    """
    positions = getattr(code, "co_positions", None)
    if positions is None or not _tests(code, offset):
        return None
    if code.co_name in _COMPREHENSIONS:
        return Decision(_given(code), False)
    function = function_of(code, namespace)
    if isinstance(function, ast.Lambda):
        whole = _returned(function)
        return None if is_plain(whole) else Decision(whole, False)
    if not isinstance(function, ast.FunctionDef):
        return None
    line, end_line, column, end_column = list(positions())[offset // 2]
    place = line, column, end_line, end_column
    for statement in _own_statements(function.body):
        if isinstance(statement, ast.If):
            negated = _asked(statement, place)
            if negated is None and _is_within(place, statement.test, statement):
                negated = False  # its operands are tested several times, in some order
            if negated is not None:
                return _branch(function, statement, negated)
        if isinstance(statement, Simple) and _is_within(place, statement):
            decides = not is_plain(statement) and _is_alone(function, statement)
            return Decision(statement, False) if decides else None
        if isinstance(statement, ast.Assert) and _is_within(place, statement):
            return Decision(statement, False) if is_chain(statement.test) else None
        if isinstance(statement, ast.For):
            for inner in statement.body:
                if isinstance(inner, ast.If) and _is_left(statement, inner):
                    negated = _asked(inner, place)
                    if negated is not None and not (statement.orelse and _is_in_finally(function, statement)):
                        return Decision(statement, negated, leaves=inner)
        if not isinstance(statement, ast.While):
            continue
        negated = _asked(statement, place)
        if negated is not None:
            return Decision(statement, negated)
        for number, inner in enumerate(statement.body):
            negated = _asked(inner, place) if isinstance(inner, ast.If) else None
            if negated is not None:
                found = _seen_from(statement, number, negated)
                if found is not None:
                    return found
    return None


# Set in the argument of a comparison, from Python 3.13 on: its result's truth is taken in the same instruction.
_TAKES_TRUTH = 16 if sys.version_info >= (3, 13) else 0


def _tests(code: CodeType, offset: int) -> bool:
    """Returns whether an instruction takes a truth value to jump by; a call may take one as well, for example `any`."""
    name, *others = [dis.opname[op] for op in code.co_code[offset::2] if dis.opname[op] != "CACHE"][:2]
    if name == "COMPARE_OP":
        return bool(code.co_code[offset + 1] & _TAKES_TRUTH)
    return "JUMP" in name or (name == "TO_BOOL" and others != ["UNARY_NOT"])  # from Python 3.13 on, `not` has that, too


def call_at(code: CodeType, offset: int, namespace: dict[str, Any]) -> Decision | None:
    """Returns the assignment or `return` inside which the instruction at byte `offset` makes a call."""
    positions = getattr(code, "co_positions", None)
    function = None if positions is None else function_of(code, namespace)
    if isinstance(function, ast.Lambda):
        return Decision(_returned(function), False)
    if not isinstance(function, ast.FunctionDef):
        return None
    line, end_line, column, end_column = list(positions())[offset // 2]  # type: ignore[misc]
    if line is None or column is None:
        return None
    for statement in _own_statements(function.body):
        if isinstance(statement, Simple) and _is_within((line, column, end_line, end_column), statement):
            return Decision(statement, False) if _is_alone(function, statement) else None
    return None


# Code objects that are not functions: a truth value tested there decides the statement around the comprehension.
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})


@functools.lru_cache(maxsize=1024)
def comprehensions_of(code: CodeType) -> frozenset[CodeType]:
    """Returns the code objects of a function's comprehensions, recursively, as far as they have their own."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name in _COMPREHENSIONS]
    return frozenset(inner).union(*map(comprehensions_of, inner))


@functools.lru_cache(maxsize=1024)
def shared_names(code: CodeType) -> frozenset[str]:
    """Returns the names that a function shares with others, not counting comprehensions, which run in place."""
    inner = [c for part in (code, *comprehensions_of(code)) for c in part.co_consts if isinstance(c, CodeType)]
    return frozenset(code.co_freevars).union(*(c.co_freevars for c in inner if c.co_name not in _COMPREHENSIONS))


@functools.lru_cache(maxsize=1024)
def _returned(function: ast.Lambda) -> ast.Return:
    """Returns the `return` statement that a lambda is short for."""
    return ast.copy_location(ast.Return(function.body), function.body)


@functools.lru_cache(maxsize=1024)
def _given(code: CodeType) -> ast.Return:
    """Returns a `return` that stands for a comprehension, about which only that it produces a value is known."""
    return ast.Return(None, lineno=code.co_firstlineno, end_lineno=code.co_firstlineno, col_offset=0, end_col_offset=0)


def _branch(function: ast.FunctionDef, branch: ast.If, negated: bool) -> Decision:
    """Returns the decision of an `if`: what follows it, and whether that is the end of the function."""
    blocks = _blocks_to(function, branch)
    rest: list[ast.stmt] | None = [] if blocks else None
    following: ast.stmt | None = None
    for parent, behind in reversed(blocks):
        if following is None and behind:
            following = behind[0]
        elif following is None and isinstance(parent, ast.While) and not isinstance(parent.test, ast.Constant):
            following = parent
        if rest is not None:
            rest += behind
        if not isinstance(parent, (ast.If, ast.FunctionDef)):
            rest = None
            if following is None:
                break
    if _is_in_finally(function, branch):
        following = None  # a line does not say in which copy
    unread: frozenset[str] = frozenset()
    if blocks and not any(isinstance(parent, (ast.For, ast.AsyncFor, ast.While)) for parent, _ in blocks):
        inside = set(map(id, ast.walk(branch)))
        read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and id(n) not in inside}
        unread = frozenset(assigned_names([branch]) - read)
    behind = None if rest is None else tuple(rest)
    return Decision(branch, negated, behind, following, unread=unread)


def names_read(code: CodeType, namespace: dict[str, Any], statement: ast.AST | None) -> frozenset[str]:
    """Returns the names that a function reads outside of one of its statements."""
    function = function_of(code, namespace)
    inside = set() if statement is None else set(map(id, ast.walk(statement)))
    found = ast.walk(function) if function is not None else ()
    return frozenset(
        n.id for n in found if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store) and id(n) not in inside
    )


def _blocks_to(parent: Any, statement: ast.stmt) -> list[tuple[Any, list[ast.stmt]]]:
    """Returns the statements around a statement, outermost first, each with what follows in its block.

    Returns an empty list for a statement in the `else` of a loop.
    """
    loops = isinstance(parent, (ast.For, ast.AsyncFor, ast.While))
    for field in ("body",) if loops else ("body", "orelse", "finalbody", "handlers", "cases"):
        block = getattr(parent, field, [])
        for number, inner in enumerate(block if isinstance(block, list) else []):
            if inner is statement:
                return [(parent, block[number + 1 :])]
            if not isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found = _blocks_to(inner, statement)
                if found:
                    return [(parent, block[number + 1 :] if isinstance(inner, ast.stmt) else []), *found]
    return []


@functools.lru_cache(maxsize=1024)
def line_of(code: CodeType, statement: ast.stmt) -> int | None:
    """Returns the line at which a statement's instructions start; None if others start there earlier, as in `a; b`.

    Setting `f_lineno` jumps to the first possible instruction of a line, and a statement may occur again later, for
    example in copies that handle exceptions.
    """
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return None
    starts = list(dis.findlinestarts(code))
    first = _start_of(code, statement)
    for offset, line in starts:
        if offset == first:
            return None if any(other == line and at < offset for at, other in starts) else line
    return None


def _start_of(code: CodeType, statement: ast.stmt) -> int | None:
    """Returns the offset of a statement's first instruction, by its place in the source."""
    begins = statement.lineno, statement.col_offset
    ends = statement.end_lineno or 0, statement.end_col_offset or 0
    for number, (line, end, column, end_column) in enumerate(code.co_positions()):
        if line is None or end is None or column is None or end_column is None:
            continue
        if begins <= (line, column) and (end, end_column) <= ends:
            return 2 * number
    return None


def _is_in_finally(function: ast.FunctionDef, statement: ast.stmt) -> bool:
    """Returns whether a statement is in a `finally`, of which the code has a copy for each way out of the `try`."""
    return any(
        inner is statement
        for node in ast.walk(function)
        for last in getattr(node, "finalbody", ())  # of `try` with `except`, or with `except*`
        for inner in ast.walk(last)
    )  # fmt: skip


def _asked(statement: ast.While | ast.If, place: tuple[int, int, int, int]) -> bool | None:
    """Returns whether the truth value tested at a place decides a statement negated; None if it decides nothing."""
    if not _is_within(place, statement.test, statement):
        return None
    test = statement.test
    if is_chain(test) and (isinstance(statement, ast.If) or test.lineno == test.end_lineno):
        return False
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    negations = [p for p in parts if isinstance(p, ast.UnaryOp) and isinstance(p.op, ast.Not)]
    atoms = [p.operand for p in negations] if len(negations) == len(parts) else parts
    if not all(map(is_plain, atoms)):
        return None
    return bool(negations)


def is_plain(test: ast.AST) -> bool:
    """Whether evaluating a test needs no truth value in between."""
    return not any(asks(node) for node in ast.walk(test))


def is_chain(test: ast.expr) -> bool:
    """Whether a test is true exactly if all the truth values it tests are, and stops at the first false one."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and all(map(is_chain, test.values))
    parts = [test.left, *test.comparators] if isinstance(test, ast.Compare) else [test]
    return all(map(is_plain, parts))


def _is_within(place: tuple[int, int, int, int], node: ast.AST, also: ast.AST | None = None) -> bool:
    """Whether an instruction's position is inside that of a node, or equal to that of `also`."""
    line, column, end_line, end_column = place
    first, last = _extent(node)[:2], _extent(node)[2:]
    return (also is not None and place == _extent(also)) or (
        first <= (line, column) and (end_line, end_column) <= last
    )


def _is_alone(function: ast.FunctionDef, statement: ast.stmt) -> bool:
    """Whether no other statement of a function starts or ends on the lines of this one."""
    first, last = statement.lineno, statement.end_lineno or 0
    return all(
        other is statement
        or (other.end_lineno or 0) < first
        or other.lineno > last
        or (other.lineno < first and any(n is statement for n in ast.walk(other)))
        for other in _own_statements(function.body)
    )


def asks(node: ast.AST) -> bool:
    """Whether evaluating an expression tests a truth value in between, or keeps a value on the stack meanwhile."""
    if isinstance(node, ast.Compare):
        return len(node.ops) > 1
    return isinstance(node, (ast.BoolOp, ast.IfExp, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp,
                             ast.GeneratorExp)) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def _seen_from(loop: ast.While, number: int, negated: bool) -> Decision | None:
    """Returns the loop rotated to start at statement `number` of its body, an `if` with one branch that leaves it."""
    statement = loop.body[number]
    assert isinstance(statement, ast.If)
    leaves = [_leaves(statement.body), _leaves(statement.orelse)]
    if leaves[0] is leaves[1] or any(isinstance(n, ast.Continue) for s in loop.body for n in ast.walk(s)):
        return None
    test: ast.expr = ast.UnaryOp(ast.Not(), statement.test) if leaves[0] else statement.test
    ends: list[ast.stmt] = [ast.If(ast.UnaryOp(ast.Not(), loop.test), [ast.Break()], [])]
    if isinstance(loop.test, ast.Constant) and loop.test.value:
        ends = []
    body = [*(statement.orelse if leaves[0] else statement.body), *loop.body[number + 1 :], *ends, *loop.body[:number]]
    return Decision(ast.While(test, body or [ast.Pass()], []), negated is not leaves[0])


def _is_left(loop: ast.For, branch: ast.If) -> bool:
    """Whether an `if` in a loop over a range only leaves the loop, and nothing else ends an iteration."""
    numbers, body = loop.iter, loop.body
    if not isinstance(numbers, ast.Call) or not isinstance(numbers.func, ast.Name) or numbers.func.id != "range":
        return False
    if isinstance(branch.test, (ast.BoolOp, ast.Compare)) and is_chain(branch.test) and asks(branch.test):
        return False  # the next operand would be tested after this one
    if not isinstance(loop.target, ast.Name) or numbers.keywords or branch.orelse:
        return False
    if len(branch.body) != 1 or not isinstance(branch.body[0], ast.Break) or not 1 <= len(numbers.args) <= 3:
        return False
    if any(isinstance(n, (ast.Continue, ast.Return)) for s in body for n in ast.walk(s)):
        return False
    changed = assigned_names(body) | {loop.target.id}
    if loop.target.id in assigned_names(body):
        return False
    return all(_is_whole(a) or (isinstance(a, ast.Name) and a.id not in changed) for a in numbers.args) and (
        len(numbers.args) < 3 or _is_whole(numbers.args[2])
    )


def _is_whole(node: ast.expr) -> bool:
    """Whether this is an integer literal."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) is int


def _leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Break, ast.Return, ast.Raise))


def _extent(node: Any) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _own_statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Returns all statements in a body, except those of functions and classes defined there."""
    found: list[ast.stmt] = []
    for statement in body:
        found.append(statement)
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for part in ast.iter_child_nodes(statement):
                if isinstance(part, ast.stmt):
                    found += _own_statements([part])
                elif isinstance(part, (ast.ExceptHandler, ast.match_case)):
                    found += _own_statements(part.body)
    return found


def assigned_names(statements: list[Any]) -> set[str]:
    """Returns the names that statements assign, except inside functions and comprehensions."""
    names: set[str] = set()
    ahead: list[Any] = list(statements)
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                names.add(node.id)
        elif not isinstance(node, (ast.Lambda, ast.FunctionDef, ast.ListComp, ast.SetComp, ast.DictComp,
                                   ast.GeneratorExp)):
            ahead.extend(ast.iter_child_nodes(node))
    return names


def is_read(statements: list[ast.stmt], name: str) -> bool:
    """Returns whether statements read a name."""
    return any(
        (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name)
        for statement in statements
        for node in ast.walk(statement)
    )


def asks_identity(code: CodeType, namespace: dict[str, Any]) -> bool:
    """Returns whether a function compares the identity of two values, neither of which is a literal constant."""
    function = function_of(code, namespace)
    return function is not None and any(
        isinstance(op, (ast.Is, ast.IsNot)) and not any(isinstance(v, ast.Constant) for v in (left, right))
        for node in ast.walk(function) if isinstance(node, ast.Compare)
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False)
    )  # fmt: skip
