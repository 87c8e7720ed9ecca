"""What watched calls leave behind is left again where they are skipped, and is theirs alone."""

import collections
import contextvars
import threading
import types

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.base.tuning import tuned
from tests.coexec.memoize.test_watched_calls import AT_ONCE
from tests.marks import needs_watch
from tests.snapshots import assert_same, snapshot

pytestmark = needs_watch

X = tf.constant([[1.0, -2.0], [3.0, 4.0]])
CALLS = 12
_CONTEXT = contextvars.ContextVar("scale", default=2.0)
_LAST = None
Pair = collections.namedtuple("Pair", "sum parts")


class Holder:
    """What helpers write to."""

    __slots__ = ("__dict__", "slot")
    shared: list = []  # noqa: RUF012

    def __init__(self):
        self.last, self.mode, self.slot, self.items = None, "none", 0, []
        self.table, self.local = {"scale": 2.0}, threading.local()
        self.array = np.zeros(2, np.float32)


def body(x):
    return tf.reduce_sum(tf.sin(x) * 2.0 + tf.cos(x))


def to_global(it, x):
    global _LAST
    y = body(x)
    _LAST = y
    return y


def to_cell(it, x):
    y = body(x)

    def set_it():
        it.last = y

    set_it()
    return y


def restored(it, x):
    before, it.mode = it.mode, "inside"
    try:
        return body(x) * (2.0 if it.mode == "inside" else 3.0)
    finally:
        it.mode = before


def in_a_context(it, x):
    token = _CONTEXT.set(_CONTEXT.get() + 1.0)
    try:
        return body(x) * _CONTEXT.get()
    finally:
        _CONTEXT.reset(token)


def in_place(it, x):
    copy = dict(it.table)
    it.table["scale"] = 3.0
    return body(x) * copy["scale"]


def wrapped(it, x):
    view = types.MappingProxyType(it.table)
    return body(x) * view["scale"] * len(view)


def own_array(it, x):
    counts = np.zeros(3, np.int32)
    counts[1] = 2
    shape = np.array([2, -1])
    shape[shape == -1] = 2
    return body(x) + float(counts.sum() + shape[1])


def imports(it, x):
    from math import pi

    return body(x) * pi


HELPERS = {
    "tensor in an attribute": lambda it, x: setattr(it, "last", body(x)) or it.last * 2.0,
    "constant in an attribute": lambda it, x: setattr(it, "mode", "trained") or body(x),
    "constant in a slot": lambda it, x: setattr(it, "slot", 3) or body(x),
    "new list in an attribute": lambda it, x: setattr(it, "items", [1.0, "a"]) or body(x),
    "empty list in an attribute": lambda it, x: setattr(it, "items", []) or body(x),
    "list that is returned, too": lambda it, x: setattr(it, "items", [body(x)]) or it.items,
    "new dict in an attribute": lambda it, x: setattr(it, "items", {}) or body(x),
    "old list in an attribute": lambda it, x: setattr(it, "items", Holder.shared) or body(x),
    "array in an attribute": lambda it, x: setattr(it, "array", np.ones(2)) or body(x),
    "array changed in place": lambda it, x: it.array.__setitem__(0, 1.0) or body(x),
    "item of a dict": lambda it, x: it.table.update(scale=2.5) or body(x) * it.table["scale"],
    "thread-local": lambda it, x: setattr(it.local, "value", 4.0) or body(x),
    "counter": lambda it, x: setattr(it, "slot", it.slot + 1) or body(x),
    "named tuple": lambda it, x: Pair(body(x), [body(x) * 2.0]),
    "what a variable's method returns": lambda it, x: VARIABLE.assign_add(body(x)),
    "global": to_global,
    "cell": to_cell,
    "restored": restored,
    "context variable": in_a_context,
    "copy of a dict that changes": in_place,
    "read-only view": wrapped,
    "arrays of its own": own_array,
    "import": imports,
}
VARIABLE = tf.Variable(0.0)


def state_of(it):
    local = getattr(it.local, "value", None)
    return snapshot([it.last, it.mode, it.slot, it.items, it.table, local, it.array, _LAST, _CONTEXT.get(), VARIABLE])


def run(name, decorate):
    global _LAST
    _LAST = None
    VARIABLE.assign(0.0)
    Holder.shared = []
    it, found, helper = Holder(), [], HELPERS[name]

    def step(x):
        return helper(it, x), tf.reduce_mean(x)

    function = decorate(step)
    for number in range(CALLS):
        if number == 8:
            it.table["scale"] = 5.0
        result = function(X * float(number))[0]
        held = isinstance(it.items, list) and it.items is Holder.shared
        aliased = it.items is result
        found.append((snapshot(result), type(result).__name__, state_of(it), held, aliased))
        if isinstance(it.items, list):
            it.items.append("mine")  # which must not show in the next call's
        elif isinstance(it.items, dict):
            it.items["mine"] = 1
    return found, function


@pytest.mark.parametrize("name", HELPERS)
def test_what_is_left_behind(name):
    """Results, attributes, items, globals and containers are as eagerly after each call, and none is shared."""
    expected, _ = run(name, lambda step: step)
    with tuned(**AT_ONCE):
        found, function = run(name, lambda step: coexec.function(step, regions="all"))
    for one, other in zip(expected, found, strict=True):
        assert one[1] == other[1]
        assert one[3:] == other[3:]
        assert_same(one[0], other[0])
        assert_same(one[2], other[2])
    if name in SKIPPED:
        assert function.stats().regions > 0, function.explain()


SKIPPED = (
    "tensor in an attribute", "constant in an attribute", "constant in a slot", "new list in an attribute",
    "old list in an attribute", "thread-local", "named tuple", "what a variable's method returns", "global", "cell",
    "restored", "context variable", "read-only view", "arrays of its own", "import",
)  # fmt: skip
