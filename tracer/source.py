"""Source: the syntax tree of running code.

Source counts only if it compiles to the very code object that runs, so an edited file, a rewritten module or code
without a file has none. Relies on `CodeType.__eq__`, which compares bytecode, constants and lines.
"""

from __future__ import annotations

import ast
import linecache
import threading
from types import CodeType
from typing import Any

Function = ast.FunctionDef | ast.Lambda

_files: dict[str, tuple[list[str], dict[CodeType, Function] | None]] = {}
_lock = threading.Lock()
MAX_FILES = 64


def function_of(code: CodeType, namespace: dict[str, Any]) -> Function | None:
    """Returns the syntax tree of the function that `code` was compiled from; None if its source is not known.

    `namespace` is the function's globals, through which `linecache` finds a loader.
    """
    with _lock:
        lines = linecache.getlines(code.co_filename, namespace)
        known = _files.get(code.co_filename)
        if known is None or known[0] != lines:
            while len(_files) >= MAX_FILES:
                del _files[next(iter(_files))]
            known = _files[code.co_filename] = lines, _functions("".join(lines), code.co_filename)
        return None if known[1] is None else known[1].get(code)


def _functions(source: str, filename: str) -> dict[CodeType, Function] | None:
    """Returns the functions of a file by code object; None if it does not compile."""
    try:
        tree = ast.parse(source)
        module = compile(tree, filename, "exec", dont_inherit=True)
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
