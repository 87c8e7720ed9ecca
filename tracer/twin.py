"""Twins: functions recompiled so that every call in them goes through a `door`.

In a twin, `f(x)` is `door(f)(x)`, where the door returns what to call: `f`, or a wrapper that may answer in its place.
File, lines, columns, names, cells, defaults and globals are the original's. A function has a twin if its source is
known, compiles to it, and does not inspect frames.
"""

from __future__ import annotations

import ast
import copy
import inspect
import warnings
from types import CodeType, FunctionType
from typing import Any

from tracer.source import function_of

Door = Any  # called with what a program calls; returns what to call

_MARK = "tracer.twin: a door"

# Names of functions that inspect their callers' frames, and would find a wrapper's.
_OF_FRAMES = frozenset("""
    _getframe currentframe stack getouterframes getinnerframes extract_stack print_stack format_stack findCaller warn
    warn_explicit f_back trace _current_frames settrace setprofile
""".split())  # noqa: SIM905
# These refer to the frame that they are called in, or compile calls themselves.
_OF_THIS_FRAME = frozenset({"super", "locals", "globals", "vars", "dir", "eval", "exec", "breakpoint"})

# By id of code, which is kept alive; not by equality, as code objects of different files may compare equal.
_twins: dict[int, tuple[CodeType, CodeType | None]] = {}
MAX_TWINS = 4096


def looks_at_frames(code: CodeType) -> bool:
    """Returns whether code may inspect its callers' frames."""
    return not _OF_FRAMES.isdisjoint(code.co_names)


def twin_of(function: FunctionType, door: Door) -> FunctionType | None:
    """Returns the function's twin, which shares its cells, globals and attributes; None if it has none."""
    code = function.__code__
    if id(code) not in _twins:
        if len(_twins) >= MAX_TWINS:
            _twins.clear()
        _twins[id(code)] = code, _compile(code, function.__globals__, door)
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


class _Doors(ast.NodeTransformer):
    """Routes each call through the door."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _OF_THIS_FRAME:
            return node
        mark = ast.copy_location(ast.Constant(_MARK), node.func)
        node.func = ast.copy_location(ast.Call(mark, [node.func], []), node.func)
        return node


def _compile(code: CodeType, namespace: dict[str, Any], door: Door) -> CodeType | None:
    """Returns the code of a function's twin, or None if it has none."""
    if looks_at_frames(code) or code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
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
    body = [_Doors().visit(statement) for statement in copy.deepcopy(node.body)]
    inner = ast.FunctionDef(
        name=node.name, args=without_defaults, body=body, decorator_list=[], returns=None, type_comment=None
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
    return _with_door(made, code, door)


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


def _with_door(made: CodeType, code: CodeType, door: Door) -> CodeType:
    """Returns the code with marks replaced by the door, and with the original's qualified names."""

    def filled(each: CodeType, qualname: str | None) -> CodeType:
        consts = tuple(
            filled(const, None) if isinstance(const, CodeType) else door if const == _MARK else const
            for const in each.co_consts
        )
        if qualname is None and hasattr(each, "co_qualname"):
            qualname = each.co_qualname.replace("around.<locals>." + code.co_name, code.co_qualname, 1)
        return each.replace(co_consts=consts, co_qualname=qualname) if qualname else each.replace(co_consts=consts)

    filled_in = filled(made, getattr(code, "co_qualname", None))
    return filled_in.replace(co_firstlineno=code.co_firstlineno)
