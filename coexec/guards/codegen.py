"""Code generation: writes the guards of one memoized call or traced statement as a single Python function.

A generated guard takes 20 to 100 ns; a loop over a list of conditions took 400. Functions that differ only in what
they compare with share their code, as the calls of similar layers do: compiling takes longer than checking.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


class CheckWriter:
    """Writes a function that returns early where a guard fails.

    Guards are written as statements: CPython compiles a chain of some thousand `and`s recursively, and statements are
    as fast.
    """

    def __init__(self, parameters: str = "", failure: str = "None", **names: Any) -> None:
        """Begins a function.

        Args:
          parameters: the function's, as in its definition.
          failure: the expression that it returns where a guard fails.
          **names: what the code may refer to by these names.
        """
        self._parameters = parameters
        self._failure = failure
        self._names = names
        self._constants = 0
        self._lines: list[str] = []
        self._locals = 0

    def __len__(self) -> int:
        """Returns the number of statements."""
        return len(self._lines)

    def constant(self, value: Any) -> str:
        """Returns a new name for an object, which the function keeps alive."""
        self._constants += 1
        name = f"c{self._constants}"
        self._names[name] = value
        return name

    def local(self) -> str:
        """Returns the name of a new local variable."""
        self._locals += 1
        return f"v{self._locals}"

    def let(self, expression: str) -> str:
        """Assigns to a new local variable; returns its name."""
        name = self.local()
        self.do(f"{name} = {expression}")
        return name

    def do(self, statement: str) -> None:
        """Adds a statement of one line."""
        self._lines.append(statement)

    def require(self, condition: str) -> None:
        """Adds a guard: an expression that must be true."""
        self.do(f"if not ({condition}): return {self._failure}")

    def written(self, result: str = "True") -> Callable[..., Any]:
        """Returns the function, which returns the value of `result` if all guards hold; nothing can be added then."""
        body = "".join(f"    {line}\n" for line in (*self._lines, f"return {result}"))
        self._lines = []
        return types.FunctionType(_code(f"def check({self._parameters}):\n{body}"), self._names)


@functools.lru_cache(maxsize=500)
def _code(source: str) -> types.CodeType:
    module = compile(source, __file__, "exec")
    return next(const for const in module.co_consts if isinstance(const, types.CodeType))
