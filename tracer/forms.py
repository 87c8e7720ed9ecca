"""Forms: what a function may do on any path, judged by its syntax.

If every statement of a function binds local names, calls, or leaves the function, it affects the program only through
what it calls. It may import modules that are loaded already, and define functions that live no longer than the call.
The outside values it depends on are the names and attributes in its source. Source counts only if it compiles to the
code that runs (`source`).
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from tracer.errors import Refused
from tracer.source import function_of

# Methods that mutate a list, dict or set.
_CHANGING = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem", "popleft",
    "remove", "reverse", "setdefault", "sort", "update",
})  # fmt: skip

# Methods of arrays, by the number of positional arguments that they take before `out`, an array that they write to.
_BEFORE_OUT = {
    "all": 1, "any": 1, "argmax": 1, "argmin": 1, "choose": 1, "clip": 2, "compress": 2, "cumprod": 2, "cumsum": 2,
    "dot": 1, "max": 1, "mean": 2, "min": 1, "prod": 2, "ptp": 1, "round": 1, "std": 2, "sum": 2, "take": 2,
    "trace": 4, "var": 2,
}  # fmt: skip

_STATEMENTS = (
    ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.If, ast.For, ast.While, ast.Pass, ast.Break,
    ast.Continue, ast.Raise, ast.Assert, ast.With, ast.Try, ast.Delete, ast.Import, ast.ImportFrom, ast.FunctionDef,
)  # fmt: skip
_EXPRESSIONS = (
    ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Dict, ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.Compare,
    ast.Call, ast.JoinedStr, ast.FormattedValue, ast.Constant, ast.Attribute, ast.Subscript, ast.Starred, ast.Name,
    ast.List, ast.Tuple, ast.Slice, ast.NamedExpr, ast.Lambda,
)  # fmt: skip
_PARTS = (
    ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop, ast.comprehension, ast.keyword, ast.arguments,
    ast.arg, ast.withitem, ast.ExceptHandler, ast.alias,
)  # fmt: skip
_SAID: dict[type, str] = {
    ast.Global: "`global`", ast.Nonlocal: "`nonlocal`", ast.Yield: "`yield`", ast.YieldFrom: "`yield`",
    ast.Await: "`await`",
    ast.Set: "the order of a set", ast.SetComp: "the order of a set", ast.ClassDef: "a class is defined",
}  # fmt: skip


class Forms(NamedTuple):
    """What a function reads from outside itself."""

    chains: frozenset[tuple[str, ...]]  # non-local names, each with the attribute path read from it
    attributes: frozenset[str]  # names of all attributes it reads
    codes: tuple[CodeType, ...]  # its own code, and that of nested comprehensions and functions
    optional: frozenset[str]  # attributes that may be missing without an error
    called: frozenset[tuple[str, ...]]  # chains whose values it only calls
    positional: dict[tuple[str, ...], int]  # the most positional arguments with which it calls each chain
    classes: frozenset[tuple[str, ...]]  # chains that it only uses for `isinstance`, `issubclass`
    made: dict[CodeType, tuple[str, ...]]  # nested functions, and comprehensions, with the variables that they share
    ambiguous: frozenset[str]  # attributes of its first argument that it calls, named like methods in `_CHANGING`
    makers: frozenset[str]  # those of `_MAKERS` that it looks up
    augmented: frozenset[str]  # arguments of its own that an operator such as `+=` may change in place
    formats: bool  # whether it makes text of values


_known: dict[int, tuple[CodeType, Forms | str]] = {}
MAX_KNOWN = 2000
MAX_POSITIONAL = 255


def has_source(code: CodeType, namespace: dict[str, Any]) -> bool:
    """Returns whether the function's source is known, so that it can be analysed."""
    return isinstance(function_of(code, namespace), ast.FunctionDef)


def forms_of(code: CodeType, namespace: dict[str, Any]) -> Forms:
    """Returns what a function reads from outside itself, memoized.

    Raises:
      Refused: if it may do more than compute, with the line, or if its source is not known.
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
    if not isinstance(tree, (ast.FunctionDef, ast.Lambda)):
        raise Refused(f"the source of {code.co_name} is not known")
    body = [tree.body] if isinstance(tree, ast.Lambda) else tree.body
    nodes = [node for part in body for node in ast.walk(part)]
    decorators = [] if isinstance(tree, ast.Lambda) else [ast.unparse(each) for each in tree.decorator_list]
    manager = not {"contextmanager", "contextlib.contextmanager"}.isdisjoint(decorators)
    codes = tuple(_nested(code))
    outside = {*code.co_freevars}
    for each in codes:
        outside.update(i.argval for i in dis.get_instructions(each) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    own = _own(tree.args, nodes) - outside
    imported = _imported(tree.args, nodes)
    used = _used(nodes)
    first, ambiguous = _first_argument(tree.args, nodes), set[str]()
    chains: set[tuple[str, ...]] = set()
    uses: dict[tuple[str, ...], set[str]] = {}
    inner: set[int] = set()  # ids of nodes inside a longer chain
    for node in nodes:
        if not isinstance(node, (*_STATEMENTS, *_EXPRESSIONS, *_PARTS)) and not (
            used.get(id(node)) == "member" or (manager and isinstance(node, ast.Yield))
        ):
            raise _refused(node, _SAID.get(type(node), type(node).__name__))
        _look_at_functions(node)
        if isinstance(node, ast.Call):
            called_on = "".join(_chain(node.func, set())[:1])
            _look_at_outputs(node, called_on in imported or isinstance(namespace.get(called_on), ModuleType))
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            if isinstance(node, ast.Attribute) or not _is_own(node.value, own):
                raise _refused(node, _WRITTEN)
        if isinstance(node, ast.Attribute) and node.attr in _CHANGING and not _is_own(node.value, own):
            root = _chain(node, set())[:1]
            if used.get(id(node)) == "called" and isinstance(node.value, ast.Name) and node.value.id == first:
                ambiguous.add(node.attr)
            elif not outside.intersection(root) or not isinstance(namespace.get(root[0]), ModuleType):
                raise _refused(node, not_its_own(node.attr))
        if isinstance(node, ast.Compare):
            _look_at_identity(node)
        if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner:
            chain = _chain(node, inner)
            if chain and chain[0] in ("getattr", "hasattr") and chain[0] in outside:
                if used.get(id(node)) != "asked":
                    raise _refused(node, f"`{chain[0]}` of a name that is computed")
            elif chain and chain[0] in imported and isinstance(node.ctx, ast.Load):
                chain = (*imported[chain[0]], *chain[1:])
                if len(chain) == 1:
                    raise _refused(node, "an import of a module that is handed on")
            elif chain and chain[0] not in outside:
                chain = ()
            if chain:
                chains.add(chain)
                uses.setdefault(chain, set()).add(used.get(id(node), ""))
    calls = [node for node in nodes if isinstance(node, ast.Call) and used.get(id(node.func)) == "asked"]
    asked = {str(name.value) for node in calls if isinstance(name := node.args[1], ast.Constant)}
    attributes = frozenset([*(node.attr for node in nodes if isinstance(node, ast.Attribute)), *asked])
    if any(isinstance(node, ast.With) for node in nodes):
        attributes |= {"__enter__", "__exit__"}
    if inner_parts := _PARTS_OF_FUNCTIONS & attributes:
        raise Refused(f"{code.co_name} looks at {min(inner_parts)}")
    if any(isinstance(node, ast.Constant) and str(node.value).startswith(_DATES) for node in nodes):
        raise Refused(f"{code.co_name} may ask for the time")
    if any(name.startswith("__") and not name.endswith("__") for name in (*attributes, *outside)):
        raise Refused(f"{code.co_name} looks at private names of its class")
    catches = any(isinstance(node, ast.ExceptHandler) for node in nodes)
    optional = attributes if catches else frozenset(asked)
    positional: dict[tuple[str, ...], int] = {}
    for node in nodes:
        if isinstance(node, ast.Call) and (chain := _chain(node.func, set())):
            chain = (*imported.get(chain[0], chain[:1]), *chain[1:])
            positional[chain] = max(positional.get(chain, 0), _positional(node))
    called = frozenset(chain for chain, ways in uses.items() if ways == {"called"})
    classes = frozenset(chain for chain, ways in uses.items() if ways == {"kind"})
    made = {
        each: each.co_freevars for each in codes[1:] if each.co_freevars or each.co_name not in _COMPREHENSIONS
    }  # fmt: skip
    read = frozenset(chains), attributes, codes, optional, called, positional, classes, made
    formats = any(isinstance(node, ast.FormattedValue) for node in nodes) or not _FORMATTING.isdisjoint(outside)
    augmented = _augmented(tree.args, nodes, own, namespace)
    return Forms(*read, frozenset(ambiguous), _MAKERS & outside, augmented, formats)


def not_its_own(method: str) -> str:
    """Returns the reason for which a function is refused that may change something by this method."""
    return f"`.{method}` of what it has not made itself"


_WRITTEN = "something is written into what it has not made itself"


def _look_at_outputs(node: ast.Call, of_module: bool) -> None:
    """Refuses calls that are given an array to write to: `np.clip(x, 0, 1, out=x)`, and methods by position.

    For functions of modules, `positional` says it, as their signatures differ.
    """
    if any(each.arg == "out" and not isinstance(each.value, ast.Constant) for each in node.keywords):
        raise _refused(node, _WRITTEN)
    if any(each.arg == "overwrite_input" for each in node.keywords):
        raise _refused(node, _WRITTEN)
    if isinstance(node.func, ast.Attribute) and not of_module:
        if _positional(node) > _BEFORE_OUT.get(node.func.attr, MAX_POSITIONAL):
            raise _refused(node, _WRITTEN)


def _positional(node: ast.Call) -> int:
    """Returns the number of positional arguments, and very many for `*args` and `**kwargs`."""
    spread = any(isinstance(each, ast.Starred) for each in node.args) or any(each.arg is None for each in node.keywords)
    return MAX_POSITIONAL if spread else len(node.args)


def _augmented(
    arguments: ast.arguments, nodes: list[ast.AST], own: set[str], namespace: dict[str, Any]
) -> frozenset[str]:
    """Returns the arguments that an augmented assignment may change in place, if they are arrays or lists.

    Raises `Refused` if it may change something that was there before, and is no argument.
    """
    given = {node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg)}
    values: dict[str, list[ast.expr]] = {}
    for node in nodes:
        for target, value in _bindings(node):
            for bound in ast.walk(target):
                if isinstance(bound, ast.Name):
                    values.setdefault(bound.id, []).append(value)
        if isinstance(node, (ast.For, ast.comprehension)):  # an item of something
            for bound in ast.walk(node.target):
                if isinstance(bound, ast.Name):
                    values.setdefault(bound.id, []).append(ast.Tuple([]))
        if isinstance(node, ast.NamedExpr):
            values.setdefault(node.target.id, []).append(node.value)
    found: set[str] = set()
    for node in nodes:
        if not isinstance(node, ast.AugAssign) or not isinstance(node.target, ast.Name) or node.target.id in own:
            continue
        names, seen = [node.target.id], set[str]()
        while names:
            name = names.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in given:
                found.add(name)
            elif name not in values:
                raise _refused(node, _WRITTEN)
            for value in values.get(name, ()):
                names += _aliases(value, node, namespace)
    return frozenset(found)


def _aliases(value: ast.expr, at: ast.AST, namespace: dict[str, Any]) -> list[str]:
    """Returns the names whose objects an expression may return; raises `Refused` for others that were there before."""
    if isinstance(value, ast.Name):
        return [value.id]
    if isinstance(value, ast.IfExp):
        return _aliases(value.body, at, namespace) + _aliases(value.orelse, at, namespace)
    if isinstance(value, ast.BoolOp):
        return [name for each in value.values for name in _aliases(each, at, namespace)]
    if isinstance(value, (ast.Tuple, ast.NamedExpr, ast.Attribute, ast.Subscript, ast.Starred)):
        raise _refused(at, _WRITTEN)
    if isinstance(value, ast.Call):
        root = "".join(_chain(value.func, set())[:1])
        of_numpy = getattr(namespace.get(root), "__name__", None) == "numpy"
        if of_numpy or (isinstance(value.func, ast.Attribute) and value.func.attr in _VIEWING):
            raise _refused(at, _WRITTEN)
    return []


# Methods of arrays whose results may share their memory.
_VIEWING = frozenset({"diagonal", "ravel", "reshape", "squeeze", "swapaxes", "transpose", "view"})


def _first_argument(arguments: ast.arguments, nodes: list[ast.AST]) -> str | None:
    """Returns the name of a function's first argument, if nothing else is ever bound to it."""
    positional = [*arguments.posonlyargs, *arguments.args]
    if not positional:
        return None
    name = positional[0].arg
    bound = [node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    bound += [node.arg for node in (*ast.walk(arguments), *nodes) if isinstance(node, ast.arg)]
    bound += [node.asname or node.name for node in nodes if isinstance(node, ast.alias)]
    bound += [node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ExceptHandler)) and node.name]
    return name if bound.count(name) == 1 else None


_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


def _imported(arguments: ast.arguments, nodes: list[ast.AST]) -> dict[str, tuple[str, ...]]:
    """Returns the local names bound by imports, with the chains that they stand for.

    Such a chain starts with `import ` and the module's name.
    """
    found: dict[str, tuple[str, ...]] = {}
    bound = [arg.arg for arg in ast.walk(arguments) if isinstance(arg, ast.arg)]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole, top = f"import {alias.name}", f"import {alias.name.partition('.')[0]}"
                bound.append(alias.asname or alias.name.partition(".")[0])
                found[bound[-1]] = (whole if alias.asname else top,)
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None or node.names[0].name == "*":
                raise _refused(node, "an import whose module depends on the package")
            for alias in node.names:
                bound.append(alias.asname or alias.name)
                found[bound[-1]] = f"import {node.module}", alias.name
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.append(node.id)
        elif isinstance(node, ast.arg):
            bound.append(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ExceptHandler)) and node.name:
            bound.append(node.name)
    for name in found:
        if bound.count(name) > 1:
            raise Refused(f"it binds {name}, which it imports, more than once")
    return found


def _used(nodes: list[ast.AST]) -> dict[int, str]:
    """Returns how nodes are used ("called", "asked", "kind" or "member"), by their ids."""
    found: dict[int, str] = {}
    for node in nodes:
        if isinstance(node, ast.Compare):
            for op, right in zip(node.ops, node.comparators, strict=True):
                if isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, ast.Set):
                    found[id(right)] = "member"  # its order does not matter
        if not isinstance(node, ast.Call):
            continue
        found[id(node.func)] = "called"
        if not isinstance(node.func, ast.Name) or node.keywords or len(node.args) < 2:
            continue
        second = node.args[1]
        if node.func.id in ("getattr", "hasattr") and isinstance(second, ast.Constant) and type(second.value) is str:
            found[id(node.func)] = "asked"
        elif node.func.id in ("isinstance", "issubclass"):
            kinds = second.elts if isinstance(second, ast.Tuple) else [second]
            found.update({id(kind): "kind" for kind in kinds})
    return found


def _look_at_functions(node: ast.AST) -> None:
    """Refuses nested functions that may outlive the call or keep state, and some uses of `with` and `del`."""
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Lambda):
        raise _refused(node, "a lambda is returned")
    if isinstance(node, (ast.Lambda, ast.FunctionDef)) and (node.args.defaults or any(node.args.kw_defaults)):
        raise _refused(node, "a function with defaults is made")
    if isinstance(node, ast.With) and not all(isinstance(item.context_expr, ast.Call) for item in node.items):
        raise _refused(node, "`with` of something that it has not made itself")
    if isinstance(node, ast.Delete) and not all(isinstance(target, ast.Name) for target in node.targets):
        raise _refused(node, "`del` of a part of something")


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _nested(const)


def _own(arguments: ast.arguments, nodes: list[ast.AST]) -> set[str]:
    """Returns the local names that hold no container other than those made in the function, or for it: `**kwargs`."""
    kwarg = arguments.kwarg
    made: set[str] = set() if kwarg is None else {kwarg.arg}
    bound = {node.arg for node in (*ast.walk(arguments), *nodes) if isinstance(node, ast.arg) and node is not kwarg}
    bound.update(node.asname or node.name for node in nodes if isinstance(node, ast.alias))
    bound.update(node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ExceptHandler)) and node.name)
    displays: set[int] = set()
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    makers = _MAKERS - bound - stored
    for node in nodes:
        for target, value in _bindings(node):
            if isinstance(target, ast.Name) and (isinstance(value, _DISPLAYS) or _is_new(value, kwarg, makers)):
                made.add(target.id)
                displays.add(id(target))
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in displays:
            bound.add(node.id)
    return made - bound


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields the targets of an assignment with their values, one by one for `a, b = [], {}`."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    for target in node.targets if isinstance(node, ast.Assign) else ():
        values: Any = node.value  # type: ignore[attr-defined]
        if isinstance(target, ast.Tuple) and isinstance(values, ast.Tuple):
            if len(target.elts) == len(values.elts) and not any(isinstance(v, ast.Starred) for v in values.elts):
                yield from zip(target.elts, values.elts, strict=True)
        else:
            yield target, values


_MAKERS = frozenset({"list", "dict", "sorted"})  # Python's functions whose results are new containers
_FORMATTING = frozenset({"str", "repr", "format", "print", "ascii"})
_PARTS_OF_FUNCTIONS = frozenset(
    {"__builtins__", "__closure__", "__code__", "__defaults__", "__dict__", "__globals__", "__kwdefaults__"}
)
_DATES = ("datetime64", "timedelta64", "M8", "<M8")  # dtypes of NumPy's, of which one takes "now"
_DISPLAYS = (ast.List, ast.Dict, ast.ListComp, ast.DictComp)


def _is_new(node: ast.expr, kwarg: ast.arg | None, makers: frozenset[str]) -> bool:
    """Returns whether this is `[...] * n`, `list(...)`, `dict(...)`, `sorted(...)` or `kwargs.copy()`."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Mult) and isinstance(node.left, _DISPLAYS)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in makers
    if kwarg is None or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr == "copy" and isinstance(node.func.value, ast.Name) and node.func.value.id == kwarg.arg


def _is_own(node: ast.expr, own: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in own


def _chain(node: ast.expr, inner: set[int]) -> tuple[str, ...]:
    """Returns the root name and attributes of a dotted expression, adding inner nodes to `inner`; else ()."""
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
