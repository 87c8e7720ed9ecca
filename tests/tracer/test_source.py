"""Source: a function's own lines give the same tree as its whole file, or none."""

import ast
import importlib.util
import linecache
import sys
import types

import pytest

from tracer import source

# Python 3.10 does not tell where statements end, so there each function is known by its whole file.
ALONE = sys.version_info >= (3, 11)

TRICKY = '''"""A module of what makes the lines of a function mean something else alone."""
from __future__ import annotations

import math
import os.path as paths
from collections import (
    OrderedDict,
    deque,
)

try:
    import json
except ImportError:
    json = None


class Base:
    """A class."""

    __slots__ = ("__hidden", "shown")

    def __init__(self, shown: Unknown = 3):
        super().__init__()
        self.__hidden = shown

    @property
    def hidden(self):
        return self.__hidden

    @staticmethod
    def free(x):
        return math.floor(x) + deque.__len__(OrderedDict().keys()) + paths.join.__call__(x)

    def uses_what_is_tried(self):
        return json.dumps(self)


def outer(a, b):
    c = a + b

    @property
    def inner(
        x,
        y=(1,
    2),
    ):
        nonlocal c
        c = x + b
        return [lambda z: z + c + y for _ in range(3)]

    class Local(Base):
        def method(self):
            return super().hidden + c

    def text():
        return """
not indented
    """  # the end

    return inner, Local, text, (lambda: a), (lambda: b)


def ends_without_code(x):
    x += 1
    """
a constant
"""
    # a comment


pair = [lambda x: x, lambda x: x], lambda x: -x
alone = lambda x: (
    x
    + 1
)
if True:
    def indented(x): return x; return 2
    async def waits(x):
        return await x
'''


def codes_of(code):
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield const
            yield from codes_of(const)


def compared(filename, text):
    """How many functions a file has, and how many of them are known by their own lines; these are compared."""
    lines = linecache.getlines(filename)
    whole = source._functions(text, filename)
    known = source._File(lines, source._imports(lines), {}, [])
    found = 0
    for code in codes_of(compile(text, filename, "exec", dont_inherit=True)):
        tree = source._alone(code, known)
        if tree is not None:
            found += 1
            assert ast.dump(tree, include_attributes=True) == ast.dump(whole[code], include_attributes=True), code
    return len(whole), found


@pytest.mark.parametrize(
    "module", ["keras.src.layers.layer", "keras.src.trainers.trainer", "contextlib", "tests.snapshots", "tracer.cursor"]
)
def test_the_functions_of_a_file(module):
    filename = importlib.util.find_spec(module).origin
    total, found = compared(filename, "".join(linecache.getlines(filename)))
    assert total > 0
    assert found >= 0.9 * total if ALONE else found == 0, (found, total)


def test_functions_that_need_what_is_around_them(tmp_path):
    file = tmp_path / "tricky.py"
    file.write_text(TRICKY)
    total, found = compared(str(file), TRICKY)
    # Not `hidden` and `__init__`, as names in a class are mangled, nor what calls an attribute of a nested import.
    assert (total, found) == (12, 9 if ALONE else 0)


def test_each_is_known_and_only_while_the_file_is_the_same(tmp_path):
    """Alone or by the whole file; edited lines are those of no function that runs."""
    file = tmp_path / "edited.py"
    file.write_text(TRICKY)
    codes = list(codes_of(compile(TRICKY, str(file), "exec", dont_inherit=True)))
    whole = source._functions(TRICKY, str(file))
    for code in codes:
        tree = source.function_of(code, {})
        assert (tree is None) is (code not in whole), code
    file.write_text(TRICKY.replace("c = a + b", "c = a - b").replace("x += 1", "x += 2"))
    linecache.checkcache(str(file))
    gone = {code.co_name for code in codes if code in whole and source.function_of(code, {}) is None}
    assert gone == {"outer", "ends_without_code"}
