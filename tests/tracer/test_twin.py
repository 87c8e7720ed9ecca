"""Twins do what their originals do, and every call in them is redirected."""

import contextlib
import inspect
import traceback

import pytest

from tracer.location import user_frames
from tracer.twin import twin_of

PASSED = []


def redirect(callee):
    PASSED.append(getattr(callee, "__name__", type(callee).__name__))
    return callee


class Base:
    def method(self, x):
        return f"base {x}"


class Derived(Base):
    def method(self, x):
        inner = [str(i) for i in range(x)]
        return super().method(len(inner)) + (lambda y: y.upper())("end")


def make(start):
    count = start

    def counting(step=1, *more, scale: "int" = 2, **named):
        """Counts."""
        nonlocal count
        count += step * scale + sum(more) + sum(named.values())
        return count

    counting.note = "kept"
    return counting


def failing(x):
    value = [
        x,
        len(
            x,
        ),
    ]
    return value


def keeping(*_):
    return lambda function: function


@keeping()
def failing_below_a_decorator(x):
    return len(x)


@keeping(
    "on two lines",
)
@keeping()
# A comment is no line of code.
def failing_below_two_decorators(x):

    @keeping()
    def inner(y):
        return [len(each) for each in y]

    return inner(
        [x],
    )


def generating(n):
    for i in range(n):
        yield abs(-i)


def test_methods_and_super():
    """What is called passes as it is looked up, in comprehensions and lambdas, too."""
    PASSED.clear()
    twin = twin_of(Derived.method, redirect)
    assert twin(Derived(), 3) == Derived().method(3) == "base 3END"
    assert PASSED == ["range", "str", "str", "str", "method", "len", "<lambda>", "upper"]


def test_cells_defaults_and_attributes():
    """A twin shares the cells of its original, and has its defaults, names and attributes."""
    original = make(10)
    twin = twin_of(original, redirect)
    assert twin() == 12
    assert original(2, 1, scale=3, k=4) == 23
    assert twin(1) == 25
    assert twin.note == "kept"
    assert inspect.signature(twin) == inspect.signature(original)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__defaults__"):
        assert getattr(twin, name) == getattr(original, name)
    if hasattr(original.__code__, "co_qualname"):
        assert twin.__code__.co_qualname == original.__code__.co_qualname


@pytest.mark.parametrize("failing", [failing, failing_below_a_decorator, failing_below_two_decorators])
def test_tracebacks(failing):
    """Errors show the lines and columns of the original, and instructions are found at its locations."""
    found = []
    for function in (failing, twin_of(failing, redirect)):
        with pytest.raises(TypeError) as caught:
            function(5)
        frames = traceback.extract_tb(caught.tb)[1:]
        found.append([(f.filename, f.name, f.lineno, getattr(f, "colno", None), f.line) for f in frames])
    assert found[0] == found[1]


def test_generators():
    """A generator's twin is a generator."""
    assert list(twin_of(generating, redirect)(3)) == [0, 1, 2]


class _Mangled:
    def method(self):
        return self.__secret()

    def __secret(self):
        return 3


def frames():
    return inspect.currentframe()


async def waiting():
    return 1


@pytest.mark.parametrize("function", [_Mangled.method, frames, waiting, eval("lambda: 1")])
def test_without_a_twin(function):
    """Names that a class mangles, code that looks at frames, coroutines and code without source have none."""
    assert twin_of(function, redirect) is None


def stacks(tf, x):
    return tf.stack([x, x])


def looks(x):
    return inspect.stack()[0].lineno + x


def test_only_stacks_of_frames_rule_a_twin_out():
    """`tf.stack` is no `inspect.stack`."""
    assert twin_of(stacks, redirect) is not None
    assert twin_of(looks, redirect) is None


def nested(it, values):
    found = [it.scaled(value) for value in values if it.scaled(value) > 0]
    with it.scope(len(found)):
        return it.made(sum)(it.scaled(abs(value)) for value in found) + it.scaled(
            max(found)
        )


@keeping()
def nested_below_a_decorator(it, values):
    return it.made(sum)([it.scaled(value) for value in values]) + it.scaled(
        max(values)
    )


class Scaling:
    """Notes the callers' frames as locations give them."""

    def __init__(self):
        self.places = []

    def scaled(self, value):
        self.places.append(user_frames()[1:3])
        return value * 2

    @contextlib.contextmanager
    def scope(self, _):
        yield self.scaled(1)
        self.scaled(2)

    def made(self, function):
        self.places.append(user_frames()[1:3])
        return function


@pytest.mark.parametrize(("nested", "more_than"), [(nested, 5), (nested_below_a_decorator, 2)])
def test_frames_of_a_twin_give_the_same_locations(nested, more_than):
    """Of each call in it, and in functions inside of it, so that what was recorded before holds for the twin, too."""
    one, other = Scaling(), Scaling()
    assert nested(one, [1, -2, 3]) == twin_of(nested, redirect)(other, [1, -2, 3])
    assert [[tuple(f) for f in stack[:1]] for stack in one.places] == [
        [tuple(f) for f in stack[:1]] for stack in other.places
    ]
    assert len({stack[0] for stack in one.places}) > more_than
