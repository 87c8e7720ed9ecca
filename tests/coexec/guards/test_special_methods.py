"""A class, or an object, gets a method that Python or NumPy looks for by itself, where there was none."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing

WIDTH, CALLS, MOMENT = 4, 10, 6


class Reflected:
    """What has no method of its own is given to this one's."""

    def __radd__(self, other):
        return 2.0

    def __rmatmul__(self, other):
        return 3.0


REFLECTED = Reflected()


def _bool(thing):
    return 1.0 if thing else 2.0


def _not(thing):
    return 1.0 if not thing else 2.0


def _add(thing):
    return thing + REFLECTED


def _matmul(thing):
    return thing @ REFLECTED


def _equal(thing):
    return 1.0 if thing == 1 else 2.0


def _unequal(thing):
    return 1.0 if thing != thing.itself else 2.0


def _attribute(thing):
    return getattr(thing, "rate", 3.0)


def _number(thing):
    return thing.number


def _size(thing):
    return float(np.size(thing))


# By the method's name: what is computed without it, and the method.
COMPUTED = {
    "__bool__": (_bool, lambda self: False),
    "__len__": (_not, lambda self: 0),
    "__add__": (_add, lambda self, other: 9.0),
    "__matmul__": (_matmul, lambda self, other: 9.0),
    "__eq__": (_equal, lambda self, other: True),
    "__ne__": (_unequal, lambda self, other: True),
    "__getattr__": (_attribute, lambda self, name: 9.0),
    "__getattribute__": (_number, lambda self, name: 9.0 if name == "number" else object.__getattribute__(self, name)),
    "__array__": (_size, lambda self, dtype=None, copy=None: np.ones(3)),
}


def layer_of(compute, thing):
    things = {"it": thing}  # not an attribute: what those hold is watched otherwise

    class Layer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(WIDTH, kernel_initializer="ones")

        def call(self, x):
            return self.dense(x) * compute(things["it"])

    return Layer()


def helper_of(compute, thing):
    dense = keras.layers.Dense(WIDTH, kernel_initializer="ones")

    def helper(x):
        return dense(x) * compute(thing)

    return helper


def run(decorate, compute, make, change, given=None):
    """Calls a step that looks at an object, which has the attributes `given`, and is changed after some calls."""

    class Thing:
        """A plain class."""

    thing = Thing()
    vars(thing).update({"number": 1.5, "itself": thing, **(given or {})})
    function = make(compute, thing)
    step = decorate(lambda x: function(x))
    found = []
    with testing.always_follow():
        for number in range(CALLS):
            if number == MOMENT:
                change(Thing, thing)
            found.append(step(tf.ones([2, WIDTH])).numpy().tolist())
    return step, found


@pytest.mark.parametrize("make", [layer_of, helper_of])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_class_gets_a_method(name, make):
    compute, method = COMPUTED[name]

    def change(kind, _):
        setattr(kind, name, method)

    _, expected = run(lambda f: f, compute, make, change)
    step, found = run(coexec.function, compute, make, change)
    assert found == expected
    assert found[0] != found[-1]
    assert step.stats().regions >= MOMENT - 3, step.explain()


def test_a_class_gets_what_nobody_asks_for():
    """Then it is known to have none of the others, and the layer's Python is skipped as before."""

    def change(kind, _):
        kind.unrelated = 1

    compute, _ = COMPUTED["__bool__"]
    _, expected = run(lambda f: f, compute, layer_of, change)
    step, found = run(coexec.function, compute, layer_of, change)
    assert found == expected
    assert step.stats().regions >= CALLS - 3, step.explain()


@pytest.mark.parametrize("make", [layer_of, helper_of])
@pytest.mark.parametrize("name", ["__array__", "__array_interface__"])
def test_an_object_gets_an_array_of_its_own(name, make):
    array = np.ones(3)

    def change(_, thing):
        setattr(thing, name, getattr(array, name))

    def compute(thing):
        return np.sum(thing) if hasattr(thing, name) else 1.0

    _, expected = run(lambda f: f, compute, make, change)
    step, found = run(coexec.function, compute, make, change)
    assert found == expected
    assert found[0] != found[-1]
    assert step.stats().regions >= MOMENT - 3, step.explain()


@pytest.mark.parametrize("make", [layer_of, helper_of])
@pytest.mark.parametrize("name", ["__array__", "__array_interface__"])
def test_an_array_behind_an_object_changes(name, make):
    """Nobody writes to the object: calls that have NumPy take it for an array are not memoized."""

    def both(decorate):
        array = np.ones(3)

        def change(kind, thing):
            array[:] += 1.0

        def compute(thing):
            return np.sum(thing)

        return run(decorate, compute, make, change, {name: getattr(array, name)})[1]

    expected = both(lambda f: f)
    assert expected[0] != expected[-1]
    assert both(coexec.function) == expected
