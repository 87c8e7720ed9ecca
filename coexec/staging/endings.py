"""Endings: which calls of itself there are in a function of the user's, and which of its ways have none.

Python carries out for nothing what the device has done, and is told at each `if` to go where that ends.
"""

from __future__ import annotations

import ast
import types
from typing import Any

from tracer.source import function_of
from tracer.syntax import is_mixed


def calls_itself(code: types.CodeType, namespace: dict[str, Any]) -> bool:
    """Returns whether a function calls something of its own name; `namespace` holds its globals."""
    tree = function_of(code, namespace)
    return tree is not None and bool(calls_of(tree, {code.co_name}))


def ends_soon(tree: Any, names: set[str]) -> bool:
    """Returns whether each call of these names is behind an `if`, or inside of one, of which another way has none.

    Python takes that way where it carries the function out for nothing.
    """

    def covered(statements: list[ast.stmt], is_behind: bool) -> bool:
        for statement in statements:
            ways = [statement.body, statement.orelse] if isinstance(statement, ast.If) else []
            free = [not any(calls_of(inner, names) for inner in way) for way in ways]
            plain = isinstance(statement, ast.If) and not is_mixed(statement.test)
            if not is_behind and calls_of(getattr(statement, "test", statement) if ways else statement, names):
                if ways or not _chooses(statement, names):
                    return False
            elif ways and not is_behind:
                if not all(covered(way, plain and any(free)) for way in ways):
                    return False
                ends = [bool(way) and isinstance(way[-1], ast.Return) for way in ways]
                is_behind = plain and any(map(all, zip(free, ends, strict=True)))
        return True

    if isinstance(tree, ast.Lambda):
        return _chooses(tree.body, names)
    return covered(tree.body, False)


def _chooses(node: ast.AST, names: set[str]) -> bool:
    """Whether all calls are in one way of the only conditional expression."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.IfExp)]
    if len(found) != 1 or is_mixed(found[0].test) or calls_of(found[0].test, names):
        return False
    costs = [calls_of(way, names) for way in (found[0].body, found[0].orelse)]
    return min(costs) == 0 and sum(costs) == calls_of(node, names)


def calls_of(node: ast.AST, names: set[str]) -> int:
    """Returns how many calls of something of these names there are in a piece of syntax."""
    return sum(
        isinstance(n, ast.Call) and (getattr(n.func, "id", None) in names or getattr(n.func, "attr", None) in names)
        for n in ast.walk(node)
    )


