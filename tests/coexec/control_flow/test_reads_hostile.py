"""What statements on the device read, changed in ways that nothing announces: they see it, and leave no trace."""

import builtins
import sys
import textwrap
import types

import pytest
import tensorflow as tf

import coexec
from tests.coexec.control_flow.test_control_flow import same, scalars
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage")]

INPUTS = scalars(0, 1, 2, -1, 3, -2, 0.5, -0.5)


def compare(make, backend):
    """`make(decorate)` returns what a program does, plainly and co-executed; returns the functions it has decorated."""
    decorated = []

    def decorate(function):
        decorated.append(coexec.function(function, jit_compile=backend == "xla", control_flow=True))
        return decorated[-1]

    assert_same(snapshot(make(lambda function: function)), snapshot(make(decorate)), rtol=1e-5, atol=1e-6)
    return decorated


def results(function, inputs=INPUTS):
    return [function(*args) for args in inputs]


def on_device(decorated):
    return sum(function.stats().decisions_on_device for function in decorated)


# How attributes are found.


class Plain:
    pass


def holder(kind, of):
    if of == "instance":
        kind.gate = None
        held = kind()
        held.gate = 2.0
        return held
    kind.gate = 2.0
    return kind if of == "class" else kind()


@pytest.mark.parametrize("of", ["instance", "class of an instance"])
def test_a_property_that_appears_runs_as_often_as_it_is_asked(of, backend):
    def program(decorate):
        log = []
        kind = type("Kind", (Plain,), {})
        held = holder(kind, of)

        @decorate
        def step(x):
            if x > 0.0:
                y = x * held.gate
            else:
                y = x + held.gate
            return y

        before = results(step)
        kind.gate = property(lambda self: log.append(1) or 5.0, lambda self, value: None)
        return before, results(step), len(log)

    assert on_device(compare(program, backend)) > 0


@pytest.mark.parametrize("name", ["__getattr__", "__getattribute__"])
def test_a_way_to_compute_attributes_that_appears(name, backend):
    def program(decorate):
        log = []
        kind = type("Kind", (Plain,), {})
        held = kind()
        held.gate = 2.0

        @decorate
        def step(x):
            if x > 0.0:
                y = x * held.gate
            else:
                y = x + held.gate
            return y

        before = results(step)
        setattr(kind, name, lambda self, asked: log.append(asked) or 5.0)
        if name == "__getattr__":
            del held.gate
        return before, results(step), log.count("gate")

    assert on_device(compare(program, backend)) > 0


def test_a_module_that_begins_to_compute_an_attribute(backend):
    def program(decorate):
        log = []
        module = types.ModuleType("late")
        module.gate = 2.0

        @decorate
        def step(x):
            if x > 0.0:
                y = x * module.gate
            else:
                y = x + module.gate
            return y

        before = results(step)
        module.__getattr__ = lambda name: log.append(name) or 5.0
        del module.gate
        return before, results(step), log.count("gate")

    assert on_device(compare(program, backend)) > 0


def test_attributes_of_classes_that_change(backend):
    """By assignment to the class, to a base, to the object; by another class of the object; by other bases."""

    def program(decorate):
        base, other = type("Base", (), {"gate": 2.0}), type("Other", (), {"gate": 9.0})
        kind = type("Kind", (base,), {})
        held = kind()

        @decorate
        def step(x):
            if x > 0.0:
                y = x * held.gate
            else:
                y = x + kind.gate
            return y

        found = [results(step)]
        base.gate = 3.0
        found.append(results(step))
        kind.gate = 4.0
        found.append(results(step))
        held.gate = 5.0
        found.append(results(step))
        del held.gate, kind.gate
        kind.__bases__ = (type("Between", (base,), {"gate": 6.0}),)
        found.append(results(step))
        held.__class__ = other
        return [*found, results(step)]

    assert on_device(compare(program, backend)) > 0


def test_a_private_attribute_is_not_the_one_of_that_spelling(backend):
    class Holder:
        def __init__(self):
            self.__gate = 2.0
            setattr(self, "__gate", 3.0)

        def run(self, x):
            if x > 0.0:
                y = x * self.__gate
            else:
                y = x + self.__gate
            return y

    same(Holder().run, INPUTS, backend, on_device=False)


# Whose names they are.


def test_one_code_with_other_globals(backend):
    """A function's names are looked up in its own globals: of the statement, and of what it calls."""

    def program(decorate):
        def decides(x):
            if x > 0.0:
                y = x * K
            else:
                y = x + K
            return y

        def computes(x):
            return x * K

        @decorate
        def step(decides, computes, x):
            y = decides(x)
            if x > 0.0:
                z = computes(y)
            else:
                z = y
            return y, z

        def with_globals(function, **names):
            made = types.FunctionType(function.__code__, {**names, "__builtins__": builtins}, function.__name__)
            made.__qualname__ = function.__qualname__
            return made

        ways = [(with_globals(decides, K=k), with_globals(computes, K=k)) for k in (2.0, 7.0)]
        return [step(*ways[n % 2 if n > 8 else 0], *args) for n, args in enumerate(INPUTS * 3)]

    assert on_device(compare(program, backend)) > 0


K = 2.0


def test_builtins_of_its_own(backend):
    def program(decorate):
        def sized(x):
            return x * len((1, 2))

        def decides(x):
            if x > 0.0:
                y = x * len((1, 2))
            else:
                y = sized(x)
            return y

        @decorate
        def step(function, x):
            y = function(x)
            if x > 0.0:
                z = function(y)
            else:
                z = y * 2.0
            return y, z

        def with_builtins(function):
            names = {"sized": sized, "__builtins__": {**vars(builtins), "len": lambda value: 40}}
            return types.FunctionType(function.__code__, names, function.__name__, None, function.__closure__)

        functions = sized, with_builtins(sized), decides, with_builtins(decides)
        return [step(function, *args) for function in functions for args in INPUTS]

    compare(program, backend)


def test_another_range(backend):
    """What is called `range` by now decides what a loop over it is."""

    def program(decorate):
        @decorate
        def step(x):
            for k in range(10):  # noqa: B007
                x = x + 1.0
                if x > 6.0:
                    break
            return x, k

        def backwards(number):
            yield from reversed([*builtins.range(number)])

        found = [results(step)]
        globals()["range"] = backwards
        try:
            found.append(results(step))
        finally:
            del globals()["range"]
        return [*found, results(step)]

    assert on_device(compare(program, backend)) > 0


# What cannot be done in the same way on the device.


def test_variables_cannot_be_added_to_in_place(backend):
    """TensorFlow raises an error where `+=` is applied to a variable."""
    v = tf.Variable(1.0)

    def function(x, v):
        if x > 0.0:
            v += 1.0
            x = x + v
        else:
            x = x - 1.0
        return x

    same(function, [(*args, v) for args in INPUTS], backend, on_device=False)


def test_variables_that_another_function_has_looked_at(backend):
    """A dict of `f_locals` that somebody keeps is not emptied."""

    def program(decorate):
        kept = []

        def look():
            kept.append(sys._getframe(1).f_locals)

        @decorate
        def step(x):
            count = 5
            look()
            if x > 0.0:
                y = x + 1.0
            else:
                y = x - 1.0
            while y < 5.0:
                y = y + 1.0
            return y, count

        return results(step), [(variables.get("count"), "x" in variables) for variables in kept]

    assert on_device(compare(program, backend)) > 0


# Which object it is.

HANDED_ON = """
import operator

import tensorflow as tf


def step(x, s):
    y = x
    if s > 0.0:
        y = x * 2.0
{inside}


def whole(step, x, s):
    x, y, asked = step(x, s)
{outside}
"""

TAPE = "a tape"
ASKED = {
    "is": "asked = x is y",
    "id": "asked = id(x) == id(y)",
    "ref": "asked = x.ref() in {y.ref(): 1}",
    "operator": "asked = operator.is_(x, y)",
    "inner function": "asked = (lambda: x is y)()",
    TAPE: "with tf.GradientTape() as tape: tape.watch(x); z = x * x + y * y\nasked = tape.gradient(z, x)",
}


@pytest.mark.parametrize(("ask", "inside"), [*((ask, True) for ask in ASKED), (TAPE, False)])
def test_a_tensor_that_is_handed_on(ask, inside, backend, tmp_path):
    """A tensor that one way leaves as it was may be asked for its identity: then Python decides. Outside, by tapes."""
    asks = textwrap.indent(ASKED[ask] + "\nreturn x, y, asked", "    ")
    given = textwrap.indent("asked = None\nreturn x, y, asked", "    ")
    source = HANDED_ON.format(inside=asks if inside else given, outside="    return x, y, asked" if inside else asks)
    file = tmp_path / "handed_on.py"
    file.write_text(source)
    names: dict = {}
    exec(compile(source, str(file), "exec"), names)

    def program(decorate):
        step = decorate(names["step"])
        return [names["whole"](step, x + 1.0, x) for (x,) in INPUTS]

    assert on_device(compare(program, backend)) == 0


def penalty(x, y):
    with tf.GradientTape() as tape:
        tape.watch(x)
        z = x * x + y * y
    return tape.gradient(z, x)


def test_a_tensor_that_is_handed_to_a_function_that_watches(backend, tune):
    """Elsewhere, and called later: that is known from the calls in which Python decided."""
    tune(decision_patience=4)

    def program(decorate):
        @decorate
        def step(x, s):
            y = x
            if s > 0.0:
                y = x * 2.0
            return penalty(x, y)

        return [step(x + 1.0, x) for (x,) in INPUTS * 2]

    assert on_device(compare(program, backend)) == 0


def test_a_tensor_that_is_handed_on_unasked(backend):
    """Where nobody asks, the device decides."""

    def program(decorate):
        @decorate
        def step(x, s):
            y = x
            if s > 0.0:
                y = x * 2.0
            return y + x

        return [step(x + 1.0, x) for (x,) in INPUTS]

    assert on_device(compare(program, backend)) > 0
