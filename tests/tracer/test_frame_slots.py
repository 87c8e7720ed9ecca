"""A running frame's variables are read from its memory, and nothing stays behind."""

import gc
import sys
import weakref

import pytest

from tracer import frame_slots
from tracer.frame_slots import variable_of

pytestmark = pytest.mark.skipif(not frame_slots.READABLE, reason="frames of this Python cannot be read")


class Kept:
    pass


def test_variables_of_every_kind():
    outer = "outer"

    def function(argument, shared, *rest, key=1, **others):
        made = "made"
        local = made + made  # noqa: F841 (read from the frame)

        def inner():
            return outer, shared, made

        frame = sys._getframe()
        names = "argument", "shared", "rest", "key", "others", "local", "made", "outer", "inner"
        return {name: variable_of(frame, name) for name in names}, inner

    found, inner = function(1, 2, 3, key=4, other=5)
    assert found == {
        "argument": 1, "shared": 2, "rest": (3,), "key": 4, "others": {"other": 5}, "local": "mademade", "made": "made",
        "outer": outer, "inner": inner,
    }  # fmt: skip


def test_unbound_variables():
    def function():
        frame = sys._getframe()
        for name in ("later", "celled", "missing"):
            with pytest.raises(KeyError):
                variable_of(frame, name)
        later = celled = 1
        return lambda: later + celled

    assert function()() == 2


def test_a_generator_that_is_suspended():
    def generator(x):
        y = x + 1
        yield y
        yield lambda: x

    made = generator(3)
    next(made)
    assert (variable_of(made.gi_frame, "x"), variable_of(made.gi_frame, "y")) == (3, 4)


def test_a_modules_frame():
    names = {"found": None, "variable_of": variable_of, "sys": sys}
    exec("x = 7\nfound = variable_of(sys._getframe(), 'x')", names)
    assert names["found"] == 7


def test_nothing_is_kept():
    """Not by a dict of the frame's variables, which the frame keeps up to CPython 3.12."""
    gc.disable()
    try:
        kept = Kept()
        reference = weakref.ref(kept)
        assert variable_of(sys._getframe(), "kept") is kept
        del kept
        assert reference() is None
    finally:
        gc.enable()
