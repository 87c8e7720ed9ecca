"""Notebook: the cell magic `%%coexec`, behind `%load_ext coexec`."""

from __future__ import annotations

import ast
import sys
from types import FrameType
from typing import Any

from coexec.api import Function
from coexec.api import function as coexec_function

_NAME = "coexec"


def load_ipython_extension(shell: Any) -> None:
    """Makes `%%coexec` known to IPython and Jupyter: `%load_ext coexec` calls this.

        %%coexec
        def step(x): ...

    A cell that begins with it runs as ever, but the functions that it defines are decorated with `coexec.function`;
    `%%coexec step` decorates only that one. Run again, a cell replaces its functions, and what was learnt of those
    before is released.
    """

    def run(line: str, cell: str) -> None:
        run_cell(shell, line.split(), cell)

    run.__doc__ = load_ipython_extension.__doc__
    shell.register_magic_function(run, "cell", _NAME)


def unload_ipython_extension(shell: Any) -> None:
    """Removes `%%coexec`: `%unload_ext coexec` calls this."""
    shell.magics_manager.magics["cell"].pop(_NAME, None)


def run_cell(shell: Any, names: list[str], cell: str) -> None:
    """Runs a cell in the notebook's namespace, with its functions decorated; raises what the cell raises."""
    text = "\n" + shell.transform_cell(cell)  # of `%`, `!` and `?`; the magic's own line counts in the notebook
    file = shell.compile.cache(text, _number_of_cell(shell), raw_code=cell)  # where tracebacks look for source lines
    tree = ast.parse(text, file)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    there = {node.name for node in functions}
    if unknown := [name for name in names if name not in there]:
        raise ValueError(f"%%coexec {' '.join(names)}: the cell defines no function {', '.join(unknown)}")
    if not functions:
        raise ValueError("%%coexec decorates the functions of a cell, and this one defines none")
    for node in functions:
        if not names or node.name in names:
            made = ast.parse(f"__import__('coexec.notebook').notebook.decorated({node.name!r}, globals())", file)
            expression = made.body[0]
            assert isinstance(expression, ast.Expr)
            decorator = ast.copy_location(expression.value, node)
            for inner in ast.walk(decorator):
                ast.copy_location(inner, node)
            node.decorator_list.insert(0, decorator)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), shell.user_ns)
    if last is not None:  # shown, as the last line of a cell is
        exec(compile(ast.Interactive([last]), file, "single"), shell.user_ns)


def _number_of_cell(shell: Any) -> int:
    """Returns the number of the cell that runs: whether IPython has counted it already depends on its version."""
    known: dict[str, int] = getattr(shell.compile, "_filename_map", {})
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in known:
            return known[frame.f_code.co_filename]
        frame = frame.f_back
    return int(shell.execution_count)


def decorated(name: str, namespace: dict[str, Any]) -> Any:
    """Returns a decorator for a function that takes the place of what has this name, and clears what that was."""

    def decorate(function: Any) -> Any:
        before = namespace.get(name)
        if isinstance(before, Function):
            before.clear()
        if isinstance(function, Function) or not callable(function):  # decorated in the cell itself
            return function
        return coexec_function(function)

    return decorate
