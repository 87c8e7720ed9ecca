"""Branches and loops that do more than compute: whoever decides, the program does what it does eagerly, as often."""

import contextlib
import functools
import io
import logging
import random
import threading
import warnings
from collections import namedtuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage")]

INPUTS = [tf.constant(v) for v in (0.0, 1.0, 2.0, -1.0, 3.0, -2.0, 0.5, -0.5)]
PROGRAMS = {}


def program(function):
    """`function(decorate)` returns what there is to compare."""
    PROGRAMS[function.__name__] = function
    return function


def results(function, *more):
    return [function(x, *more) for x in INPUTS]


@program
def prints(decorate):
    @decorate
    def step(x):
        if x > 0.0:
            print("positive")
            y = x + 1.0
        else:
            y = x - 1.0
        while y < 5.0:
            y = y + 1.0
            print("turn")
        return y

    with contextlib.redirect_stdout(io.StringIO()) as out:
        found = results(step)
    return found, out.getvalue()


@program
def logs(decorate):
    stream, logger = io.StringIO(), logging.Logger("some", logging.INFO)
    logger.addHandler(logging.StreamHandler(stream))

    @decorate
    def step(x):
        while x < 5.0:
            x = x + 1.0
            logger.info("turn")
        if x > 5.2:
            logger.debug("unheard")
            x = x + 1.0
        else:
            x = x - 1.0
        return x

    before = results(step)
    logger.setLevel(logging.DEBUG)
    return before, results(step), stream.getvalue()


@program
def warns(decorate):
    @decorate
    def step(x):
        y = x
        while y < 5.0:
            y = y + 1.0
        if x > 0.0:
            warnings.warn("some", stacklevel=1)
            y = y + 1.0
        else:
            y = y - 1.0
        return y

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = results(step)
    return found, [(w.lineno, w.filename) for w in caught if str(w.message) == "some"]


@program
def random_numbers(decorate):
    random.seed(1)
    tf.random.set_seed(1)
    own, rows = tf.random.Generator.from_seed(1), np.random.RandomState(1)

    @decorate
    def step(x):
        y = x * random.random() if x > 0.0 else x * float(rows.rand())
        while y < 2.0:
            y = y + random.uniform(0.5, 1.0)
        while y < 4.0:
            y = y + own.uniform([])
        if x > 1.0:
            y = y + tf.random.uniform([])
        else:
            y = y + np.float32(rows.rand())
        return y

    return results(step), random.random(), rows.rand(), own.uniform([]), tf.random.uniform([])


@program
def writes(decorate):
    """Attributes, globals, names of enclosing functions, items."""

    class Holder:
        count = 0

    holder, items, total = Holder(), {"turns": 0}, 0
    globals()["seen"] = 0

    @decorate
    def step(x):
        nonlocal total
        global seen
        if x > 0.0:
            holder.count += 1
            total = total + 1
            y = x + 1.0
        else:
            y = x
        while y < 5.0:
            y = y + 1.0
            seen += 1
            items["turns"] += 1
        return y

    return results(step), holder.count, items, total, seen


@program
def computed_attributes(decorate):
    log = []

    class Descriptor:
        def __get__(self, instance, owner):
            log.append("descriptor")
            return 2.0

    class Holder:
        __slots__ = ("__dict__", "slot")
        described = Descriptor()

        @property
        def gate(self):
            log.append("get")
            return 2.0

        @functools.cached_property
        def once(self):
            log.append("once")
            return 3.0

    @decorate
    def step(x, holder):
        y = x * holder.gate if x > 0.0 else x * holder.once
        if x > 0.0:
            z = y + holder.described
        else:
            z = y + holder.slot
        while z < 5.0:
            z = z + holder.gate
        return z

    found = []
    for slot in (1.0, 2.0):
        holder = Holder()
        holder.slot = slot
        found.append(results(step, holder))
    return found, log


@program
def containers_that_change(decorate):
    held = {"list": [1.0, 2.0], "inner": {"number": 3.0}}

    @decorate
    def step(x):
        if x > 0.0:
            y = x * held["list"][0]
        else:
            y = x + held["inner"]["number"]
        while y < 7.0:
            y = y + held["list"][-1]
        return y

    found = [results(step)]
    held["list"][0] = 4.0
    found.append(results(step))
    held["list"].append(3.0)
    found.append(results(step))
    held["inner"]["number"] = True
    found.append(results(step))
    held["list"] = (1.0, 2.0)
    return [*found, results(step)]


@program
def named_tuples(decorate):
    pair = namedtuple("pair", "one other")

    @decorate
    def step(x, p):
        y = p.one * p.other if x > 0.0 else p.other
        q = pair(y, p.other)
        while q.one < 5.0:
            q = pair(q.one + 1.0, q.other)
        return q

    return results(step, pair(INPUTS[1], INPUTS[2]))


@program
def names_that_end(decorate):
    @decorate
    def step(x):
        t = x
        if x > 0.0:
            y = t + 1.0
            del t
        else:
            y = x
        try:
            bound = t is not None
        except UnboundLocalError:
            bound = False
        while y < 5.0:
            z = y
            y = y + 1.0
            del z
        if (u := y * 2.0) > 11.0:
            y = u
        else:
            y = -u
        return y, bound

    return results(step)


@program
def scopes_of_comprehensions(decorate):
    @decorate
    def step(x):
        i = 7.0
        if x > 0.0:
            y = x + sum([i * x for i in (1.0, 2.0)])
        else:
            y = x + i
        kept = [i for i in (1.0, 2.0) if i > 1.0]
        while y < 9.0:
            y = y + sum(i for i in (1.0, 2.0))
            z = sum([j + y for j in kept])
        return y, i, z if x < 2.0 else None

    return results(step)


@program
def ways_out(decorate):
    log = []

    @contextlib.contextmanager
    def noted(name):
        log.append(name)
        try:
            yield
        finally:
            log.append("out")

    @decorate
    def step(x):
        for k in range(5):
            try:
                if x > 3.0:
                    break
                if x < -1.0:
                    x = x + 4.0
                    continue
                x = x + 1.0
            finally:
                log.append(k)
        else:
            log.append("else")
        with noted("in"):
            while x < 6.0:
                x = x + 1.0
                if x > 5.6:
                    break
            else:
                x = -x
            if x > 5.8:
                return x
        try:
            if x < -6.2:
                raise ValueError
            x = x * 2.0
        except ValueError:
            log.append("caught")
        return -x

    return results(step), log


@program
def errors(decorate):
    table = tf.constant([1.0, 2.0, 3.0])

    @decorate
    def step(x, index):
        if x > 2.5:
            raise ValueError("large")
        while x < 20.0:
            x = x + tf.gather(table, index)
            index = index + 1
        return x

    found = []
    for x in INPUTS:
        try:
            found.append(step(x * 8.0 - 4.0, tf.constant(0)))
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            found.append((type(error).__name__, error.__traceback__.tb_next is not None))
    return found


@program
def values_of_threads(decorate):
    local = threading.local()
    local.gate = 2.0

    @decorate
    def step(x):
        if x > 0.0:
            y = x * local.gate
        else:
            y = x
        return y

    found = [results(step)]

    def other():
        local.gate = 5.0
        found.append(results(step))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    return [*found, results(step)]


@program
def gradients_of_its_own(decorate):
    @tf.custom_gradient
    def square(x):
        return x * x, lambda upstream: upstream * 100.0

    @decorate
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = square(x) if x > 0.0 else x * 2.0
            with tape.stop_recording():
                if x > 1.0:
                    w = y * 2.0
                else:
                    w = y * 3.0
            z = y + w
            while z < 10.0:
                z = square(z) + 1.0
        return z, tape.gradient(z, x)

    return results(step)


@program
def variables(decorate):
    v = tf.Variable(1.0)

    @decorate
    def step(x):
        a = v + 0.0
        if x > 0.0:
            v.assign_add(x)
            y = x + v
        else:
            y = x - v
        while y < 5.0:
            y = y + 1.0 + v * v
        v.assign(v * 0.5)
        if y > 6.0:
            z = y + v
        else:
            z = y - v
        return a, z

    return results(step), v


@program
def casts_of_keras(decorate):
    v = keras.Variable(1.5, dtype="float32")

    @decorate
    def step(x, dtype):
        with keras.src.backend.common.variables.AutocastScope(dtype):
            x = tf.cast(x, dtype or "float32")
            if x > 0.0:
                y = x * v
            else:
                y = x + v
        return y

    return [results(step, dtype) for dtype in (None, "float16", None, "bfloat16")]


@program
def classes_with_operators(decorate):
    class Number(int):
        def __add__(self, other):
            return 100

    class Items(list):
        def append(self, item):
            super().extend([item, item])

    @decorate
    def step(x, number, items):
        if x > 0.0:
            y = x * (number + 1)
        else:
            y = x
        while y < 5.0:
            y = y + 1.0
            items.append(y)
        return y, len(items)

    return results(step, Number(1), Items())


@program
def questions_about_tensors(decorate):
    @decorate
    def step(x):
        if x > 0.0:
            y = x + (1.0 if isinstance(x, tf.Tensor) else 2.0) + (1.0 if hasattr(x, "numpy") else 0.0)
            name = x.device + type(x).__name__
        else:
            y = x + (1.0 if tf.executing_eagerly() else 2.0)
            name = str(x.shape.rank)
        while y < 5.0:
            y = y + (1.0 if tf.is_tensor(y) and not tf.is_symbolic_tensor(y) else 2.0)
        return y, name

    return results(step)


@program
def texts(decorate):
    @decorate
    def step(x):
        y = x * 2.0
        if x > 0.0:
            z = y + 1.0
            text = f"{y}"
        else:
            z = y
            text = "%s" % y  # noqa: UP031
        return z, text

    return results(step)


@program
def operations_with_effects(decorate):
    log = []

    def noted(value):
        log.append(float(value))
        return value

    v = tf.Variable(0.0)

    @tf.function
    def counting(x):
        v.assign_add(1.0)
        return x + v

    @decorate
    def step(x):
        while x < 3.0:
            x = tf.py_function(noted, [x + 1.0], tf.float32)
        if x > 3.2:
            y = counting(x)
        else:
            y = x * 2.0
        return y

    return results(step), log, v


@program
def code_that_waits(decorate):
    """Generators and coroutines, whose frames run in pieces."""

    def pieces(x):
        y = x
        if x > 0.0:
            y = y + 1.0
        else:
            y = y - 1.0
        yield y
        while y < 5.0:
            y = y + 1.0
            if y > 4.2:
                yield y
        yield -y

    async def later(x):
        if x > 0.0:
            y = x + 1.0
        else:
            y = x - 1.0
        while y < 5.0:
            y = y + 1.0
        return y

    @decorate
    def step(x):
        try:
            later(x).send(None)
        except StopIteration as stop:
            return tuple(pieces(x)), stop.value

    return results(step)


@program
def code_that_is_no_function(decorate):
    source = "if x > 0.0:\n    y = x + 1.0\nelse:\n    y = x - 1.0\nwhile y < 5.0:\n    y = y + 1.0\n"
    code = compile(source, "<source>", "exec")

    @decorate
    def step(x):
        names = {"x": x}
        exec(code, names)

        class Inner:
            z = x
            if x > 0.0:
                z = x + 1.0
            while z < 5.0:
                z = z + 1.0

        return names["y"], Inner.z

    return results(step)


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eagerly(name):
    make = PROGRAMS[name]
    expected = snapshot(make(lambda function: function))
    decorated = []

    def decorate(function):
        decorated.append(coexec.function(function, jit_compile=False, control_flow=True))
        return decorated[-1]

    assert_same(expected, snapshot(make(decorate)), rtol=1e-5, atol=1e-6)
    stats = [function.stats() for function in decorated]
    assert all(found.followed > 0 and found.decisions > 0 for found in stats), stats
