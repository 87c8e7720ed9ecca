"""Forms: what the source of a function shows that it may do, whatever path it takes.

A function whose every statement binds local names, calls, or ends it can do nothing to the program but by what it
calls. What it looks at from outside are the names and attributes that are written in it. Source counts only if it
compiles to the very code that runs (`syntax`).
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from tracer.errors import Refused
from tracer.syntax import function_of

# What changes the list, dict or set that it is a method of.
_CHANGING = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem", "popleft",
    "remove", "reverse", "setdefault", "sort", "update",
})  # fmt: skip

_STATEMENTS = (
    ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.If, ast.For, ast.While, ast.Pass, ast.Break,
    ast.Continue, ast.Raise, ast.Assert,
)  # fmt: skip
_EXPRESSIONS = (
    ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Dict, ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.Compare,
    ast.Call, ast.JoinedStr, ast.FormattedValue, ast.Constant, ast.Attribute, ast.Subscript, ast.Starred, ast.Name,
    ast.List, ast.Tuple, ast.Slice, ast.NamedExpr,
)  # fmt: skip
_PARTS = (
    ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop, ast.comprehension, ast.keyword, ast.arguments,
    ast.arg,
)  # fmt: skip
_SAID: dict[type, str] = {
    ast.Global: "`global`", ast.Nonlocal: "`nonlocal`", ast.Try: "`try`", ast.With: "`with`", ast.Delete: "`del`",
    ast.Import: "an import", ast.ImportFrom: "an import", ast.FunctionDef: "a function is defined",
    ast.Lambda: "a lambda is made", ast.Yield: "`yield`", ast.YieldFrom: "`yield`", ast.Await: "`await`",
    ast.Set: "the order of a set", ast.SetComp: "the order of a set", ast.ClassDef: "a class is defined",
}  # fmt: skip


class Forms(NamedTuple):
    """What a function looks at from outside of it."""

    chains: frozenset[tuple[str, ...]]  # names that are not its own, each with the attributes asked of it in a row
    attributes: frozenset[str]  # names of all attributes that it asks for
    codes: tuple[CodeType, ...]  # its own, and those of comprehensions inside of it


_known: dict[int, tuple[CodeType, Forms | str]] = {}
MAX_KNOWN = 2000


def has_source(code: CodeType, namespace: dict[str, Any]) -> bool:
    """Returns whether it can be told what a function may do."""
    return isinstance(function_of(code, namespace), ast.FunctionDef)


def forms_of(code: CodeType, namespace: dict[str, Any]) -> Forms:
    """Returns what a function looks at.

    Raises:
      Refused: if it may do more than compute, with the line; or if its source is not known.
    """
    found = _known.get(id(code))
    if found is None:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        forms: Forms | str
        try:
            forms = _forms(code, namespace)
        except Refused as refused:
            forms = str(refused)
        found = _known[id(code)] = code, forms
    if isinstance(found[1], str):
        raise Refused(found[1])
    return found[1]


def _forms(code: CodeType, namespace: dict[str, Any]) -> Forms:
    tree = function_of(code, namespace)
    if not isinstance(tree, ast.FunctionDef):
        raise Refused(f"the source of {code.co_name} is not known")
    nodes = [node for statement in tree.body for node in ast.walk(statement)]
    codes = tuple(_nested(code))
    outside = {*code.co_freevars}
    for each in codes:
        outside.update(i.argval for i in dis.get_instructions(each) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    own = _own(tree, nodes)
    chains: set[tuple[str, ...]] = set()
    inner: set[int] = set()  # nodes that are part of a longer chain
    for node in nodes:
        if not isinstance(node, (*_STATEMENTS, *_EXPRESSIONS, *_PARTS)):
            raise _refused(node, _SAID.get(type(node), type(node).__name__))
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            if isinstance(node, ast.Attribute) or not _is_own(node.value, own):
                raise _refused(node, "something is written into what it has not made itself")
        if isinstance(node, ast.Attribute) and node.attr in _CHANGING and not _is_own(node.value, own):
            root = _chain(node, set())[:1]
            if not outside.intersection(root) or not isinstance(namespace.get(root[0]), ModuleType):
                raise _refused(node, f"`.{node.attr}` of what it has not made itself")
        if isinstance(node, ast.Compare):
            _look_at_identity(node)
        if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner:
            chain = _chain(node, inner)
            if chain and chain[0] in outside:
                chains.add(chain)
    attributes = frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))
    if any(name.startswith("__") and not name.endswith("__") for name in (*attributes, *outside)):
        raise Refused(f"{code.co_name} looks at private names of its class")
    return Forms(frozenset(chains), attributes, codes)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _nested(const)


def _own(tree: ast.FunctionDef, nodes: list[ast.AST]) -> set[str]:
    """Returns the local names that never hold another container than one that was made in the function."""
    made: set[str] = set()
    bound = {arg.arg for arg in ast.walk(tree.args) if isinstance(arg, ast.arg)}
    displays: set[int] = set()
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(
            node.value, (ast.List, ast.Dict, ast.ListComp, ast.DictComp)
        ):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    made.add(target.id)
                    displays.add(id(target))
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in displays:
            bound.add(node.id)
    return made - bound


def _is_own(node: ast.expr, own: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in own


def _chain(node: ast.expr, inner: set[int]) -> tuple[str, ...]:
    """Returns the name and attributes that an expression consists of; an empty one if it has other parts."""
    names: list[str] = []
    at = node
    while isinstance(at, ast.Attribute):
        inner.add(id(at.value))
        names.append(at.attr)
        at = at.value
    return (at.id, *reversed(names)) if isinstance(at, ast.Name) else ()


def _look_at_identity(node: ast.Compare) -> None:
    operands = [node.left, *node.comparators]
    for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
        if isinstance(op, (ast.Is, ast.IsNot)) and not any(isinstance(v, ast.Constant) for v in (left, right)):
            raise _refused(node, "the identity of values is asked for")


def _refused(node: Any, reason: str) -> Refused:
    line = getattr(node, "lineno", None)
    return Refused(reason if line is None else f"line {line}: {reason}")
