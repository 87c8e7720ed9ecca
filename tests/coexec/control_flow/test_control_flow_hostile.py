"""Loops whose turns do more than they seem to: nobody can tell that they were looked at."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec.control_flow.test_control_flow import TRIPS, same, scalars
from tests.marks import needs_places

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage")]


def left_to_python(fn):
    """The loop was followed, looked at, and refused with a reason."""
    stats = fn.stats()
    assert stats.followed > 0
    assert stats.decisions > 0
    assert stats.decisions_on_device == 0
    assert "turns in Python" in fn.explain()


def test_a_test_with_an_effect_on_one_way(backend):
    """What a helper in the test does only for some values, it does."""
    log = []

    def noisy(x):
        if x > 50.0:
            log.append(1)
        return x

    def function(x):
        while noisy(x) < 100.0:
            x = x + 1.0
        return x

    same(function, TRIPS, backend, lambda: len(log), on_device=False, reset=log.clear)


def test_an_inner_test_with_an_effect_on_one_way(backend):
    log = []

    def noisy(y):
        if y > 4.0:
            log.append(1)
        return y

    def function(x):
        while x < 100.0:
            y = tf.constant(0.0)
            while noisy(y) < 5.5:
                y = y + 1.0
            x = x + y
        return x

    same(function, TRIPS, backend, lambda: len(log), on_device=False, reset=log.clear)


def test_the_truth_of_a_list(backend):
    """A list from outside is asked whether there is something in it, each time."""

    def function(x, items):
        while x < 100.0:
            if items:
                x = x + 1.0
            x = x + 1.0
        return x

    calls = [(tf.constant(0.0), items) for items in ([], [], [], [1], [1, 2], [], [3])]
    same(function, calls, backend)


def test_methods_of_two_objects(backend):
    """The same method of another object is another one."""

    class Holder:
        def __init__(self, by):
            self.by = by

        def step(self, x):
            return x + self.by

    def function(x, holder):
        method = holder.step
        while x < 100.0:
            x = method(x)
        return x

    holders = [Holder(b) for b in (1.0, 3.0, 7.0)]
    same(function, [(tf.constant(0.0), holders[i % 3 if i > 5 else 0]) for i in range(12)], backend, on_device=False)


def test_an_object_that_dies(backend):
    """`None` is not the object that was there before."""

    class Some:
        pass

    def function(x, some):
        while x < 100.0:
            if some is None:
                x = x + 1.0
            x = x + 1.0
        return x

    calls = [(tf.constant(0.0), Some() if i < 5 else None) for i in range(9)]
    expected = [function(*call) for call in calls]
    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    while calls:
        found = fn(*calls.pop(0))
        np.testing.assert_allclose(found, expected.pop(0))
    assert fn.stats().decisions_on_device > 0


def test_continue_behind_an_inner_loop(backend):
    """`continue` in the `else` of a `for` is the outer loop's."""

    def function(x):
        while x < 100.0:
            for _ in range(2):
                x = x + 1.0
            else:
                if x > 50.0:
                    x = x + 4.0
                    continue
            x = x + 0.5
        return x

    same(function, TRIPS, backend, on_device=False)


def test_an_inner_loop_that_must_not_begin(backend):
    """An inner test that fails does so in Python."""

    def function(x, d):
        while x < 100.0:
            y = tf.constant(0)
            while 10 // d > y:
                y = y + 1
            x = x + tf.cast(y, tf.float32) + 1.0
        return x

    same(function, [(tf.constant(0.0), tf.constant(d)) for d in (3, 3, 3, 2, 3)], backend)


def test_the_identity_of_pairs(backend):
    """A pair that the loop makes anew is another one, whatever it holds."""

    def function(x):
        pair = first = (x, x)
        while pair[0] < 100.0:
            add = 2.0 if pair is first else 1.0
            pair = (pair[0] + add, pair[1])
        return pair

    same(function, TRIPS, backend, on_device=False)


def test_wrapped_functions_have_arguments_of_their_own(backend):
    """The defaults of a wrapper count, not those of what it wraps."""

    def plain(x, by=1.0):
        return x + by

    @functools.wraps(plain)
    def wrapper(x, by=5.0):
        return x + by

    def function(x):
        while x < 100.0:
            x = wrapper(x)
        return x

    same(function, TRIPS, backend)


@pytest.mark.parametrize("use", [abs, lambda k: k if isinstance(k, int) else -1000, lambda k: sum([k, k])])
def test_counters_are_numbers(backend, use):
    """What Python's functions make of a number that the loop counts is a number."""

    def function(x):
        k = t = 0
        while x < 100.0:
            k = use(t)
            x = x + 1.0
            t += 1
        return x, k, t

    expected = [function(*args) for args in TRIPS]
    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    for args, (x, k, t) in zip(TRIPS, expected, strict=True):
        found = fn(*args)
        np.testing.assert_allclose(found[0], x)
        assert (type(found[1]), found[1], type(found[2]), found[2]) == (type(k), k, type(t), t)
    left_to_python(fn)


def tripled(n):
    return n + n + n


def doubled(n):
    return n + n


def helped(n):
    return doubled(doubled(n))


def doubled_in_a_loop(n):
    i = 0
    while i < 20:
        i, n = i + 1, n + n
    return n


@pytest.mark.parametrize("sums", [tripled, helped, doubled_in_a_loop])
@pytest.mark.parametrize("dtype", [tf.int64, tf.float64])
def test_counters_have_no_end(backend, sums, dtype):
    """Python's numbers do not wrap where int32 does, though a loop counts them as such on the device."""

    def function(x, n):
        total = tf.zeros([], dtype)
        while x < 40.0:
            n += 1
            x = x + 1.0
            total = total + sums(n)
        return total, n

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    with testing.always_follow():
        for start in (0, 1, 2, 3, 4, 5, (1 << 27) - 100_000, 600_000_000, 900_000_000, 1 << 29, 7):
            (one, counted), (other, found) = function(tf.zeros([]), start), fn(tf.zeros([]), start)
            assert (float(one), counted, type(found)) == (float(other), found, int), f"from {start}"
    if sums is not doubled_in_a_loop:
        assert fn.stats().decisions_on_device >= 100, fn.explain()


def nine_times(x, i):
    return i + i + i + i + i + i + i + i + i


def grown_in_a_loop(x, i):
    y = x * 0.0
    while y < 10.0:
        y = y + 1.0
        i = i + 1
    return i


def doubled_in_a_loop_on_the_device(x, i):
    y = x * 0.0
    while y < 10.0:
        y = y + 1.0
        i = i + i
    return i


@pytest.mark.parametrize("sums", [nine_times, grown_in_a_loop, doubled_in_a_loop_on_the_device])
def test_numbers_of_ranges_have_no_end(backend, sums):
    """Nor do what nested loops make of them; what doubles with each iteration is Python's."""

    def function(x, start):
        total, end = tf.zeros([], tf.float64), start + 30
        for i in range(start, end):
            x = x + 1.0
            total = total + sums(x, i)
            if x > 20.0:
                break
        return total, i

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    with testing.always_follow():
        for start in (0, 1, 2, 3, 4, 5_000_000, 120_000_000, 260_000_000, 7):
            (one, last), (other, found) = function(tf.zeros([]), start), fn(tf.zeros([]), start)
            assert (float(one), last) == (float(other), found), f"from {start}"
    on_device = fn.stats().decisions_on_device
    assert on_device == 0 if sums is doubled_in_a_loop_on_the_device else on_device >= 4, fn.explain()


def test_a_counter_in_a_pair_is_a_number(backend):
    def function(x):
        t, pair = 0, (x, 0)
        while x < 100.0:
            x = x + 1.0
            t += 1
            pair = (x, t)
        return pair

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    for args in TRIPS:
        expected, found = function(*args), fn(*args)
        np.testing.assert_allclose(found[0], expected[0])
        assert type(found[1]) is int
        assert found[1] == expected[1]
    left_to_python(fn)


def test_seeds_are_not_used_up(backend):
    """A loop that draws is left to Python, and draws what it would."""

    def function(x):
        while tf.reduce_sum(x) < 100.0:
            x = x + tf.nn.dropout(tf.ones([4]), 0.5)
        return x, tf.random.uniform([2])

    tf.random.set_seed(7)
    expected = [function(tf.fill([4], float(i))) for i in range(6)]
    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    tf.random.set_seed(7)
    for i in range(6):
        for one, other in zip(fn(tf.fill([4], float(i))), expected[i], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    left_to_python(fn)


def test_layers_of_the_users_run_as_often_as_called(backend):
    """A layer's own Python is not tried out."""

    class Counting(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def call(self, x):
            self.calls += 1
            return x + 1.0

    plain, followed = Counting(), Counting()

    def function(x, layer):
        while tf.reduce_sum(x) < 20.0:
            x = layer(x)
        return x

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    for i in range(8):
        x = tf.fill([2], float(i))
        np.testing.assert_allclose(fn(x, followed), function(x, plain))
    assert followed.calls == plain.calls
    left_to_python(fn)


def test_lists_that_a_loop_replaces(backend):
    """A name keeps its list where the loop does not come to replace it."""

    def function(x):
        items = [x]
        before = items
        while x < 100.0:
            if x > 200.0:
                items = [x]
            x = x + 1.0
        return items is before, x

    same(function, TRIPS, backend, on_device=False)


def test_private_names(backend):
    """A class mangles names that begin with two underscores."""

    class Holder:
        def run(self, x):
            __by = 5.0
            while x < 100.0:
                x = x + __by
            return x

    same(Holder().run, TRIPS, backend, on_device=False)


def test_modules_that_compute_their_attributes(backend):
    """A module's `__getattr__` runs as often as it is asked."""
    import types

    module = types.ModuleType("computing")
    asked = []
    module.__getattr__ = lambda name: asked.append(name) or 1.0

    def function(x):
        while x < 100.0:
            x = x + module.by
        return x

    same(function, TRIPS, backend, lambda: asked.count("by"), on_device=False, reset=asked.clear)


def test_ufuncs_of_python_functions(backend):
    """`np.frompyfunc` makes a ufunc of anything."""
    ran = []
    by = np.frompyfunc(lambda v: ran.append(1) or v, 1, 1)

    def function(x):
        while x < 100.0:
            x = x + float(by(1.0))
        return x

    same(function, TRIPS, backend, lambda: len(ran), on_device=False, reset=ran.clear)


def test_functions_that_xla_compiles_keep_xlas_arithmetic(backend):
    """`tf.function(jit_compile=True)` is called as what it is."""

    @tf.function(jit_compile=True)
    def compiled(x):
        return tf.cast(x * 1e18, tf.int32)

    fn = coexec.function(lambda x: compiled(x + 1.0) + 1, jit_compile=backend == "xla", control_flow=True)
    for (x,) in scalars(1, 2, 3, 4, 5):
        np.testing.assert_array_equal(fn(x), compiled(x + 1.0) + 1)
    assert fn.stats().followed == 4
    assert "is compiled by XLA" in fn.explain()
