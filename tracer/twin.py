"""Twins: functions recompiled so that every call in them goes through a `redirect`.

In a twin, `f(x)` is `redirect(f)(x)`, which returns what to call: `f`, or a wrapper that may answer in its place. File,
lines, columns, names, cells, defaults and globals are the original's. A function has a twin if its source is known,
compiles to it, and does not inspect frames.
"""

from __future__ import annotations

import ast
import copy
import dis
import inspect
import warnings
from types import CodeType, FunctionType
from typing import Any

from tracer.location import stand_for
from tracer.source import function_of

Redirect = Any  # called with what a program calls; returns what to call

_MARK = "tracer.twin: redirect"

# Names of functions that inspect their callers' frames, and would find a wrapper's.
_OF_FRAMES = frozenset("""
    _getframe currentframe getouterframes getinnerframes extract_stack print_stack format_stack findCaller warn
    warn_explicit f_back _current_frames settrace setprofile
""".split())  # noqa: SIM905
# These, too, if they are those of `inspect`: other modules have functions of the same names (`tf.stack`).
_OF_INSPECT = frozenset({"stack", "trace"})
# These refer to the frame that they are called in, or compile calls themselves.
_OF_THIS_FRAME = frozenset({"super", "locals", "globals", "vars", "dir", "eval", "exec", "breakpoint"})

# By id of code, which is kept alive; not by equality, as code objects of different files may compare equal.
_twins: dict[int, tuple[CodeType, CodeType | None]] = {}
MAX_TWINS = 4096


def looks_at_frames(code: CodeType, namespace: dict[str, Any]) -> bool:
    """Returns whether code with these globals may inspect its callers' frames."""
    names = code.co_names
    if not _OF_FRAMES.isdisjoint(names):
        return True
    if _OF_INSPECT.isdisjoint(names):
        return False
    known = {id(inspect), id(inspect.stack), id(inspect.trace)}
    return "inspect" in names or not known.isdisjoint(id(namespace.get(name)) for name in names)


def twin_of(function: FunctionType, redirect: Redirect) -> FunctionType | None:
    """Returns the function's twin, which shares its cells, globals and attributes; None if it has none."""
    code = function.__code__
    if id(code) not in _twins:
        if len(_twins) >= MAX_TWINS:
            _twins.clear()
        made = _compile(code, function.__globals__, redirect)
        if made is not None:
            _align(made, code)
        _twins[id(code)] = code, made
    made = _twins[id(code)][1]
    if made is None:
        return None
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in made.co_freevars)
    twin = FunctionType(made, function.__globals__, function.__name__, function.__defaults__, closure)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
    twin.__dict__ = function.__dict__
    twin.__annotations__, twin.__doc__ = function.__annotations__, function.__doc__
    return twin


def _align(made: CodeType, code: CodeType) -> None:
    """Has the twin's frames, and those of functions in it, give the original's locations."""
    known: dict[Any, list[int]] = {}
    for kind, offset in _instructions(code):
        known.setdefault(kind, []).append(offset)
    offsets = {}
    for kind, offset in _instructions(made):  # a call comes before the redirect of its result, which is at its place
        if places := known.get(kind):
            offsets[offset] = places.pop(0)
    stand_for(made, offsets)
    inner = [[const for const in each.co_consts if isinstance(const, CodeType)] for each in (made, code)]
    for one, other in zip(*inner, strict=False):
        _align(one, other)


def _instructions(code: CodeType) -> list[tuple[Any, int]]:
    """Returns what each instruction does and for which part of the source, and its offset."""
    return [
        (("LOAD_ATTR" if each.opname == "LOAD_METHOD" else each.opname, each.positions), each.offset)
        for each in dis.get_instructions(code)
    ]


class _CallRewriter(ast.NodeTransformer):
    """Routes each call through the redirect."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _OF_THIS_FRAME:
            return node
        mark = ast.copy_location(ast.Constant(_MARK), node.func)
        node.func = ast.copy_location(ast.Call(mark, [node.func], []), node.func)
        return node


def _compile(code: CodeType, namespace: dict[str, Any], redirect: Redirect) -> CodeType | None:
    """Returns the code of a function's twin, or None if it has none."""
    if looks_at_frames(code, namespace) or code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return None
    node = function_of(code, namespace)
    if not isinstance(node, ast.FunctionDef) or any(map(_is_mangled, (*code.co_names, *code.co_varnames))):
        return None
    if any(map(_is_mangled, (*code.co_freevars, *code.co_cellvars))):
        return None
    arguments = node.args
    without_defaults = ast.arguments(
        posonlyargs=list(map(_bare, arguments.posonlyargs)),
        args=list(map(_bare, arguments.args)),
        vararg=arguments.vararg and _bare(arguments.vararg),
        kwonlyargs=list(map(_bare, arguments.kwonlyargs)),
        kw_defaults=[None] * len(arguments.kwonlyargs),
        kwarg=arguments.kwarg and _bare(arguments.kwarg),
        defaults=[],
    )
    # Copied, as `function_of` caches the tree.
    body = [_CallRewriter().visit(statement) for statement in copy.deepcopy(node.body)]
    # Code begins at its first decorator, and its table of lines counts from there; this one is never called.
    decorators: list[ast.expr] = [_at(ast.Constant(None), first) for first in node.decorator_list[:1]]
    inner = ast.FunctionDef(
        name=node.name, args=without_defaults, body=body, decorator_list=decorators, returns=None, type_comment=None
    )
    _at(inner, node)
    names = code.co_freevars
    cells = ast.Assign([_at(ast.Name(name, ast.Store()), node) for name in names], _at(ast.Constant(None), node))
    outer = ast.FunctionDef(
        name="around", args=ast.arguments([], [], None, [], [], None, []), decorator_list=[], returns=None,
        body=[*([_at(cells, node)] if names else []), inner], type_comment=None,
    )  # fmt: skip
    tree = ast.Module([_at(outer, node)], [])
    flags = code.co_flags & _FUTURE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a string is not callable
        try:
            module = compile(ast.fix_missing_locations(tree), code.co_filename, "exec", flags, dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError):
            return None
    around = next(each for each in module.co_consts if isinstance(each, CodeType))
    made = next(each for each in around.co_consts if isinstance(each, CodeType) and each.co_name == code.co_name)
    if set(made.co_freevars) != set(code.co_freevars) or made.co_varnames[: _arguments(code)] != _names(code):
        return None
    if made.co_firstlineno != code.co_firstlineno:
        return None
    return _with_redirect(made, code, redirect)


_FUTURE = 0x20000 | 0x40000 | 0x80000 | 0x100000 | 0x200000 | 0x400000 | 0x800000 | 0x1000000


def _arguments(code: CodeType) -> int:
    flags = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_argcount + code.co_kwonlyargcount + flags


def _names(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: _arguments(code)]


def _is_mangled(name: str) -> bool:
    # `__x` in a class is `_Class__x`; compiling the twin outside the class would not mangle it.
    return name.startswith("_") and "__" in name[1:] and not name.endswith("__")


def _bare(argument: ast.arg) -> ast.arg:
    return ast.copy_location(ast.arg(argument.arg, None, None), argument)


def _at(made: Any, node: Any) -> Any:
    return ast.copy_location(made, node)


def _with_redirect(made: CodeType, code: CodeType, redirect: Redirect) -> CodeType:
    """Returns the code with marks replaced by the redirect, and with the original's qualified names."""

    def filled(each: CodeType, qualname: str | None) -> CodeType:
        consts = tuple(
            filled(const, None) if isinstance(const, CodeType) else redirect if const == _MARK else const
            for const in each.co_consts
        )
        if qualname is None and hasattr(each, "co_qualname"):
            qualname = each.co_qualname.replace("around.<locals>." + code.co_name, code.co_qualname, 1)
        return each.replace(co_consts=consts, co_qualname=qualname) if qualname else each.replace(co_consts=consts)

    return filled(made, getattr(code, "co_qualname", None))
