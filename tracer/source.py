"""Source: the syntax tree of running code.

Source counts only if it compiles to the very code object that runs, so an edited file, a rewritten module or code
without a file has none. Relies on `CodeType.__eq__`, which compares bytecode, constants, lines and columns.

The lines of one function are parsed where these are enough, else its whole file, which takes as long as several calls
of a small step: `ast.parse`, `compile` and `ast.walk` of 28 KB took 26, 22 and 21 ms on two busy cores.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import threading
from types import CodeType
from typing import Any, NamedTuple

Function = ast.FunctionDef | ast.Lambda


class _File(NamedTuple):
    """What is known of a file with these lines: the functions that were asked for, or all once it was parsed whole."""

    lines: list[str]
    imports: list[str]  # the same with all but the imports of the module empty
    functions: dict[CodeType, Function]
    whole: list[bool]  # empty, or whether it compiles


_files: dict[str, _File] = {}
_lock = threading.Lock()
MAX_FILES = 64


def function_of(code: CodeType, namespace: dict[str, Any]) -> Function | None:
    """Returns the syntax tree of the function that `code` was compiled from; None if its source is not known.

    `namespace` is the function's globals, through which `linecache` finds a loader.
    """
    with _lock:
        lines = linecache.getlines(code.co_filename, namespace)
        known = _files.get(code.co_filename)
        if known is None or known.lines != lines:
            while len(_files) >= MAX_FILES:
                del _files[next(iter(_files))]
            known = _files[code.co_filename] = _File(lines, _imports(lines), {}, [])
        found = known.functions.get(code)
        if found is None and not known.whole:
            found = _alone(code, known)
            if found is not None:
                known.functions[code] = found
            else:
                functions = _functions("".join(lines), code.co_filename)
                known.whole.append(functions is not None)
                known.functions.update(functions or {})
                found = known.functions.get(code)
        return found


def _functions(source: str, filename: str, flags: int = 0) -> dict[CodeType, Function] | None:
    """Returns the functions of a source by code object; None if it does not compile."""
    try:
        tree = ast.parse(source)
        module = compile(tree, filename, "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return None
    trees: dict[tuple[str, int], list[Function]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
            trees.setdefault((node.name, first), []).append(node)
        elif isinstance(node, ast.Lambda):
            trees.setdefault(("<lambda>", node.lineno), []).append(node)
    found: dict[CodeType, Function] = {}
    ahead = [module]
    while ahead:
        code = ahead.pop()
        ahead += [const for const in code.co_consts if isinstance(const, CodeType)]
        candidates = trees.get((code.co_name, code.co_firstlineno), [])
        if len(candidates) == 1:  # two lambdas on one line are ambiguous
            found[code] = candidates[0]
    return found


_FUTURES = 0x1FE0000  # the flags of `__future__` imports, the same in code objects and for `compile`
_WITHOUT_CODE = frozenset(["", "#", ")", "]", "}"])  # what lines that end a function may begin with
_CLASS = "__class__"  # the free variable of a method that calls `super()`


def _alone(code: CodeType, file: _File) -> Function | None:
    """Returns a function's tree, parsed from its own lines; None if these do not compile to the same code.

    They keep their numbers and columns, and get around them what the compiler looks at: scopes, and the imports of the
    module, as it compiles calls of their attributes in another way than those of other objects.
    """
    lines, first, last = file.lines, code.co_firstlineno, _last_line(code)
    if not 0 < first <= last <= len(lines):
        return None
    indent = _indent(lines[first - 1])
    while last < len(lines) and (_indent(lines[last]) > indent or lines[last].lstrip()[:1] in _WITHOUT_CODE):
        last += 1
    around = []
    if code.co_flags & inspect.CO_NESTED:
        around.append(f"def _({', '.join(name for name in code.co_freevars if name != _CLASS)}):")
    if _CLASS in code.co_freevars or (indent and not around):
        around.append(f"{' ' * len(around)}class _:")
    if len(around) >= first or len(around) > indent:
        return None
    before = [*file.imports[: first - 1 - len(around)], *(f"{line}\n" for line in around)]
    text = "".join([*before, *lines[first - 1 : last]])
    functions = _functions(text, code.co_filename, code.co_flags & _FUTURES)
    return None if functions is None else functions.get(code)


def _imports(lines: list[str]) -> list[str]:
    found, goes_on = ["\n"] * len(lines), False
    for n, line in enumerate(lines):
        if goes_on or line.startswith(("import ", "from ")):
            found[n] = line
            text = line.partition("#")[0]
            goes_on = ")" not in text and (goes_on or "(" in text)
    return found


def _last_line(code: CodeType) -> int:
    """Returns the last line that a function has code for, with the functions in it."""
    positions = getattr(code, "co_positions", None)
    if positions is None:
        return 0  # Python 3.10 does not tell where statements end
    last = max((end for _, end, _, _ in positions() if end is not None), default=0)
    return max([last, *(_last_line(const) for const in code.co_consts if isinstance(const, CodeType))])


def _indent(line: str) -> int:
    return len(re.match(r"[ \t]*", line)[0])  # type: ignore[index]  # it matches the empty string
